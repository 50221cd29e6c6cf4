"""`piper diff`: two strategies, or two saved plans, side by side."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from piper.cli.application import Answer, ClusterName, CostsFile
from piper.cli.plan import moved
from piper.ir.chunk import CapturedModel
from piper.ir.devices import show
from piper.ir.format import percent, seconds, size, table_of
from piper.plan.plan import Plan, Plans
from piper.plan.text import read_plans
from piper.simulate.costs import Unit
from piper.simulate.measured import prices_of
from piper.simulate.simulate import Simulation, simulate
from piper.view.provenance import read_background

EITHER = "A recipe, a file that `piper plan --text` wrote, or a run's folder."
MOST_NODES = 8  # shown of each kind of change
Chain = tuple[int, "Chain | None"]  # an index, and those before it
UNITS = "units"  # the clock of plans alone, which have no costs


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
    report = {
        "clock": prices.name if timed else UNITS,
        "a": side_report(a, plans_a, simulate(plans_a, model_a, clock)),
        "b": side_report(b, plans_b, simulate(plans_b, model_b, clock)),
        **changes(plans_a, plans_b),
    }
    return Answer(
        report=report,
        show=lambda: print_compared(report, Console(highlight=False, soft_wrap=True, markup=False)),
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


def side_report(name: str, plans: Plans, simulation: Simulation) -> dict[str, Any]:
    """Return the numbers that sum up a step."""
    return {
        "name": name,
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


def changes(first: Plans, second: Plans) -> dict[str, Any]:
    """Compare plans node by node; nodes are named by what they are, so equal names mean equal work."""
    before, after = seats(first), seats(second)
    return {
        "only_a": [node for node in before if node not in after],
        "only_b": [node for node in after if node not in before],
        "moved": [
            {"node": node, "a": seat, "b": after[node]}
            for node, seat in before.items()
            if node in after and after[node] != seat
        ],
        "shifted": [*shifts(first, second)],
    }


def seats(plans: Plans) -> dict[str, dict[str, str]]:
    """Return the devices and the stream of every node; for a transfer, its first stream."""
    devices: dict[str, set[int]] = {}
    streams: dict[str, str] = {}
    for plan in plans:
        for node in order(plan):
            devices.setdefault(node, set()).update(plan.devices)
        for ins in plan.instrs:
            streams.setdefault(ins.node, ins.stream)
    return {
        node: {"devices": show(tuple(sorted(found))), "stream": streams[node]}
        for node, found in devices.items()
    }


def shifts(first: Plans, second: Plans) -> Iterator[dict[str, object]]:
    """Yield the fewest nodes that must move to make one issue order the other, for a device per program."""
    there = {device: plan for plan in second for device in plan.devices}
    for plan in first:
        device = plan.devices[0]
        if device in there:
            left, right = order(plan), order(there[device])
            common = [node for node in left if node in right]
            place = {node: i for i, node in enumerate(n for n in right if n in left)}
            stay = longest_run([place[node] for node in common])
            for i, node in enumerate(common):
                if i not in stay:
                    yield {"node": node, "device": device, "a": i, "b": place[node]}


def order(plan: Plan) -> dict[str, None]:
    """Return the nodes of a plan in issue order."""
    return dict.fromkeys(ins.node for ins in plan.instrs)


def longest_run(places: Sequence[int]) -> set[int]:
    """Return the indices of a longest increasing subsequence."""
    ends: list[int] = []  # the smallest last value of an increasing subsequence of each length
    chains: list[Chain] = []  # and its indices, the last one first
    for i, value in enumerate(places):
        length = bisect_left(ends, value)
        ends[length : length + 1] = [value]
        chains[length : length + 1] = [(i, chains[length - 1] if length else None)]
    kept: set[int] = set()
    chain = chains[-1] if chains else None
    while chain is not None:
        last, chain = chain
        kept.add(last)
    return kept


def print_compared(report: Mapping[str, Any], console: Console) -> None:
    """Print both side by side, then which nodes moved."""
    table = table_of("", "A", "B", "B / A", left=("",))
    left, right = report["a"], report["b"]
    time = units if report["clock"] == UNITS else seconds
    for label, key, shown in LINES:
        write = shown or time
        ratio = f"{right[key] / left[key]:.2f}" if left[key] else ""
        table.add_row(label, write(left[key]), write(right[key]), ratio)
    console.print(f"A  {report['a']['name']}")
    console.print(f"B  {report['b']['name']}")
    if report["clock"] == UNITS:
        console.print("In units, F = I = W = 1, communication free: plans in a file say no more of costs")
    console.print()
    console.print(table)
    console.print()
    differing: dict[str, Sequence[str]] = {
        "Only in A": report["only_a"],
        "Only in B": report["only_b"],
        "On other devices, or another stream": [
            f"{m['node']}: {m['a']['devices']} {m['a']['stream']} -> {m['b']['devices']} {m['b']['stream']}"
            for m in report["moved"]
        ],
        "At another place in their device's order": [
            f"{s['node']} on device {s['device']}: place {s['a']} -> {s['b']}" for s in report["shifted"]
        ],
    }
    for title, nodes in differing.items():
        if nodes:
            console.print(f"{title}: {len(nodes)}", style="bold")
        for node in nodes[:MOST_NODES]:
            console.print(f"  {node}")
        if len(nodes) > MOST_NODES:
            console.print(f"  ... and {len(nodes) - MOST_NODES} more: --json has all")
    if not any(differing.values()):
        console.print("Every node runs on the same devices and streams, in the same order")


units = "{:g}".format  # a time in units, or a number
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
