"""Simulates a step from plans and costs: the times of all instructions, and the critical path."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from piper.ir.chunk import CapturedModel, Chunk
from piper.plan.plan import Plan, Plans
from piper.process.gc_pause import no_collection
from piper.simulate.account import Account, account_of
from piper.simulate.costs import Costs
from piper.simulate.critical_path import PathNode, critical_path
from piper.simulate.dependencies import InstructionCosts, weave
from piper.simulate.engine import Engine
from piper.simulate.memory import MemoryUse, memory_of
from piper.simulate.timeline import Span, Timeline


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
        timelines = tuple(timeline_of(engine, number, plan) for number, plan in enumerate(plans))
        accounts = tuple(
            account_of(plan, timelines[number], step, contention(engine, number, plan))
            for number, plan in enumerate(plans)
        )
        return Simulation(
            step=step,
            timelines=timelines,
            accounts=accounts,
            memories=tuple(memory_of(plan, times) for plan, times in zip(plans, timelines, strict=True)),
            path=critical_path(engine),
        )


def simulate_alone(plans: Plans, outline: CapturedModel, costs: Costs, device: int) -> Simulation:
    """Simulate the program of one device as if its peers were always ready, as `--on rank:N` runs it."""
    return simulate(replace(plans, plans=(plans.of(device),)), outline, costs)


def numbers_of(engine: Engine, program: int, plan: Plan) -> Iterable[int]:
    """Return the numbers of the instructions of one program."""
    first = engine.graph.first[program]
    return range(first, first + len(plan.instrs))


def timeline_of(engine: Engine, program: int, plan: Plan) -> Timeline:
    """Return the times of the instructions of one program."""
    start, end, ready = engine.start, engine.end, engine.ready
    spans = tuple(
        Span(start=start[n], end=end[n], waited=start[n] - ready[n])
        for n in numbers_of(engine, program, plan)
    )
    return Timeline(devices=plan.devices, spans=spans)


def contention(engine: Engine, program: int, plan: Plan) -> float:
    """Return the extra time one device's communications took because they shared links."""
    lost = 0.0
    for n in numbers_of(engine, program, plan):
        meeting = engine.graph.meeting[n]
        if meeting >= 0:
            lost += max(0.0, engine.end[n] - engine.start[n] - engine.nominal[meeting])
    return lost
