"""`piper diff`: two strategies, or two saved plans, side by side."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from piper.cli.options import AsJson, ClusterName, CostsFile

if TYPE_CHECKING:
    from piper.ir.chunk import CapturedModel
    from piper.plan.plan import Plans

EITHER = "A recipe, a file that `piper plan --text` wrote, or a run's folder."


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two sides: its plans, and the outline of its model where that is known."""

    name: str
    plans: "Plans"
    outline: "CapturedModel | None" = None


def diff(
    a: Annotated[str, typer.Argument(help=EITHER, metavar="A")],
    b: Annotated[str, typer.Argument(help=EITHER, metavar="B")],
    cluster: ClusterName = None,
    costs: CostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare two strategies: step time, bubble, bytes, memory, and which nodes moved."""
    from piper.cli.diff_report import Compared, compared_report, print_compared
    from piper.cli.prices import prices_of
    from piper.simulate.costs import Unit
    from piper.simulate.difference import difference
    from piper.simulate.simulate import simulate

    prices = prices_of(cluster, costs)
    sides = [side_of(name) for name in (a, b)]
    timed = all(side.outline is not None for side in sides)
    for side in sides:
        if side.outline is not None:
            prices.check(side.outline)
    clock = prices.costs if timed else Unit()
    compared = Compared(
        names=(a, b),
        plans=(sides[0].plans, sides[1].plans),
        simulations=(
            simulate(sides[0].plans, sides[0].outline, clock),
            simulate(sides[1].plans, sides[1].outline, clock),
        ),
        difference=difference(sides[0].plans, sides[1].plans),
        clock=prices.name if timed else "",
    )
    if as_json:
        sys.stdout.write(json.dumps(compared_report(compared)) + "\n")
    else:
        print_compared(compared, Console(highlight=False, soft_wrap=True))


def side_of(name: str) -> Side:
    """Compile a recipe, or read plans from a file or from a run's folder with its costs."""
    path = Path(name) / "plan.txt" if Path(name).is_dir() else Path(name)
    if path.is_file():
        from piper.plan.text import read_plans
        from piper.view.provenance import read_background

        plans = read_plans(read(path), str(path))
        kept = read_background(path.parent, plans) if Path(name).is_dir() else None
        return Side(name=name, plans=plans, outline=kept.outline if kept else None)
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe

    program = compile(load_recipe(name))
    return Side(name=name, plans=program.plans, outline=program.outline)


def read(path: Path) -> str:
    """Read the text of a file; the reader of plans refuses one that is not text."""
    return path.read_bytes().decode("utf-8", errors="replace")
