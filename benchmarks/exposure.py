"""Exposed communication of a device, by kind, in a step or in the overlapped part of one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from piper.ir.graph import Graph
from piper.ir.node import compute_name
from piper.plan.ops import OPS, Op
from piper.plan.plan import Plan
from piper.simulate.account import Interval, Span, merged, uncovered


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The hidden and exposed communication of some kinds within a window of a step, in seconds."""

    window: Interval
    computing: float  # something computes
    communication: float  # the sum over these communications
    exposed: float  # one of them is under way and nothing computes

    @property
    def share(self) -> float:
        """Return the exposed fraction of the communication."""
        return self.exposed / self.communication if self.communication else 0.0

    @property
    def seconds(self) -> float:
        """Return the length of the window."""
        return self.window[1] - self.window[0]


def exposure(
    plan: Plan, spans: Sequence[Span], ops: Collection[Op], window: Interval | None = None
) -> Exposure:
    """Add up the communication of some kinds on one device, hidden and exposed.

    spans: when each instruction of the plan ran, simulated or measured.
    window: None: the whole step.
    """
    timed = list(zip(plan.instrs, spans, strict=True))
    low, high = window or (min(span.start for span in spans), max(span.end for span in spans))

    def inside(span: Span) -> Interval:
        return max(low, span.start), min(high, span.end)

    busy = merged(inside(span) for ins, span in timed if OPS[ins.op].takes == "device")
    talking = [inside(span) for ins, span in timed if ins.op in ops]
    return Exposure(
        window=(low, high),
        computing=sum(end - start for start, end in busy),
        communication=sum(max(0.0, end - start) for start, end in talking),
        exposed=sum(uncovered(start, end, busy) for start, end in merged(talking)),
    )


def main_phase(graph: Graph, plan: Plan, spans: Sequence[Span]) -> Interval | None:
    """Return the time from the first to the last instruction of groups whose members overlap.

    These are the groups of an `order` that hold forwards and backwards, or several microbatches. None: the
    device runs no such group.
    """
    pairs = {
        compute_name(step.chunk, step.phase, step.part)
        for ordering in graph.orderings
        for group in ordering.groups
        if len({(step.phase == "F", step.part) for step in group}) > 1
        for step in group
    }
    times = [span for ins, span in zip(plan.instrs, spans, strict=True) if ins.node in pairs]
    if not times:
        return None
    return min(span.start for span in times), max(span.end for span in times)
