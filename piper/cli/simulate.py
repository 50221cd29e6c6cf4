"""`piper simulate`: how long a step would take, and why."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING

from rich.console import Console

from piper.cli.application import Answer, ClusterName, Compile, CostsFile, Recipe, StrategyFile
from piper.ir.devices import show
from piper.ir.dtypes import DTYPES
from piper.ir.format import percent, seconds, size, table_of
from piper.ir.ids import AGAIN
from piper.ir.json_fields import to_json
from piper.plan.memory_timeline import host_peak
from piper.plan.ops import COMMUNICATION
from piper.plan.plan import Plans
from piper.plan.protected import survival
from piper.simulate.cluster import Cluster
from piper.simulate.measured import Prices, prices_of
from piper.simulate.simulate import PathNode, Simulation, Throughput, amount_of, model_flops, simulate_cycle
from piper.simulate.simulate import simulate as simulate_step

if TYPE_CHECKING:
    from piper.compiler import Program
    from piper.tuning.lengths import SimulatedMove

MOST_PROGRAMS = 16  # shown in a table
MOST_LIVE = 5  # tensors shown of those that are live at the peak
MOST_STRETCHES = 12  # of the critical path
NOTHING = 1e-4  # of a step: what is less is not worth a line
COLUMNS = ("devices", "busy", "bubble", "", "exposed", "contention", "peak")
REASONS = {
    "first": "begins the step",
    "stream": "its stream was busy until then",
    "event": "it waited for a value",
    "peer": "a peer was ready last",
}


def simulate(
    recipe: Recipe,
    cluster: ClusterName = None,
    costs: CostsFile = None,
    strategy: StrategyFile = None,
    compiled: Compile = False,
) -> Answer:
    """Simulate a step of a recipe: its time, bubble, exposed communication, peak memory, and why."""
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe

    prices = prices_of(cluster, costs)
    program = compile(load_recipe(recipe, strategy), compile=compiled)
    prices.check(program.outline)
    simulation = simulate_step(program.plans, program.outline, prices.costs)
    apart = program.plans.averaging is not None
    cycle = simulate_cycle(program.plans, program.outline, prices.costs) if apart else []
    simulated = SimulatedStep(
        plans=program.plans,
        simulation=simulation,
        prices=prices,
        throughput=throughput_of(program, prices.cluster),
        cycle=tuple(cycle),
        lengths=lengths_of(program, prices),
    )
    return Answer(
        report=simulation_report(simulated),
        show=lambda: print_simulation(simulated, Console(highlight=False, soft_wrap=True, markup=False)),
    )


def throughput_of(program: "Program", cluster: Cluster | None) -> Throughput:
    """Return what a step of a program trains on and computes."""
    from piper.runtime.batch import wanted_batch

    amount, unit = amount_of(wanted_batch(program).shapes)
    peak = None if cluster is None else cluster.peak(DTYPES[program.job.precision])
    return Throughput(
        amount=amount,
        unit=unit,
        flops=model_flops(program.plans, program.outline),
        peak=None if peak is None else peak * len(program.plans.devices),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStep:
    """A simulated step on batches of one length."""

    length: int
    limit: int | None  # of the strategy that it has
    step_s: float
    peak_bytes: float  # of the fullest device


Lengths = tuple[list[LengthStep], "list[SimulatedMove]", float | None]  # steps, moves, usable bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step with its plans and the costs that it was simulated with."""

    plans: Plans
    simulation: Simulation
    prices: Prices
    throughput: Throughput
    cycle: tuple[tuple[int, float], ...] = ()  # of groups that train apart: steps alike, and their time
    lengths: Lengths | None = None  # where each length has a strategy

    @property
    def mean_step(self) -> float:
        """Return the seconds of a step in the mean: of groups that train apart, not all steps average."""
        steps = sum(count for count, _ in self.cycle)
        return sum(count * each for count, each in self.cycle) / steps if steps else self.simulation.step

    @property
    def on_host(self) -> list[int]:
        """Return the most bytes of the host's memory that a device of each program uses."""
        return [host_peak(plan) for plan in self.plans]


