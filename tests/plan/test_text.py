"""The text form of plans."""

from dataclasses import replace
from inspect import cleandoc
from typing import get_args

import pytest

from piper import ConfigError, at, place, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.chain import chain
from piper.ir.chunk import Outline
from piper.ir.graph import start
from piper.lower.lower import lower
from piper.plan.instr import Instr, Op
from piper.plan.plan import Plan, Plans, Slot
from piper.plan.text import read_plans, show_instr, show_plans

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


def resliced(outline: Outline) -> Outline:
    """PP=1, on two devices, sees slices of 9 rows where PP=0, on three, sees 6."""
    first, second = outline.chunks
    spec = replace(first.outputs[0], shape=(9, 1024), nbytes=9 * 4096)
    return replace(outline, chunks=(first, replace(second, input_specs=(spec,))))


@pytest.mark.parametrize("op", get_args(Op))
def test_every_op_survives(op: Op) -> None:
    ins = Instr(
        op=op, node="F[PP=0 MB=1]", stream="compute", reads=("a b", "c[MB=1]"), writes=("d",), frees=("a b",),
        waits=(3, 4), signals=0, comm="0,1>2,3", arg="F PP=0 #1", part=(("MB", 1),), devices=(0, 2), nbytes=7, workspace=9,
    )  # fmt: skip
    plan = Plan(
        devices=(0, 2, 4),
        instrs=(ins,),
        slots={"d": Slot(nbytes=1, shares=(("s", 2),), dynamic=True)},
        residents={},
    )
    plans = Plans(
        plans=(plan,), comms={}, buckets={}, seed=0.1, weighted=True, axes={"MB": 2}, why=("because  of it",)
    )
    assert read_plans(show_plans(plans)) == plans


def test_an_instruction_reads_well() -> None:
    ins = Instr(
        op="send",
        node="transfer[h @0 -> @1]",
        stream="send",
        reads=("h",),
        frees=("h",),
        waits=(2,),
        comm="0>1",
        nbytes=8,
    )
    assert (
        show_instr(ins)
        == "send  transfer[h @0 -> @1]  stream=send  reads=h  frees=h  waits=2  comm=0>1  nbytes=8"
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("jump  F[PP=0]  stream=compute", "'jump' begins no line here"),
        ("send  x  stream=send  colour=red", "'colour=red' is not one of stream, reads, writes, frees, waits, signals, comm, arg, part, devices, nbytes, workspace"),
        ("send  x  stream=send  waits=soon", "'waits=soon' cannot be read: invalid literal for int() with base 10: 'soon'"),
        ("send  x", "it lacks one of arg, comm, devices, frees, nbytes, part, reads, signals, stream, waits, workspace, writes"),
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
          why:  it lacks one of axes, cells, seed, weighted
          hint: its first line begins with `plans`
    """)
