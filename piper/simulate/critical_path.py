"""The critical path: the chain of instructions of which each started when the one before it ended."""

from dataclasses import dataclass
from typing import Literal

from piper.ir.ids import Pass
from piper.plan.ops import Op
from piper.simulate.engine import NO_INSTRUCTION, Engine

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


def critical_path(engine: Engine) -> tuple[PathNode, ...]:
    """Return the critical path from the first instruction to the last, in order of time."""
    if not engine.end:
        return ()
    path: list[PathNode] = []
    at = max(range(len(engine.end)), key=lambda number: (engine.end[number], -number))
    while at != NO_INSTRUCTION:
        late = last_ready(engine, at)
        before = engine.cause[late]
        path.append(link_of(engine, at, late, before))
        at = before
    return tuple(reversed(path))


def last_ready(engine: Engine, number: int) -> int:
    """Return the member of a communication that was ready last; of another instruction, itself."""
    meeting = engine.graph.meeting[number]
    return number if meeting < 0 else engine.late[meeting]


def link_of(engine: Engine, number: int, late: int, before: int) -> PathNode:
    """Return one link of the path, with the reason why its instruction did not start earlier."""
    graph = engine.graph
    reason: Reason = "first"
    if before != NO_INSTRUCTION:
        same = graph.instrs[before].stream == graph.instrs[late].stream
        reason = "stream" if same else "event"
        if graph.program[late] != graph.program[number]:
            reason = "peer"
    ins = graph.instrs[number]
    return PathNode(
        program=graph.program[number],
        place=graph.place(number),
        node=ins.node,
        op=ins.op,
        run=ins.run,
        start=engine.start[number],
        end=engine.end[number],
        reason=reason,
    )
