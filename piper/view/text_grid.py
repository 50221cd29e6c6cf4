"""The pipeline grid of plans as text: what each device computes over time, with F = I = W = 1 and B = 2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from piper.ir.devices import show
from piper.ir.ids import AGAIN, Pass, Phase, SlotId, Tags
from piper.plan.ops import OPS
from piper.plan.plan import Plan, Plans
from piper.plan.prove import in_order

UNIT: Mapping[Phase, int] = {"F": 1, "B": 2, "BI": 1, "BW": 1}
LETTER: Mapping[Phase, str] = {"F": "F", "B": "B", "BI": "I", "BW": "W"}
IDLE, STILL = ".", "--"


@dataclass(slots=True)
class StagePhase:
    """All chunks of one stage in one phase on one microbatch: one or two cells of the grid."""

    label: str
    cost: int
    phase: Phase
    stage: int | None  # the index of the outermost tag; None outside every tag
    part: tuple[int, ...]
    again: bool = False  # a forward that runs a second time
    places: list[int] = field(default_factory=list)  # its instructions
    needs: set[int] = field(default_factory=set)
    start: int = 0


def grid(plans: Plans, tags: Mapping[str, Tags]) -> str:
    """Draw one line per program, one column per unit of time. `tags`: the annotations of each chunk.

    0,1  0F0 0F1 .   .   0B0 --  0B1 --
    2,3  .   1F0 1B0 --  1F1 1B1 --
    """
    rows = placed(plans, tags)
    width = max((len(block.label) for row in rows for block in row), default=1)
    end = max((block.start + block.cost for row in rows for block in row), default=0)
    name_width = max(len(show(plan.devices)) for plan in plans)
    lines = []
    for plan, row in zip(plans, rows, strict=True):
        cells = [IDLE] * end
        for block in row:
            cells[block.start] = block.label
            cells[block.start + 1 : block.start + block.cost] = [STILL] * (block.cost - 1)
        lines.append(
            f"{show(plan.devices):{name_width}}  {' '.join(f'{cell:{width}}' for cell in cells)}".rstrip()
        )
    return "\n".join(lines)


def placed(plans: Plans, tags: Mapping[str, Tags]) -> list[list[StagePhase]]:
    """Return each program's blocks, with the time each starts when transfers are free."""
    blocks: list[StagePhase] = []
    rows: list[list[int]] = []
    written: dict[tuple[int, SlotId], int] = {}  # by program and slot: the block that its value comes from
    sent: dict[str, int] = {}
    for number, plan in enumerate(plans):
        rows.append(collect(plan, number, tags, blocks, written, sent))
    for number, plan in enumerate(plans):
        link(plan, number, tags, blocks, rows[number], written, sent)
    run(blocks, rows)
    return [[blocks[i] for i in row] for row in rows]


def block_of(run: Pass, tags: Mapping[str, Tags]) -> StagePhase:
    """Return the block that a pass belongs to, without its start."""
    outer = tags.get(run.chunk, ())
    stage = outer[0][1] if outer else None
    part = tuple(index for _, index in run.part)
    letter = AGAIN if run.again else LETTER[run.phase]
    label = f"{'' if stage is None else stage}{letter}{'.'.join(map(str, part))}"
    return StagePhase(
        label=label, cost=UNIT[run.phase], phase=run.phase, stage=stage, part=part, again=run.again
    )


def collect(
    plan: Plan,
    number: int,
    tags: Mapping[str, Tags],
    blocks: list[StagePhase],
    written: dict[tuple[int, SlotId], int],
    sent: dict[str, int],
) -> list[int]:
    """Collect a program's blocks and return their order. Fills `written` and `sent` with their values."""
    row: dict[str, int] = {}
    order: list[int] = []
    for place, ins in enumerate(plan.instrs):
        if ins.op == "compute":
            block = block_of(ins.computes, tags)
            if block.label not in row:
                row[block.label] = len(blocks)
                order.insert(turn_of(block, order, blocks), len(blocks))
                blocks.append(block)
            blocks[row[block.label]].places.append(place)
            for slot in ins.writes:
                written[number, slot] = row[block.label]
        elif ins.op == "send" and (number, ins.reads[0]) in written:
            sent[ins.node] = written[number, ins.reads[0]]
        elif OPS[ins.op].hands_on:
            sources = [written[number, slot] for slot in ins.reads if (number, slot) in written]
            for slot in ins.writes:
                if sources:
                    written[number, slot] = max(sources)
    return order


def turn_of(block: StagePhase, row: Sequence[int], blocks: Sequence[StagePhase]) -> int:
    """Return where to insert a block in a row: at the end, but a recompute before its backwards.

    Where each chunk is recomputed just before its own backward, another chunk's backward may be there.
    """
    if not block.again:
        return len(row)
    mates = ((b.phase != "F", b.stage, b.part) for b in (blocks[i] for i in row))
    backwards = (turn for turn, mate in enumerate(mates) if mate == (True, block.stage, block.part))
    return next(backwards, len(row))


def link(
    plan: Plan,
    number: int,
    tags: Mapping[str, Tags],
    blocks: list[StagePhase],
    row: list[int],
    written: dict[tuple[int, SlotId], int],
    sent: dict[str, int],
) -> None:
    """Add to each block's needs the blocks whose values it reads, directly or through transfers."""
    mine = {blocks[i].label: i for i in row}
    arrived: dict[SlotId, int] = {}
    for ins in plan.instrs:
        if ins.op == "recv" and ins.node in sent:
            arrived[ins.writes[0]] = sent[ins.node]
        elif OPS[ins.op].hands_on and any(slot in arrived for slot in ins.reads):
            arrived[ins.writes[0]] = max(arrived[slot] for slot in ins.reads if slot in arrived)
        elif ins.op == "compute":
            block = mine[block_of(ins.computes, tags).label]
            for slot in ins.reads:
                source = arrived.get(slot, written.get((number, slot)))
                if source is not None and source != block:
                    blocks[block].needs.add(source)


def run(blocks: list[StagePhase], rows: list[list[int]]) -> None:
    """Set each block's start: after its predecessor on the device and after the blocks it needs."""
    needs = [set(block.needs) for block in blocks]
    for row in rows:
        for earlier, later in pairwise(row):
            needs[later].add(earlier)
    followers: list[list[int]] = [[] for _ in blocks]
    for i, before in enumerate(needs):
        for j in before:
            followers[j].append(i)
    for i in in_order(followers)[0]:
        for j in followers[i]:
            blocks[j].start = max(blocks[j].start, blocks[i].start + blocks[i].cost)
