"""The data of the page, as one object of columns: small, and quick to read in a browser."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, log10

from piper.ir.devices import show
from piper.ir.format import count, seconds
from piper.ir.ids import AGAIN, Phase, SlotId
from piper.ir.json_fields import to_json
from piper.plan.instr import Instr
from piper.plan.ops import OPS, TRAVELS
from piper.plan.plan import Plan
from piper.simulate.account import MemoryUse, Timeline, account_of, mean_seconds, memory_of
from piper.view.cells import Pipeline, of_plans
from piper.view.provenance import Subject
from piper.view.svg import DARK, LIGHT

DIGITS = 7  # of the longest time: finer than a pixel of any screen
MOST_AT_PEAK = 8  # slots that are listed as live at the peak
MOST_LOSSES = 2000  # points of the loss curve: more than a screen has pixels
MOST_GROUPS = 4  # of a communicator that are listed
Columns = dict[str, object]
NETWORK = {"needsNothing": False, "carries": True, "computes": False}


class Table(dict[object, int]):
    """A table of values that repeat: each is stored once and referred to by its number."""

    def __missing__(self, value: object) -> int:
        return self.setdefault(value, len(self))


class TickScale:
    """Converts times to whole numbers of ticks, of which the longest time has `DIGITS` digits."""

    def __init__(self, subject: Subject) -> None:
        ends = [subject.planned.step, *(timeline.end for timeline in subject.measured.values())]
        longest = max(ends)
        self.rate = 10.0 ** (DIGITS - ceil(log10(longest))) if longest > 0 else 1.0  # ticks in a second

    def __call__(self, seconds: float) -> int:
        return round(seconds * self.rate)

    def columns(self, timeline: Timeline) -> Columns:
        """Return the start, the length and the wait of each instruction, in ticks."""
        return {
            "start": [self(span.start) for span in timeline.spans],
            "length": [self(span.end - span.start) for span in timeline.spans],
            "waited": [self(span.waited) for span in timeline.spans],
        }


def facts_of(subject: Subject) -> Columns:
    """Return all data of the page."""
    clock, nodes, origins = TickScale(subject), Table(), Table()
    named = {ins.node for plan in subject.plans for ins in plan.instrs}
    touched = Counter(chain(*(subject.origins.get(node, ()) for node in named)))  # nodes, by directive
    pipeline = of_plans(subject.plans, subject.tags, subject.title, subject.orderings)
    programs = [
        {
            **instruction_facts(subject, plan, nodes, origins),
            **clock.columns(subject.planned.timelines[number]),
            "memory": memory_facts(subject.planned.memories[number], clock),
            "usable": subject.usable[number],
        }
        for number, plan in enumerate(subject.plans)
    ]
    measured: Columns = {}
    for device, timeline in sorted(subject.measured.items()):
        memory = memory_facts(memory_of(subject.plans.of(device), timeline), clock)
        measured[str(device)] = {**clock.columns(timeline), "end": clock(timeline.end), "memory": memory}
    return {
        "title": subject.title,
        "clock": subject.clock,
        "about": subject.about,
        "ticks": clock.rate,
        "step": clock(subject.planned.step),
        "bubble": round(subject.planned.bubble, 6),
        "devices": subject.devices,
        "strategy": [{**to_json(one), "nodes": touched[i]} for i, one in enumerate(subject.strategy)],
        "losses": loss_facts(subject.losses),
        "source": subject.source,
        "sourceName": subject.source_name,
        "pipeline": pipeline_facts(pipeline),
        "idles": two_idles(subject, pipeline),
        "compared": planned_and_measured(subject),
        "programs": programs,
        "path": [[link.program, link.place, link.reason] for link in subject.planned.path],
        "comms": list(comm_facts(subject)),
        "measured": measured,
        "nodes": [*nodes],
        "origins": [*origins],
        "ops": op_facts(),
        "colours": {"light": to_json(LIGHT), "dark": to_json(DARK)},
    }


def loss_facts(losses: Sequence[tuple[int, float]]) -> Columns | None:
    """Return the steps and losses of a run, of a long run every so many. None: there are none."""
    if not losses:
        return None
    shown = [*losses[:: ceil(len(losses) / MOST_LOSSES)]]
    if shown[-1] != losses[-1]:
        shown.append(losses[-1])
    return {"step": [step for step, _ in shown], "loss": [loss for _, loss in shown]}


def op_facts() -> Columns:
    """Return the words for each operation, and for each collective of a sharded region."""
    found: Columns = {
        op: {
            "label": known.label,
            "short": known.caption,
            "needsNothing": known.needs_nothing,
            "carries": known.communicates or known.hands_on,
            "computes": known.takes == "device",
        }
        for op, known in OPS.items()
    }
    for op, travels in TRAVELS.items():
        found.setdefault(op, {"label": op.replace("_", "-"), "short": OPS[travels].caption, **NETWORK})
    return found


def pipeline_facts(pipeline: Pipeline) -> Columns:
    """Return the rows of the pipeline grid, with a column for each property of their cells."""
    return {
        "names": list(pipeline.names),
        "end": pipeline.end,
        "idle": round(pipeline.idle, 6),
        "shared": pipeline.stages_share_rows,
        "rows": [
            {
                "start": [cell.start for cell in row],
                "cost": [cell.cost for cell in row],
                "phase": [AGAIN if cell.again else cell.phase for cell in row],
                "stage": [cell.stage for cell in row],
                "microbatch": [cell.microbatch for cell in row],
                "pair": [cell.pair for cell in row],
                "places": [cell.places for cell in row],
            }
            for row in pipeline.rows
        ],
    }


def instruction_facts(subject: Subject, plan: Plan, nodes: Table, origins: Table) -> Columns:
    """Return the instructions of one program in columns, and the edges between them."""
    streams, ops, comms, microbatches, args, indices = (Table() for _ in range(6))
    shades = [shade_of(ins) for ins in plan.instrs]
    names = [pattern(ins.node, subject.plans.axes) for ins in plan.instrs]
    columns: Columns = {
        "op": [ops[ins.does] for ins in plan.instrs],
        "node": [nodes[template] for template, _ in names],
        "index": [indices[index] for _, index in names],
        "stream": [streams[ins.stream] for ins in plan.instrs],
        "comm": [-1 if ins.comm is None else comms[ins.comm] for ins in plan.instrs],
        "nbytes": [ins.nbytes if ins.comm else 0 for ins in plan.instrs],
        "arg": [args[caption(ins) if ins.op == "compute" else ""] for ins in plan.instrs],
        "phase": [AGAIN if shade.again else shade.phase or "" for shade in shades],
        "microbatch": [microbatches[".".join(map(str, shade.part))] for shade in shades],
        "origin": [origins[subject.origins.get(ins.node, ())] for ins in plan.instrs],
    }
    tables = {"ops": ops, "streams": streams, "commNames": comms, "microbatches": microbatches, "args": args}
    return {
        "devices": list(plan.devices),
        "name": show(plan.devices),
        **columns,
        **{name: [*table] for name, table in tables.items()},
        "indices": [*indices],
        "data": [*chain(*data_edges(plan))],
        "temporal": [*chain(*temporal_edges(subject, plan))],
    }


def pattern(node: str, axes: Iterable[str]) -> tuple[str, str]:
    """Split a node's name into a template and its indices: `F[PP=0 MB=3]` is `F[PP=0 MB=@]` and `3`.

    Most names of a large page differ only in their microbatch, so templates make the page small.
    """
    found: list[str] = []
    for axis in axes:
        before, *pieces = node.split(f"{axis}=")
        node = before
        for piece in pieces:
            rest = piece.lstrip("0123456789")
            found.append(piece[: len(piece) - len(rest)])
            node += f"{axis}=@{rest}"
    return node, ",".join(found)


def data_edges(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield an edge from the instruction that wrote a slot to each that reads it, as places in the plan."""
    writer: dict[SlotId, int] = {}
    for place, ins in enumerate(plan.instrs):
        yield from ((source, place) for source in sorted({writer[s] for s in ins.reads if s in writer}))
        writer.update(dict.fromkeys(ins.writes, place))


