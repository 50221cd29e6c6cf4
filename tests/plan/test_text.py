"""The text form of plans."""

import pickle
from dataclasses import replace
from inspect import cleandoc
from typing import get_args

import pytest

from piper import ConfigError, at, place, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.ir.ids import OF_STEP, Pass, SlotId, SlotKind
from piper.ir.sharding import Sharding
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import PAYLOADS, Field, OfBucket, OfChunk, Op, Payload, Routing, Rows
from piper.plan.plan import Comm, PlacedChunk, Plan, Plans, Slot
from piper.plan.text import read_plans, show_instr, show_plans
from piper.plan.updates import Piece
from tests.chain import chain
from tests.lower.lowering import lower
from tests.slots import slots

COMPOSED: list[Directive] = [
    *(
        replicate(at(PP=s), [2 * r, 2 * r + 1], zero=z)
        for s, (r, z) in enumerate([(0, 3), (1, 2), (1, 1), (0, 3)])
    ),
    *(shard(at(PP=s, EP="*"), [2 * r, 2 * r + 1]) for s, r in enumerate([0, 1, 1, 0])),
    split(at(), parts=4),
    *schedules.dualpipe_v(2, 4),
]
RESLICED: list[Directive] = [place(at(PP=0), [0, 1, 2]), place(at(PP=1), [2, 3]), split(at(), parts=2)]


@pytest.mark.parametrize("strategy", [COMPOSED, RESLICED, []])
def test_plans_survive_their_text(strategy: list[Directive]) -> None:
    stages = 4 if strategy is COMPOSED else 2
    rows = 1 if strategy is not RESLICED else 6
    outline = chain(stages, experts=4 if strategy is COMPOSED else 0, tied=True, rows=rows)
    if strategy is RESLICED:
        outline = resliced(outline)
    plans, _ = lower(apply(start(outline), strategy))
    assert read_plans(show_plans(plans)) == plans


def resliced(outline: CapturedModel) -> CapturedModel:
    """PP=1, on two devices, sees slices of 9 rows where PP=0, on three, sees 6."""
    first, second = outline.chunks
    spec = replace(first.outputs[0], shape=(9, 1024), nbytes=9 * 4096)
    return replace(outline, chunks=(first, replace(second, input_specs=(spec,))))


NAMES = (
    "w", "w[0]", "w[MB=0]", "a b", "a  b", " a", "a ", 'quo"ted', "semi;colon", "new\nline", "a | b", "x=1  y=2",
    "buffer.w", "batch.x@0", "w.out0@1", "w.again", "w.piece0", "F[PP=0 MB=1]", "<PP=0>", "é ü", "", "\\", "\u2028",
)  # fmt: skip


def payloads(name: str) -> list[tuple[Op, Payload]]:
    """Every operation that has a payload, with each that it can have."""
    run = Pass(phase="BW", chunk=name, part=(("MB", 1), ("K", 0)))
    again = Pass(phase="F", chunk="PP=0 EP=2 #1", part=(("MB", 0),), again=True)
    return [
        ("load", Field(name=name, part=(("MB", 1),), devices=(0, 2))),
        ("compute", run),
        ("compute", again),
        ("send", None),
        ("send", Rows(start=1, stop=2, of=3)),
        ("copy", Rows(start=0, stop=1, of=2)),
        ("counts", Routing(run=run)),
        ("exchange", Routing(run=again, outward=False)),
        ("gather", OfBucket(bucket=name)),
        ("gather", OfBucket(bucket=name, run=again)),
        ("accumulate", run),
        ("all_reduce", OfBucket(bucket=name, run=run)),
        ("reduce_scatter", OfBucket(bucket=name, run=run)),
        ("broadcast", OfChunk(chunk=name)),
        *((op, None) for op in get_args(Op) if op not in PAYLOADS),
    ]


