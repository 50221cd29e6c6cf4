"""The streams of devices as lines of text: a letter for the instruction that takes most of each cell."""

from collections.abc import Iterator, Sequence

from piper.ir.devices import in_words
from piper.ir.ids import AGAIN
from piper.plan.instr import Instr
from piper.plan.ops import OPS
from piper.plan.plan import Plan
from piper.schedules.action import LETTERS
from piper.simulate.timeline import Timeline
from piper.view.subject import Subject
from piper.view.svg_writer import phase_name

IDLE = "."
PROGRAMS_LIMIT = 16


def timeline_text(subject: Subject, width: int = 100) -> str:
    """Draw every program's streams over the planned step, and the measured ones below them.

    devices 0,1
      compute  FFFBB.BB
      send     ..>...>.
    """
    lines: list[str] = []
    used: dict[str, str] = {}
    for plan, timeline in list(zip(subject.plans, subject.planned.timelines, strict=True))[:PROGRAMS_LIMIT]:
        lines.append(in_words(plan.devices))
        lines += streams(plan, timeline, subject.planned.step, width, used)
        for device in plan.devices:
            if device in subject.measured:
                lines.append(f"device {device}, measured")
                end = max(run.end for run in subject.measured.values())
                lines += streams(plan, subject.measured[device], end, width, used)
    if len(subject.plans) > PROGRAMS_LIMIT:
        lines.append(f"... and {len(subject.plans) - PROGRAMS_LIMIT} programs more")
    lines.append(", ".join(f"{mark} {name}" for mark, name in sorted(used.items())) + f", {IDLE} idle")
    return "\n".join(lines)


def streams(plan: Plan, timeline: Timeline, end: float, width: int, used: dict[str, str]) -> Iterator[str]:
    """Yield one line of text per stream."""
    names = sorted(dict.fromkeys(ins.stream for ins in plan.instrs), key=lambda name: name != "compute")
    room = max(len(name) for name in names)
    cells = max(10, width - room - 4)
    for name in names:
        places = [place for place, ins in enumerate(plan.instrs) if ins.stream == name]
        yield f"  {name:{room}}  {row(plan, timeline, places, end, cells, used)}"


def row(
    plan: Plan, timeline: Timeline, places: Sequence[int], end: float, cells: int, used: dict[str, str]
) -> str:
    """Return a stream's line: in each cell the mark of the instructions that take most of its time."""
    spent: list[dict[str, float]] = [{} for _ in range(cells)]
    scale = cells / end if end else 0.0
    for place in places:
        mark, name = mark_of(plan.instrs[place])
        used[mark] = name
        start, stop = timeline.spans[place].start * scale, timeline.spans[place].end * scale
        for cell in range(int(start), min(int(stop) + 1, cells)):
            covered = min(stop, cell + 1) - max(start, cell)
            if covered > 0 or stop == start:
                spent[cell][mark] = spent[cell].get(mark, 0.0) + max(covered, 1e-9)
    return "".join(max(cell, key=lambda mark: cell[mark]) if cell else IDLE for cell in spent)


def mark_of(ins: Instr) -> tuple[str, str]:
    """Return the letter of an instruction, and its meaning."""
    if ins.op == "compute":
        phase = ins.computes.phase
        return AGAIN if ins.again else LETTERS[phase], phase_name(phase, again=ins.again)
    return OPS[ins.op].mark, OPS[ins.op].caption