def temporal_edges(subject: Subject, plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Yield the temporal edges within a plan: two places, and the number of the directive behind them."""
    places: dict[str, int] = {}
    for place, ins in enumerate(plan.instrs):
        places.setdefault(ins.node, place)
    for first, then, by in subject.temporal:
        if first in places and then in places:
            yield places[first], places[then], by


def memory_facts(memory: MemoryUse, clock: TickScale) -> Columns:
    """Return a device's memory over time, with only the times at which it changes."""
    times: list[int] = []
    live: list[int] = []
    for time, now in zip(memory.times, memory.live, strict=True):
        if not live or live[-1] != now:
            times.append(clock(time))
            live.append(now)
    return {
        "resident": memory.resident,
        "times": times,
        "live": live,
        "peak": memory.peak,
        "peakAt": memory.peak_at,
        "atPeak": [list(entry) for entry in memory.at_peak[:MOST_AT_PEAK]],
        "more": max(0, len(memory.at_peak) - MOST_AT_PEAK),
    }


def comm_facts(subject: Subject) -> Iterator[Columns]:
    """Yield the bytes of each communicator and operation in a step, over all devices, largest first."""
    carried: dict[tuple[str, str], tuple[int, int]] = {}
    for plan in subject.plans:
        for ins in plan.instrs:
            if ins.comm is not None and OPS[ins.op].sends:
                nbytes, times = carried.get((ins.comm, ins.does), (0, 0))
                carried[ins.comm, ins.does] = (nbytes + ins.nbytes * len(plan.devices), times + 1)
    for (name, op), (nbytes, times) in sorted(carried.items(), key=lambda item: (-item[1][0], item[0])):
        groups = subject.plans.comms[name].groups
        shown = [show(group) for group in groups[:MOST_GROUPS]]
        more = [f"{len(groups) - MOST_GROUPS} more"] if len(groups) > MOST_GROUPS else []
        yield {"name": name, "op": op, "groups": shown + more, "nbytes": nbytes, "times": times}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """The phase and microbatch an instruction works for; neither, if it works for the whole step."""

    phase: Phase | None
    part: tuple[int, ...]
    again: bool = False  # a recomputed forward, or an instruction that serves one


def shade_of(ins: Instr) -> Shade:
    """Return the phase and microbatch of the pass that an instruction is or works for, or of its values."""
    if ins.run is not None:
        return Shade(phase=ins.run.phase, part=tuple(i for _, i in ins.run.part), again=ins.run.again)
    phase: Phase | None = "F" if ins.op == "load" else None
    if OPS[ins.op].pattern == "pair":
        (moved,) = ins.reads or ins.writes
        phase = "F" if moved.kind == "output" else "B"
    part = ins.part or next((slot.part for slot in (*ins.reads, *ins.writes) if slot.part), ())
    return Shade(phase=phase, part=tuple(index for _, index in part))


def caption(ins: Instr) -> str:
    """Return an instruction in one or two words, for its bar."""
    if ins.op == "compute":
        run = ins.computes
        return f"{AGAIN if run.again else run.phase} {run.chunk}"
    return OPS[ins.travels_as].caption


SHARED = {  # by launcher: what devices share on CPUs, and the plan does not know
    "inline": "Here the devices are threads of one process, which share cores and the interpreter's lock.",
    "local": "Here the devices are processes of one machine, which share its cores.",
}
KINDS = ("computing", "communication that no computing hides", "waiting and gaps")


def two_idles(subject: Subject, pipeline: Pipeline) -> str:
    """Return why devices idle for another share of simulated time than of units. Empty: there is one."""
    if len(subject.devices) == 1:
        return ""
    simulated = subject.planned
    step = simulated.step or 1.0
    _, exposed, _ = simulated.mean
    return (
        "In units a backward takes twice a forward and transfers take nothing: the schedule alone leaves "
        f"devices idle for {share(pipeline.idle)}. In the simulated time of {subject.clock} they are idle "
        f"for {share(simulated.bubble)}: {share(exposed / step)} in communication that no computing hides, "
        "the rest while they wait for passes of other devices, which are not all equally long."
    )


def planned_and_measured(subject: Subject) -> str:
    """Return how a measured step differs from the planned one, and why. Empty: nothing was measured."""
    if not subject.measured:
        return ""
    planned, took = subject.planned.step, max(line.end for line in subject.measured.values())
    programs = {device: n for n, plan in enumerate(subject.plans) for device in plan.devices}
    before = mean_seconds([subject.planned.accounts[programs[device]] for device in subject.measured])
    after = mean_seconds(
        [account_of(subject.plans.of(device), line, took) for device, line in subject.measured.items()]
    )
    parts = "; ".join(
        f"{kind} {seconds(now)} (planned {seconds(then)})"
        for kind, now, then in zip(KINDS, after, before, strict=True)
    )
    most = max(range(len(KINDS)), key=lambda kind: abs(after[kind] - before[kind]))
    return (
        f"Measured {seconds(took)}, planned {seconds(planned)}: {took / planned:.2g} times. On average over "
        f"{count(len(subject.measured), 'measured device')}: {parts}. Most of the difference is "
        f"{KINDS[most]}. The plan takes its times from {subject.clock} and assumes that each device has its "
        f"processor to itself and that the host is never late. {SHARED.get(subject.on, '')}"
    ).strip()


def share(value: float) -> str:
    """Return a fraction as text, with the digits that the page shows."""
    return f"{100 * value:.{1 if value < 0.0995 else 0}f} %"
