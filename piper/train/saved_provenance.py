"""The background of a program that a run saves for `piper view`: its strategy, origins and costs."""

from pathlib import Path

from piper.compiler import Program
from piper.directives.strategy_text import strategy_text
from piper.job import strategy_of
from piper.recipe import file_and_function
from piper.view.provenance import Provenance
from piper.view.subject import strategy_lines


def background_of(program: Program, recipe: str) -> Provenance:
    """Return the model, directives and costs of a program, and the text of its recipe."""
    file, function = file_and_function(recipe)
    return Provenance(
        title=f"{Path(file).name}:{function}",
        outline=program.outline,
        orderings=program.graph.orderings,
        strategy=strategy_lines(strategy_text(strategy_of(program.job)).splitlines()),
        origins={node.name: node.origin for node in program.work.sequence},
        temporal=program.work.temporal,
        source=Path(file).read_text(encoding="utf-8", errors="replace"),  # Python reads other encodings too
        source_name=Path(file).name,
    )