def simulation_report(simulated: SimulatedStep) -> dict[str, object]:
    """Return what `--json` prints."""
    simulation = simulated.simulation
    program = {device: n for n, plan in enumerate(simulated.plans) for device in plan.devices}
    devices = sorted(program)
    rows = [program[device] for device in devices]
    accounts, memories = simulation.accounts, simulation.memories
    usable, survives = simulated.prices.usable(simulated.plans), survival(simulated.plans)
    report: dict[str, object] = {
        "on": simulated.prices.name,
        "step_s": simulation.step,
        "bubble": simulation.bubble,
        "mfu": simulated.throughput.mfu(simulated.mean_step),
        "devices": devices,
        "busy_s": [accounts[row].busy for row in rows],
        "bubble_s": [accounts[row].bubble for row in rows],
        "bubble_rate": [accounts[row].rate for row in rows],
        "exposed_s": [dict(accounts[row].exposed.items()) for row in rows],
        "communication_s": [dict(accounts[row].communication.items()) for row in rows],
        "contention_s": [accounts[row].contention for row in rows],
        "peak_bytes": [memories[row].peak for row in rows],
        "usable_bytes": [usable[row] for row in rows],
        "at_peak": [dict(memories[row].at_peak[:MOST_LIVE]) for row in rows],
        "critical_path": [
            {
                "node": link.node,
                "op": link.op,
                "device": simulated.plans.plans[link.program].devices[0],
                "start_s": link.start,
                "end_s": link.end,
                "reason": link.reason,
            }
            for link in simulation.path
        ],
    }
    rate = simulated.throughput.amount / simulated.mean_step
    if simulated.throughput.unit == "tokens":
        report["tokens_per_s"] = rate
    else:
        report["samples_per_s"] = rate
    if simulated.cycle:
        report["mean_step_s"] = simulated.mean_step
    if any(simulated.on_host):
        report["offloaded_bytes"] = [simulated.on_host[row] for row in rows]
    if survives is not None:
        report["host_bytes"] = [*survives.host_bytes]
    if simulated.lengths is not None:
        report["lengths"], report["moves"], _ = to_json(simulated.lengths)
    return report


def print_simulation(simulated: SimulatedStep, console: Console) -> None:
    """Print the step's time, where each device's time and memory go, and why the step is this long."""
    simulation = simulated.simulation
    devices = len(simulated.plans.devices)
    what = f"{devices} devices" if devices > 1 else "one device"
    where, bubble = simulated.prices.name, percent(simulation.bubble, 1)
    rate = simulated.throughput.text(simulated.mean_step)
    console.print(
        f"Step {seconds(simulation.step)} on {what} of {where}; bubble {bubble}; {rate}", style="bold"
    )
    if simulated.cycle:
        kinds = ", ".join(f"{count} of {seconds(each)}" for count, each in simulated.cycle)
        mean = seconds(simulated.mean_step)
        console.print(f"{mean} in the mean, because groups train apart: {kinds}")
    console.print()
    print_programs(simulated, console)
    print_exposed(simulated, console)
    rows = zip(simulated.plans, simulation.memories, simulated.prices.usable(simulated.plans), strict=True)
    plan, memory, usable = max(rows, key=lambda row: row[1].peak - (row[2] or 0.0))  # None: not known
    print_fit(f"a step on devices {show(plan.devices)}", memory.peak, usable, console)
    print_host(simulated, console)
    if (survives := survival(simulated.plans)) is not None:
        console.print(str(survives))
    print_peak(simulated, console)
    if simulated.lengths is not None:
        print_lengths(*simulated.lengths, console)
    console.print()
    print_path(simulated, console)


def print_programs(simulated: SimulatedStep, console: Console) -> None:
    """Print where each program's time and memory go."""
    simulation = simulated.simulation
    table = table_of(*COLUMNS, left=("devices",))
    rows = zip(simulated.plans, simulation.accounts, simulation.memories, strict=True)
    for plan, account, memory in islice(rows, MOST_PROGRAMS):
        table.add_row(
            show(plan.devices),
            seconds(account.busy),
            seconds(account.bubble),
            percent(account.rate, 1),
            amount(sum(account.exposed.values()), simulation.step),
            amount(account.contention, simulation.step),
            size(memory.peak),
        )
    console.print(table)
    if len(simulated.plans) > MOST_PROGRAMS:
        console.print(f"... and {len(simulated.plans) - MOST_PROGRAMS} programs more: --json has all")


def amount(spent: float, step: float) -> str:
    """Format a time; one that is negligible in the step is "none"."""
    return seconds(spent) if spent > step * NOTHING else "none"


def print_exposed(simulated: SimulatedStep, console: Console) -> None:
    """Print the communication that nothing hides, by kind, where there is most of it."""
    rows = zip(simulated.plans, simulated.simulation.accounts, strict=True)
    plan, worst = max(rows, key=lambda row: sum(row[1].exposed.values()))
    largest = sorted(worst.exposed.items(), key=lambda entry: (-entry[1], entry[0]))
    worth = [(op, spent) for op, spent in largest if spent > simulated.simulation.step * NOTHING]
    if worth:
        console.print()
        console.print(f"Exposed communication of {show(plan.devices)}", style="bold")
        for op, spent in worth:
            hidden = worst.communication[op] - spent
            console.print(f"  {seconds(spent):>10}  {op}, beside {seconds(hidden)} that computing hides")


def print_fit(what: str, peak: float, usable: float | None, console: Console) -> None:
    """Print what needs more memory than a device may use, if it does."""
    if usable is not None and peak > usable:
        console.print(f"Does not fit: in {what} a device would hold {size(peak)}, and may use {size(usable)}")