def slots_of(name: str) -> list[SlotId]:
    """A slot of every kind, with every field that it can have."""
    run = Pass(phase="B", chunk=name, part=(("MB", 1),))
    kinds: tuple[SlotKind, ...] = get_args(SlotKind)
    made = [SlotId(kind, "" if kind in OF_STEP else name) for kind in kinds]
    return [
        *made,
        SlotId("output", name, 3, devices=((0, 1), (4, 5, 6)), part=(("MB", 1), ("K", 0)), piece=2),
        SlotId("output", name, 0, again=True, part=(("MB", 1),)),
        SlotId("gradient_sum", name, 1, 2, devices=((0,), (1, 2)), part=(("MB", 0),)),
        SlotId("gradient", "PP=0/0", reader=name, part=(("MB", 0),)),
        SlotId("storage", name, 2, again=True, part=(("MB", 0),)),
        SlotId("whole", name, run=run),
        SlotId("grad", name, run=Pass(phase="F", chunk=name, again=True)),
        SlotId("batch", name, devices=((0, 2),), part=(("MB", 0),)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_survives(name: str) -> None:
    held = {
        slot: Slot(nbytes=1, shares=((SlotId("storage", name, 1), 2),), dynamic=True)
        for slot in slots_of(name)
    }
    instrs = tuple(
        Instr(
            op=op, node=f"node[{name}]", stream="compute", reads=tuple(held), writes=(SlotId("param", name),),
            frees=tuple(held), waits=(3, 4), signals=0, comm=name or None, payload=payload, nbytes=7, workspace=9,
        )
        for op, payload in payloads(name)
    )  # fmt: skip
    plan = Plan(
        devices=(0, 2, 4),
        instrs=instrs,
        slots=held,
        residents={SlotId("buffer", name): Slot(nbytes=4, sharding=Sharding(dim=1, degree=2), placed=(2, 0))},
    )
    bucket = Bucket(
        name=name, pieces=(
            Piece(name=name, shape=(2, 3), offset=0, shardings=(Sharding(dim=1, degree=4),)),
            Piece(name="b", shape=(), offset=6),
        ),
        devices=(0, 2), groups=((0, 2),), chunks=(name, "PP=0"), dtype="float32", itemsize=4, siblings=(name,),
    )  # fmt: skip
    plans = Plans(
        plans=(plan,), comms={name: Comm(name=name, kind="groups", groups=((0, 2),))}, buckets={name: bucket},
        seed=0.1, weighted=True, axes={"MB": 2, "K": 2}, why=("because  of it", name),
        chunks={name: PlacedChunk(tags=(("PP", 0), ("EP", 1)), devices=(3, 1)), "all": PlacedChunk(tags=(), devices=(0,))},
    )  # fmt: skip
    read = read_plans(show_plans(plans))
    assert read == plans
    found = read.plans[0]
    for mine, other in zip(instrs, found.instrs, strict=True):  # ids are compared by their text: fields too
        for given, back in (
            (mine.reads, other.reads),
            (mine.writes, other.writes),
            (mine.frees, other.frees),
        ):
            assert [slot.fields for slot in given] == [slot.fields for slot in back]
    assert [slot.fields for slot in plan.slots] == [slot.fields for slot in found.slots]
    assert [slot.fields for slot in plan.residents] == [slot.fields for slot in found.residents]


def test_no_two_slots_share_their_text() -> None:
    made = [slot for name in NAMES for slot in slots_of(name)]
    by_text = {str(slot): slot.fields for slot in made}
    assert all(by_text[str(slot)] == slot.fields for slot in made)
    assert len(by_text) == len(set(map(str, {slot.fields for slot in made})))


def test_slots_survive_a_pickle() -> None:
    for slot in slots_of("w[0]"):
        back = pickle.loads(pickle.dumps(slot))
        assert type(back) is SlotId and back == slot and back.fields == slot.fields
        assert back.base == slot.base


def test_an_instruction_reads_well() -> None:
    ins = Instr(
        op="send",
        node="transfer[h @0 -> @1]",
        stream="send",
        reads=slots("h"),
        frees=slots("h"),
        waits=(2,),
        comm="0>1",
        nbytes=8,
    )
    assert (
        show_instr(ins)
        == "send  transfer[h @0 -> @1]  stream=send  reads=h.out0  frees=h.out0  waits=2  comm=0>1  nbytes=8"
    )
    run = Pass(phase="F", chunk="PP=0", part=(("MB", 1),))
    ins = Instr(op="reduce_scatter", node="r", stream="reduce", payload=OfBucket(bucket="PP=0/0", run=run))
    assert show_instr(ins) == "reduce_scatter  r  stream=reduce  bucket=PP=0/0  run=F[PP=0 MB=1]"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("jump  F[PP=0]  stream=compute", "'jump' begins no line here"),
        ("send  x  stream=send  colour=red", "'colour=red' is not one of stream, reads, writes, frees, waits, signals, comm, nbytes, workspace, rows"),
        ("send  x  stream=send  waits=soon", "'waits=soon' cannot be read: invalid literal for int() with base 10: 'soon'"),
        ("send  x", "it lacks stream"),
        ("compute  x  stream=compute", "compute needs its run"),
        ("compute  x  stream=compute  run=X[PP=0]", "'X[PP=0]' is not a pass such as F[PP=0 MB=1]"),
        ("send  x  stream=send  reads=h", "'h' is no slot"),
        ("norm  x  stream=compute  bucket=b", "'bucket=b' is not one of stream, reads, writes, frees, waits, signals, comm, nbytes, workspace"),
        ("gather  x  stream=gather  run=F[PP=0]", "it lacks bucket"),
        ("gather  x  stream=gather  run=F[PP=0]  bucket=b  degree=2", "'degree=2' is not one of stream, reads, writes, frees, waits, signals, comm, nbytes, workspace, bucket, run"),
        ('gather  x  stream=gather  bucket="b', "'bucket=\"b' cannot be read: Unterminated string starting at: line 1 column 1 (char 0)"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(line: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_plans(f"plans  seed=1.0  weighted=0\nplan  0\n{line}\n", source="run/plan.txt")
    assert str(error.value) == cleandoc(f"""
        run/plan.txt:3: this line cannot be read
          line: {line}
          why:  {why}
          hint: use the text as `piper plan --text` writes it
    """)


def test_text_without_plans() -> None:
    with pytest.raises(ConfigError) as error:
        read_plans("", source="empty.txt")
    assert str(error.value) == cleandoc("""
        empty.txt: the text holds no plans
          why:  it lacks seed, weighted
          hint: its first line begins with `plans`
    """)
