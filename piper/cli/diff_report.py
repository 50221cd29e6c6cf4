"""The report of `piper diff` on two sets of plans: as tables for people, as one object for programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from piper.cli.plan_report import moved
from piper.ir.devices import show
from piper.ir.format import percent, seconds, size
from piper.plan.plan import Plans
from piper.simulate.difference import Difference, Seat
from piper.simulate.simulate import Simulation

MOST_NODES = 8  # shown of each kind of change


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


def compared_report(compared: Compared) -> dict[str, object]:
    """Return what `--json` prints."""
    changes = compared.difference
    sides = zip(("a", "b"), compared.names, compared.plans, compared.simulations, strict=True)
    return {
        "clock": compared.clock or "units",
        **{side: {"name": name, **summary(plans, found)} for side, name, plans, found in sides},
        "only_a": list(changes.gone),
        "only_b": list(changes.new),
        "moved": [{"node": m.node, "a": seat(m.before), "b": seat(m.after)} for m in changes.moved],
        "shifted": [
            {"node": s.node, "device": s.device, "a": s.before, "b": s.after} for s in changes.shifted
        ],
    }


def seat(found: Seat) -> dict[str, object]:
    """Return where a node runs, as an object."""
    return {"devices": show(found.devices), "stream": found.stream}


def print_compared(compared: Compared, console: Console) -> None:
    """Print both side by side, then which nodes moved."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
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


def place(found: Seat) -> str:
    """Return where a node runs, in words."""
    return f"{show(found.devices)} {found.stream}"


def print_some(title: str, nodes: Sequence[str], console: Console) -> None:
    """Print the first of some nodes, and how many there are."""
    if not nodes:
        return
    console.print(f"{title}: {len(nodes)}", style="bold")
    for node in nodes[:MOST_NODES]:
        console.print(f"  {node}", markup=False)
    if len(nodes) > MOST_NODES:
        console.print(f"  ... and {len(nodes) - MOST_NODES} more: --json has all")
