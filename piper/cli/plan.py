"""`piper plan`: a recipe, compiled and proven."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from piper.checkpoint.moves import peak_while_moving
from piper.cli.application import Answer, Compile, Recipe, StrategyFile, option
from piper.errors import ConfigError
from piper.ir.devices import show
from piper.ir.format import count, size, table_of
from piper.ir.ids import AGAIN
from piper.plan.memory_timeline import host_peak, timeline
from piper.plan.ops import OPS
from piper.plan.plan import Plan, Plans
from piper.plan.protected import survival
from piper.plan.text import show_plans
from piper.process.files import write_output
from piper.view.cells import grid, stage_tags

if TYPE_CHECKING:
    from piper.compiler import Program

MOST_PROGRAMS = 16  # shown in a table
MOST_INSTRUCTIONS = 8  # shown of each program, unless a device is asked for


def plan(
    recipe: Recipe,
    device: Annotated[int | None, option("Print this device's instructions.")] = None,
    why: Annotated[bool, option("Say what the compiler decided against, and why.", "--why")] = False,
    text: Annotated[Path | None, option("Write the plans in their text form to this file.")] = None,
    strategy: StrategyFile = None,
    compiled: Compile = False,
) -> Answer:
    """Compile a recipe, prove its plans and show them."""
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe

    program = compile(load_recipe(recipe, strategy), compile=compiled)
    if text is not None:
        write_output(text, show_plans(program.plans), "plans  seed=", "the plans")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    return Answer(
        report=plan_report(program), show=lambda: print_plan(program, console, device=device, why=why)
    )


def moved(plan: Plan) -> int:
    """Return the bytes one device sends in a step."""
    return sum(ins.nbytes for ins in plan.instrs if ins.comm is not None and OPS[ins.op].sends)


def host_moved(plan: Plan) -> int:
    """Return the bytes one device copies to its host in a step, for the time until it reads them again."""
    return sum(ins.nbytes for ins in plan.instrs if ins.op == "offload")


def plan_report(program: "Program") -> dict[str, object]:
    """Return what `--json` prints."""
    rows = {device: plan for plan in program.plans for device in plan.devices}
    peaks = {id(plan): timeline(plan).peak for plan in program.plans}
    each = [rows[device] for device in sorted(rows)]
    survives, held = survival(program.plans), [*map(host_peak, each)]
    report: dict[str, object] = {
        "devices": sorted(rows),
        "nodes": len(program.work.sequence),
        "instructions": [len(plan.instrs) for plan in each],
        "comm_bytes": [*map(moved, each)],
        "peak_bytes": [peaks[id(plan)] for plan in each],
    }
    if survives is not None:
        report["survives"] = asdict(survives)
    if any(held):
        report["offload_bytes"], report["host_bytes"] = [*map(host_moved, each)], held
    return report


def print_plan(program: "Program", console: Console, *, device: int | None, why: bool) -> None:
    """Print the grid, a table of what each device runs, sends and holds, and that the plans are proven."""
    plans = program.plans
    tags = stage_tags(program.outline, program.graph.orderings)
    again = any(ins.again for plan in plans for ins in plan.instrs)
    forwards = f"F forward, {AGAIN} forward again" if again else "F forward"
    console.print(f"Pipeline (stage, pass, part; {forwards}, B backward, I and W its halves)", style="bold")
    for row in grid(plans, tags).splitlines():
        cut = console.is_terminal and len(row) > console.width
        console.print(row[: console.width - 1] + "…" if cut else row, soft_wrap=True)
    console.print()
    print_programs(program, console)
    console.print()
    for kind, nbytes in sorted(bytes_by_kind(program).items()):
        console.print(f"{kind:15} {size(nbytes)} per step over all devices")
    if (survives := survival(plans)) is not None:
        console.print(str(survives))
    print_host(plans, console)
    if device is not None:
        print_device(program, console, device, most=None)
    else:
        for plan in plans.plans[:MOST_PROGRAMS]:
            print_device(program, console, plan.devices[0], most=MOST_INSTRUCTIONS)
    if why:
        console.print()
        for reason in plans.why or ("nothing was decided against the strategy",):
            console.print(f"why: {reason}")
    for shape, other in program.shapes.items():
        sizes = ", ".join(f"{name} {list(sizes)}" for name, sizes, _ in shape)
        peak = max(timeline(plan).peak for plan in other.plans)
        pairs, state_bytes = ((plans, other.plans), (other.plans, plans)), program.work.settings.state_bytes
        peaks = (peak_while_moving(*each, state_bytes) for each in pairs)
        moving = "" if other.plans.lie_in(plans) else f", {size(max(peaks))} in a move"
        console.print(f"also for {sizes}: at most {size(peak)} a device{moving}")
    for warning in program.warnings:
        console.print(f"\nWarning: {warning}")
    copied = "" if survives is None else ", everything that a step writes is copied before"
    console.print()
    numbers = {"device": len(plans.devices), "program": len(plans), "node": len(program.work.sequence)}
    what = ", ".join(count(number, what) for what, number in numbers.items())
    console.print(
        f"Proven: {what}. Every send meets its receive, nothing waits in a circle, every slot is "
        "written before it is read and freed once, every read sees the value that the model means, every "
        f"gradient holds each sample once{copied}."
    )


def print_host(plans: Plans, console: Console) -> None:
    """Print how much is offloaded, where anything is."""
    if held := max(map(host_peak, plans)):
        moving = sum(host_moved(plan) * len(plan.devices) for plan in plans)
        most = f"at most {size(held)} of the host's memory for a device"
        console.print(f"offloaded: {size(moving)} per step over all devices, {most}")


def print_programs(program: "Program", console: Console) -> None:
    """Print a table of the programs: what their devices do, send and hold."""
    plans = program.plans
    columns = ("devices", "instructions", "sent", "peak", "held", "at the peak")
    table = table_of(*columns, left=("devices", "at the peak"), wrap=columns)
    for plan in plans.plans[:MOST_PROGRAMS]:
        times = timeline(plan)
        counts = [str(len(plan.instrs)), size(moved(plan)), size(times.peak), size(times.resident)]
        table.add_row(show(plan.devices), *counts, plan.instrs[times.peak_at].node)
    console.print(table)
    if len(plans) > MOST_PROGRAMS:
        console.print(f"... and {len(plans) - MOST_PROGRAMS} programs more")


def bytes_by_kind(program: "Program") -> dict[str, int]:
    """Return the bytes sent in a step over all devices, by operation: of averages, in the mean of steps."""
    total: dict[str, int] = {}
    asked = program.plans.averaging
    for plan in program.plans:
        for ins in plan.instrs:
            if ins.comm is not None and ins.op != "recv":
                total[ins.does] = total.get(ins.does, 0) + ins.nbytes * len(plan.devices)
    if asked is not None and "average" in total:
        total["average"] = total["average"] * max(1, asked.overlap) // asked.every
    return total


def print_device(program: "Program", console: Console, device: int, *, most: int | None) -> None:
    """Print one device's instructions with the memory live at each, or the first of them."""
    try:
        plan = program.plans.of(device)
    except KeyError:
        raise ConfigError(
            f"there is no device {device}",
            by="piper plan",
            facts={"devices": ", ".join(show(plan.devices) for plan in program.plans)},
            hint="name one of the devices that the strategy uses",
        ) from None
    times = timeline(plan)
    console.print()
    console.print(f"Device {device}, in the order it issues", style="bold")
    for place, ins in enumerate(plan.instrs[:most]):
        waits = f"  waits {','.join(map(str, ins.waits))}" if ins.waits else ""
        signals = f"  signals {ins.signals}" if ins.signals is not None else ""
        comm = f"  over {ins.comm}" if ins.comm else ""
        moving = f"  {size(ins.nbytes)}" if ins.comm or ins.op in ("offload", "fetch") else ""
        what = f"{place:5}  {size(times.live[place]):>11}  {ins.stream:9} {ins.does:14} {ins.node}"
        console.print(f"{what}{comm}{moving}{waits}{signals}", soft_wrap=True)
    if most is not None and len(plan.instrs) > most:
        console.print(f"  ... and {len(plan.instrs) - most} more: --device {device}")
