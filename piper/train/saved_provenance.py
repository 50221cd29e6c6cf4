"""The background of a program that a run saves for `piper view`: its strategy, origins and costs."""

from dataclasses import fields
from pathlib import Path

from piper.compiler import Program, strategy_of
from piper.directives import Directive
from piper.recipe import file_and_function
from piper.view.provenance import Provenance
from piper.view.subject import said_by


def background_of(program: Program, recipe: str) -> Provenance:
    """Return the model, directives and costs of a program, and the text of its recipe."""
    file, function = file_and_function(recipe)
    return Provenance(
        title=f"{Path(file).name}:{function}",
        outline=program.outline,
        orderings=program.graph.orderings,
        strategy=said_by(strategy_text(strategy_of(program.job)).splitlines()),
        origins={node.name: node.origin for node in program.work.sequence},
        temporal=program.work.temporal,
        source=Path(file).read_text(encoding="utf-8", errors="replace"),  # Python reads other encodings too
        source_name=Path(file).name,
    )


def strategy_text(strategy: list[Directive]) -> str:
    """Return the directives one per line, with their arguments and where they were written."""
    lines = []
    for number, directive in enumerate(strategy):
        given = ", ".join(
            f"{field.name}={shown(value)}"
            for field in fields(directive)
            if field.name != "source" and (value := getattr(directive, field.name)) is not None
        )
        lines.append(f"{directive.title(number)}: {given}\n")
    return "".join(lines) or "one device\n"


def shown(value: object) -> str:
    """Format a directive's argument as its user would write it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)
