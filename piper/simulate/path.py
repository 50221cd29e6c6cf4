"""Why the step is this long: the chain of instructions of which each could only start when the last ended."""

from dataclasses import dataclass
from typing import Literal

from piper.ids import Pass
from piper.plan.ops import Op
from piper.simulate.engine import NOBODY, Engine

Reason = Literal["first", "stream", "event", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One plan node on the critical path, and why it did not start earlier."""

    program: int
    place: int
    node: str
    op: Op
    run: Pass | None  # the pass that it is, or works for
    start: float
    end: float
    reason: Reason  # it began the step; its stream was busy; it needs a value; a peer was ready last


def critical_path(engine: Engine) -> tuple[Link, ...]:
    """The path from the first instruction to the last, in the order of time."""
    if not engine.end:
        return ()
    path: list[Link] = []
    at = max(range(len(engine.end)), key=lambda number: (engine.end[number], -number))
    while at != NOBODY:
        late = last_ready(engine, at)
        before = engine.cause[late]
        path.append(link_of(engine, at, late, before))
        at = before
    return tuple(reversed(path))


def last_ready(engine: Engine, number: int) -> int:
    """The member of a communication that the others waited for; else the instruction itself."""
    meeting = engine.web.meeting[number]
    return number if meeting < 0 else engine.late[meeting]


def link_of(engine: Engine, number: int, late: int, before: int) -> Link:
    """One instruction of the path, seen from the device that it held up."""
    web = engine.web
    reason: Reason = "first"
    if before != NOBODY:
        same = web.instrs[before].stream == web.instrs[late].stream
        reason = "stream" if same else "event"
        if web.program[late] != web.program[number]:
            reason = "peer"
    ins = web.instrs[number]
    return Link(
        program=web.program[number],
        place=web.place(number),
        node=ins.node,
        op=ins.op,
        run=ins.run,
        start=engine.start[number],
        end=engine.end[number],
        reason=reason,
    )
