"""`piper diff`: two strategies, or two saved plans, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from piper.cli.answer import Answer
from piper.cli.options import ClusterName, CostsFile
from piper.cli.plan import moved
from piper.cli.reports import DiffReport, SeatReport, SideReport
from piper.ir.chunk import CapturedModel
from piper.ir.devices import show
from piper.ir.format import percent, seconds, size, table_of
from piper.plan.plan import Plans
from piper.plan.text import read_plans
from piper.simulate.costs import Unit
from piper.simulate.difference import Difference, Seat, difference
from piper.simulate.prices import prices_of
from piper.simulate.simulate import Simulation, simulate
from piper.view.provenance import read_background

EITHER = "A recipe, a file that `piper plan --text` wrote, or a run's folder."
MOST_NODES = 8  # shown of each kind of change


def diff(
    a: Annotated[str, typer.Argument(help=EITHER, metavar="A")],
    b: Annotated[str, typer.Argument(help=EITHER, metavar="B")],
    cluster: ClusterName = None,
    costs: CostsFile = None,
) -> Answer:
    """Compare two strategies: step time, bubble, bytes, memory, and which nodes moved."""
    prices = prices_of(cluster, costs)
    (plans_a, model_a), (plans_b, model_b) = plans_and_model(a), plans_and_model(b)
    for model in (model_a, model_b):
        if model is not None:
            prices.check(model)
    timed = model_a is not None and model_b is not None
    clock = prices.costs if timed else Unit()
    compared = Compared(
        names=(a, b),
        plans=(plans_a, plans_b),
        simulations=(simulate(plans_a, model_a, clock), simulate(plans_b, model_b, clock)),
        difference=difference(plans_a, plans_b),
        clock=prices.name if timed else "",
    )
    return Answer(
        report=compared_report(compared),
        show=lambda: print_compared(compared, Console(highlight=False, soft_wrap=True)),
    )


def plans_and_model(name: str) -> tuple[Plans, CapturedModel | None]:
    """Compile a recipe, or read plans from a file, or from a run's folder with the model that it saved."""
    path = Path(name) / "plan.txt" if Path(name).is_dir() else Path(name)
    if path.is_file():
        text = path.read_bytes().decode("utf-8", errors="replace")  # the reader refuses what is not text
        plans = read_plans(text, str(path))
        kept = read_background(path.parent, plans) if Path(name).is_dir() else None
        return plans, kept.outline if kept else None
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe

    program = compile(load_recipe(name))
    return program.plans, program.outline


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two sets of plans with a simulated step of each."""

    names: tuple[str, str]
    plans: tuple[Plans, Plans]
    simulations: tuple[Simulation, Simulation]
    difference: Difference
    clock: str  # the cluster whose seconds are shown; empty: units, because plans alone have no costs


def summary(plans: Plans, simulation: Simulation) -> dict[str, float]:
    """Return the numbers that sum up a step."""
    return {
        "devices": len(plans.devices),
        "programs": len(plans),
        "instructions": sum(len(plan.instrs) * len(plan.devices) for plan in plans),
        "step": simulation.step,
        "bubble": simulation.bubble,
        "exposed": max(sum(account.exposed.values()) for account in simulation.accounts),
        "comm_bytes": sum(moved(plan) * len(plan.devices) for plan in plans),
        "peak_bytes": max(memory.peak for memory in simulation.memories),
        "resident_bytes": max(memory.resident for memory in simulation.memories),
    }


def compared_report(compared: Compared) -> DiffReport:
    """Return what `--json` prints."""
    changes = compared.difference
    a, b = map(side_report, compared.names, compared.plans, compared.simulations)
    return {
        "clock": compared.clock or "units",
        "a": a,
        "b": b,
        "only_a": list(changes.gone),
        "only_b": list(changes.new),
        "moved": [{"node": m.node, "a": seat(m.before), "b": seat(m.after)} for m in changes.moved],
        "shifted": [
            {"node": s.node, "device": s.device, "a": s.before, "b": s.after} for s in changes.shifted
        ],
    }


def side_report(name: str, plans: Plans, simulation: Simulation) -> SideReport:
    """Return one of both as an object."""
    return cast(SideReport, {"name": name, **summary(plans, simulation)})


def seat(where: Seat) -> SeatReport:
    """Return where a node runs, as an object."""
    return {"devices": show(where.devices), "stream": where.stream}


def print_compared(compared: Compared, console: Console) -> None:
    """Print both side by side, then which nodes moved."""
    table = table_of("", "A", "B", "B / A", left=("",))
    left, right = (summary(*side) for side in zip(compared.plans, compared.simulations, strict=True))
    time = seconds if compared.clock else units
    for label, key, shown in LINES:
        write = time if shown is None else shown
        ratio = f"{right[key] / left[key]:.2f}" if left[key] else ""
        table.add_row(label, write(left[key]), write(right[key]), ratio)
    console.print(f"A  {compared.names[0]}", markup=False)
    console.print(f"B  {compared.names[1]}", markup=False)
    if not compared.clock:
        console.print("In units, F = I = W = 1, communication free: plans in a file say no more of costs")
    console.print()
    console.print(table)
    console.print()
    print_changes(compared.difference, console)


def units(value: float) -> str:
    """Format a time in units."""
    return f"{value:g}"


LINES: tuple[tuple[str, str, Callable[[float], str] | None], ...] = (
    ("step", "step", None),
    ("bubble, all devices", "bubble", lambda part: percent(part, 1)),
    ("exposed communication, at most", "exposed", None),
    ("bytes sent, all devices", "comm_bytes", size),
    ("peak memory, at most", "peak_bytes", size),
    ("held between steps, at most", "resident_bytes", size),
    ("devices", "devices", units),
    ("programs", "programs", units),
    ("instructions, all devices", "instructions", units),
)


def print_changes(changes: Difference, console: Console) -> None:
    """Print which nodes are in one only, and which run elsewhere."""
    moved_nodes = [f"{m.node}: {place(m.before)} -> {place(m.after)}" for m in changes.moved]
    shifted = [f"{s.node} on device {s.device}: place {s.before} -> {s.after}" for s in changes.shifted]
    print_some("Only in A", changes.gone, console)
    print_some("Only in B", changes.new, console)
    print_some("On other devices, or another stream", moved_nodes, console)
    print_some("At another place in their device's order", shifted, console)
    if not (changes.gone or changes.new or changes.moved or changes.shifted):
        console.print("Every node runs on the same devices and streams, in the same order")


def place(where: Seat) -> str:
    """Return where a node runs, in words."""
    return f"{show(where.devices)} {where.stream}"


def print_some(title: str, nodes: Sequence[str], console: Console) -> None:
    """Print the first of some nodes, and how many there are."""
    if not nodes:
        return
    console.print(f"{title}: {len(nodes)}", style="bold")
    for node in nodes[:MOST_NODES]:
        console.print(f"  {node}", markup=False)
    if len(nodes) > MOST_NODES:
        console.print(f"  ... and {len(nodes) - MOST_NODES} more: --json has all")
