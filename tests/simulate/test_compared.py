"""Two strategies side by side, in numbers: what is summed over devices, and what is divided by what."""

import io
from types import SimpleNamespace
from typing import cast

from rich.console import Console

from piper import at, replicate, schedules
from piper.cli.diff import UNITS, changes, print_compared, side_report
from piper.cli.plan import bytes_by_kind, moved
from piper.compiler import Program
from piper.directives import apply
from piper.ir.graph import start
from piper.simulate.costs import Unit
from piper.simulate.simulate import simulate
from piper.view.svg import hue
from tests.chain import chain
from tests.lower.lowering import lower
from tests.simulate.pipelines import pipeline


def test_bytes_are_those_of_all_devices() -> None:
    """Each of four replicas sends its gradient of 256 bytes round a ring twice, and a total of 24 bytes."""
    plans, work = lower(apply(start(chain(1, width=8)), [replicate(at(), range(4))]))
    found = side_report("", plans, simulate(plans, work.graph.outline, Unit()))
    assert moved(plans.of(0)) == 2 * 256 * 3 // 4 + 24
    assert found["comm_bytes"] == 4 * (384 + 24)
    assert bytes_by_kind(cast(Program, SimpleNamespace(plans=plans))) == {
        "all_reduce": 4 * 384,
        "total": 4 * 24,
    }
    assert (found["devices"], found["programs"]) == (4, 1)
    assert found["instructions"] == 4 * len(plans.of(0).instrs)


def test_the_second_is_told_in_parts_of_the_first() -> None:
    """1F1B on two stages takes (microbatches + 1) * 3 units: 15 for four of them, 9 for two."""
    (long, outline, _), (short, _, _) = (pipeline(schedules.one_f_one_b, 2, count) for count in (4, 2))
    compared = {
        "clock": UNITS,
        "a": side_report("long", long, simulate(long, outline, Unit())),
        "b": side_report("short", short, simulate(short, outline, Unit())),
        **changes(long, short),
    }
    console = Console(file=io.StringIO(), width=120, markup=False)
    print_compared(compared, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    steps = next(line.split() for line in lines if line.startswith("step"))
    assert steps == ["step", "15", "9", "0.60"]


def test_the_last_axis_turns_the_hues_fastest() -> None:
    assert [hue(part) for part in ((), (0,), (3,), (8,), (1, 3), (9, 10))] == [0, 0, 3, 0, 3, 2]