def print_host(simulated: SimulatedStep, console: Console) -> None:
    """Print how much of its host's memory the fullest node uses, and whether it has as much."""
    cluster = simulated.prices.cluster
    per = cluster.devices if cluster is not None else 1
    nodes: dict[int, int] = {}
    for plan, nbytes in zip(simulated.plans, simulated.on_host, strict=True):
        for device in plan.devices:
            nodes[device // per] = nodes.get(device // per, 0) + nbytes
    if not (nbytes := max(nodes.values())):
        return
    whose = "a device" if cluster is None else "the devices of a node"
    what = f"{size(nbytes)} of the host's memory for {whose}"
    if cluster is not None and cluster.host_memory is not None and nbytes > cluster.host_memory:
        console.print(f"Does not fit: {what}, which has {size(cluster.host_memory)}")
    else:
        console.print(f"offloaded: {what}")


def print_peak(simulated: SimulatedStep, console: Console) -> None:
    """Print what is live at the fullest device's peak."""
    rows = zip(simulated.plans, simulated.simulation.memories, strict=True)
    plan, memory = max(rows, key=lambda row: row[1].peak)
    console.print()
    console.print(f"Live at the peak of {show(plan.devices)}", style="bold")
    for name, nbytes in memory.at_peak[:MOST_LIVE]:
        console.print(f"  {size(nbytes):>10}  {name}")
    if len(memory.at_peak) > MOST_LIVE:
        rest = sum(nbytes for _, nbytes in memory.at_peak[MOST_LIVE:])
        console.print(f"  {size(rest):>10}  in {len(memory.at_peak) - MOST_LIVE} more")


def print_path(simulated: SimulatedStep, console: Console) -> None:
    """Print the critical path: how much of it is what, then its stretches in the order of time."""
    path, step = simulated.simulation.path, simulated.simulation.step
    console.print(
        "Why the step is this long: each of these could only start when the last had ended", style="bold"
    )
    parts: dict[str, float] = {}
    for link in path:
        kind: str = link.op
        if link.op == "compute" and link.run is not None:
            kind = AGAIN if link.run.again else link.run.phase
        parts[kind] = parts.get(kind, 0.0) + link.end - link.start
    for kind, spent in sorted(parts.items(), key=lambda entry: (-entry[1], entry[0])):
        if spent > step * NOTHING:
            console.print(f"  {percent(spent, step):>7}  {seconds(spent):>8}  {kind}")
    console.print()
    # A stretch is on one program, and either computation or communication.
    worth = (link for link in path if link.end > link.start)
    by = groupby(worth, key=lambda link: (link.program, link.op in COMMUNICATION))
    stretches = [each for _, links in by if spent_in(each := [*links]) > step * NOTHING]
    half, left_out = MOST_STRETCHES // 2, max(0, len(stretches) - MOST_STRETCHES)
    for number, stretch in enumerate(stretches):  # the first of them, and the last, which end the step
        if number == half and left_out:
            console.print(f"  ... {left_out} stretches more: --json has all nodes")
        if half <= number < half + left_out:
            continue
        first, devices = stretch[0], show(simulated.plans.plans[stretch[0].program].devices)
        what = first.op if first.op in COMMUNICATION else "computes"
        more = f" to {stretch[-1].node}, {len(stretch)} nodes" if len(stretch) > 1 else ""
        where = f"{seconds(first.start):>8}  {seconds(spent_in(stretch)):>8}  {devices:8}"
        console.print(f"  {where} {what:14} {first.node}{more}; {REASONS[first.reason]}")


def spent_in(stretch: Iterable[PathNode]) -> float:
    return sum(link.end - link.start for link in stretch)


def lengths_of(program: "Program", prices: Prices) -> Lengths | None:
    """Simulate a step of each length of a job, and the moves between them. None: it has one strategy."""
    from piper.job import limit_of
    from piper.tuning.lengths import programs_by_length, simulated_moves

    if limit_of(program.job) is None:
        return None
    programs = programs_by_length(program)
    steps: list[LengthStep] = []
    for length, one in programs.items():
        simulation = simulate_step(one.plans, one.outline, prices.costs)
        peak = max(memory.peak for memory in simulation.memories)
        limit = limit_of(one.job)
        steps.append(LengthStep(length=length, limit=limit, step_s=simulation.step, peak_bytes=peak))
    usable = [each for one in programs.values() for each in prices.usable(one.plans) if each is not None]
    return steps, simulated_moves(programs, prices.costs), min(usable, default=None)


def print_lengths(
    steps: list[LengthStep], moves: list["SimulatedMove"], usable: float | None, console: Console
) -> None:
    """Print the step of each length, the moves between them, and which of these do not fit."""
    console.print()
    console.print("Strategies by length", style="bold")
    table = table_of("length", "strategy up to", "step", "peak")
    for one in steps:
        table.add_row(str(one.length), str(one.limit), seconds(one.step_s), size(one.peak_bytes))
    console.print(table)
    if moves:
        console.print()
        console.print("Moves of the state before a step in another layout", style="bold")
        table = table_of("from", "to", "sent", "time", "peak")
        for move in moves:
            amounts = size(move.nbytes), seconds(move.seconds), size(move.peak)
            table.add_row(str(move.before), str(move.after), *amounts)
        console.print(table)
    for one in steps:
        print_fit(f"batches of length {one.length}", one.peak_bytes, usable, console)
    for move in moves:
        print_fit(f"a move from length {move.before} to {move.after}", move.peak, usable, console)
