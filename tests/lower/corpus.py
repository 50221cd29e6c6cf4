"""A corpus of plans: many strategies over chains, hand-drawn outlines, real models and recipes.

`python -m tests.lower.corpus FOLDER` writes every plan's text into a folder. Run it on two commits and compare
the folders to see what a change does to plans.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from piper.directives import apply
from piper.errors import PiperError
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.job import Job
from piper.lower.state import Settings
from piper.plan.text import show_plans
from piper.recipe import import_file, load_recipe
from tests.lower import outlines
from tests.lower.compositions import every, pairwise
from tests.lower.lowering import lower
from tests.lower.outlines import fitted
from tests.lower.random_strategies import strategy_of

RECIPES = Path(__file__).parents[2] / "recipes"
STRATEGIES = 20  # random ones for each outline, those that are errors included
OUTLINES: dict[str, Callable[[], CapturedModel]] = {
    "skips": outlines.skips,
    "skips-tangents": lambda: outlines.skips("tangents"),
    "normed": outlines.normed,
    "mixture": outlines.mixture,
    "mixture-tied": lambda: outlines.mixture(tied=True),
    "layered": outlines.layered,
    "frozen": outlines.frozen,
}


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def quick() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of plans that need no model: some chains, and random strategies."""
    cells = pairwise()
    for cell in (*cells[::2], *(replace(cell, again=True) for cell in cells[1::6])):
        yield f"chain {cell}", show_plans(cell.plans()[0])
    for name, make in OUTLINES.items():
        outline = make()
        for number in range(STRATEGIES):
            yield f"random {name} {number}", drawn(outline, number)


def drawn(outline: CapturedModel, number: int) -> str:
    """Return the plans of one random strategy, or the error that it is."""
    others = range(7 * number, 7 * number + number % 4)
    try:
        graph = apply(start(outline), strategy_of(outline, number, others))
        return show_plans(lower(graph, Settings(clip=bool(number % 2)), fitted(graph))[0])
    except PiperError as error:
        return f"{error}\n"


def slow() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the rest: all kinds of chains, the models of the zoo, the recipes."""
    from piper.compiler import compile
    from tests.runtime.grid import compiled
    from tests.runtime.test_matrix import cells

    for chain in every()[::29]:
        yield f"chain {chain}", show_plans(chain.plans()[0])
    for model in cells()[::61]:
        plain = replace(model, within=None, optimizer_within=None, optimizer="adamw", reduce="fp32", mask="")
        for cell in dict.fromkeys((plain, model)):
            yield f"zoo {cell}", show_plans(compiled(cell).plans)
    for path in sorted(RECIPES.glob("*.py")):
        for name in jobs_in(path):
            program = compile(load_recipe(f"{path}:{name}"), device="cpu")
            yield f"recipe {path.stem}:{name}", show_plans(program.plans)


def jobs_in(path: Path) -> list[str]:
    """Return the names of a recipe's functions that return a job."""
    own = {name: value for name, value in vars(import_file(path)).items() if inspect.isfunction(value)}
    return [name for name, maker in own.items() if maker.__annotations__.get("return") is Job]


def main(folder: Path) -> None:
    """Write the whole corpus into a folder, one file for each entry."""
    folder.mkdir(parents=True, exist_ok=True)
    for entries in (quick, slow):
        for name, text in entries():
            (folder / f"{name.replace('/', '_')}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
