"""Simulates a step from plans and costs: the times of all instructions, the critical path, the throughput."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.format import percent
from piper.ir.ids import Pass
from piper.plan.groups import kinds_of_step
from piper.plan.ops import Op
from piper.plan.plan import Plan, Plans
from piper.process.gc_pause import no_collection
from piper.simulate.account import Account, MemoryUse, Span, Timeline, account_of, mean_seconds, memory_of
from piper.simulate.costs import Costs
from piper.simulate.engine import NO_INSTRUCTION, Engine, InstructionCosts, weave

TOKENS = ("tokens", "input_ids")  # the fields whose elements are tokens, where a batch has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What a step trains on and computes, and what all devices together could compute."""

    amount: int  # of a global batch
    unit: str  # "tokens", or "samples" of a batch without tokens
    flops: float  # of the model
    peak: float | None = None  # FLOP/s of all devices. None: not known

    def mfu(self, step: float) -> float | None:
        """Return the model FLOP/s utilisation of a step of so many seconds. None: the peak is not known."""
        return None if self.peak is None or not step else self.flops / (self.peak * step)

    def text(self, step: float) -> str:
        """Return the throughput for people: `52,000 tokens/s, MFU 41 %`."""
        rate = f"{self.amount / step:,.0f} {self.unit}/s"
        mfu = self.mfu(step)
        return rate if mfu is None else f"{rate}, MFU {percent(mfu, 1)}"


def amount_of(shapes: Mapping[str, Sequence[int]]) -> tuple[int, str]:
    """Return how much a global batch holds, and of what, from the shapes of its fields."""
    tokens = next((prod(shapes[name]) for name in TOKENS if name in shapes), None)
    if tokens is not None:
        return tokens, "tokens"
    return next((shape[0] for shape in shapes.values()), 0), "samples"


def model_flops(plans: Plans, outline: CapturedModel) -> float:
    """Return the FLOPs of the model in a step, over all devices. Recomputation does not count."""
    known = {chunk.name: float(flops_of(chunk)) for chunk in outline.chunks}
    return sum(
        known[ins.computes.chunk] * len(plan.devices)
        for plan in plans
        for ins in plan.instrs
        if ins.op == "compute" and ins.computes.phase == "F" and not ins.computes.again
    )


def flops_of(chunk: Chunk) -> int:
    """Return the FLOPs of a chunk on one microbatch: a backward takes at most twice those of the forward.

    What it takes beyond that are activations that it computes a second time.
    """
    forward = chunk.phases["F"].flops if "F" in chunk.phases else 0
    halves: tuple[Phase, ...] = ("B",) if "B" in chunk.phases else ("BI", "BW")
    return forward + min(sum(chunk.phases[p].flops for p in halves if p in chunk.phases), 2 * forward)


Reason = Literal["first", "stream", "event", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathNode:
    """One plan node on the critical path, and why it did not start earlier."""

    program: int
    place: int
    node: str
    op: Op
    run: Pass | None  # the pass that it computes, or works for
    start: float
    end: float
    reason: Reason  # it began the step; its stream was busy; it needs a value; a peer was ready last


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One simulated step of a job. Values by program hold for each of the program's devices."""

    step: float  # seconds, or units
    timelines: tuple[Timeline, ...]
    accounts: tuple[Account, ...]
    memories: tuple[MemoryUse, ...]
    path: tuple[PathNode, ...]  # the critical path

    def __repr__(self) -> str:
        peak = max((memory.peak for memory in self.memories), default=0)
        return f"Simulation(step {self.step:g} s, bubble {self.bubble:.1%}, peak {peak} bytes)"

    @property
    def bubble(self) -> float:
        """Return the fraction of all devices' time in which nothing computes."""
        weights = [len(timeline.devices) for timeline in self.timelines]
        idle = sum(n * account.bubble for n, account in zip(weights, self.accounts, strict=True))
        return idle / (self.step * sum(weights)) if self.step else 0.0

    @property
    def mean(self) -> tuple[float, float, float]:
        """Return a device's mean seconds of computing, of exposed communication, and of the rest."""
        return mean_seconds(self.accounts, [len(timeline.devices) for timeline in self.timelines])


def simulate(
    plans: Plans, outline: CapturedModel | None, costs: Costs, *, together: Sequence[Sequence[str]] = ()
) -> Simulation:
    """Run plans on a simulated clock, each program once for all its devices.

    outline: what the chunks cost. None: for unit costs, so that plans read from their text can be simulated.
    A send waits for its receive, as gloo's and NCCL's do.
    together: groups of nodes. On a device, no node of a group starts before all can. The tables of papers
    count an overlapped pair this way. Our runtime does not wait like this, and its bubbles are smaller.
    """
    chunks: Mapping[str, Chunk] = {chunk.name: chunk for chunk in outline.chunks} if outline else {}
    with no_collection():
        graph = weave(plans, together)
        engine = Engine(graph, InstructionCosts(graph, chunks, costs), costs)
        engine.run()
        step = max(engine.end, default=0.0)
        timed = [(plan, *times_of(engine, number, plan)) for number, plan in enumerate(plans)]
        return Simulation(
            step=step,
            timelines=tuple(timeline for _, timeline, _ in timed),
            accounts=tuple(account_of(plan, times, step, contention) for plan, times, contention in timed),
            memories=tuple(memory_of(plan, timeline) for plan, timeline, _ in timed),
            path=critical_path(engine),
        )


def simulate_cycle(plans: Plans, outline: CapturedModel | None, costs: Costs) -> list[tuple[int, float]]:
    """Return how long the steps take from one average of groups that train apart to the next.

    Each entry is a number of steps that are alike, and the seconds of one. The longest come first.
    """
    steps = [(count, simulate(kind, outline, costs).step) for count, kind in kinds_of_step(plans)]
    return sorted(steps, key=lambda entry: -entry[1])


def simulate_alone(plans: Plans, outline: CapturedModel, costs: Costs, device: int) -> Simulation:
    """Simulate the program of one device as if its peers were always ready, as `--on rank:N` runs it."""
    return simulate(replace(plans, plans=(plans.of(device),)), outline, costs)


def times_of(engine: Engine, program: int, plan: Plan) -> tuple[Timeline, float]:
    """Return when one program ran, and the extra time its communications took because they shared links."""
    spans: list[Span] = []
    contention = 0.0
    first = engine.graph.first[program]
    for number in range(first, first + len(plan.instrs)):
        start, end, meeting = engine.start[number], engine.end[number], engine.graph.meeting[number]
        spans.append(Span(start=start, end=end, waited=start - engine.ready[number]))
        if meeting >= 0:
            contention += max(0.0, end - start - engine.nominal[meeting])
    return Timeline(devices=plan.devices, spans=tuple(spans)), contention


def critical_path(engine: Engine) -> tuple[PathNode, ...]:
    """Return the chain in which each instruction started when the one before it ended, in order of time."""
    if not engine.end:
        return ()
    graph = engine.graph
    path: list[PathNode] = []
    at = max(range(len(engine.end)), key=lambda number: (engine.end[number], -number))
    while at != NO_INSTRUCTION:
        meeting, ins, program = graph.meeting[at], graph.instrs[at], graph.program[at]
        late = at if meeting < 0 else engine.late[meeting]  # who was ready last, of a communication
        before = engine.cause[late]
        reason: Reason = "first"
        if before != NO_INSTRUCTION:
            same = graph.instrs[before].stream == graph.instrs[late].stream
            reason = "peer" if graph.program[late] != program else "stream" if same else "event"
        path.append(
            PathNode(
                program=program,
                place=at - graph.first[program],
                node=ins.node,
                op=ins.op,
                run=ins.run,
                start=engine.start[at],
                end=engine.end[at],
                reason=reason,
            )
        )
        at = before
    return tuple(reversed(path))
