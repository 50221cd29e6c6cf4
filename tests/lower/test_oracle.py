"""The oracle is worth something: it finds plans that run and are proven, but compute something else."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from piper.directives import apply, place, replicate, shard, split
from piper.ir.graph import Graph, start
from piper.ir.select import at
from piper.lower.lower import lower
from piper.plan.check import prove
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from tests.lower.oracle import examine
from tests.lower.outlines import fitted, mixture, normed, skips

Change = Callable[[Instr], Instr | None]


def unequal() -> tuple[Plans, Graph]:
    """Stages on one, two and four devices, two microbatches."""
    sets = ([0], [1, 2], [3, 4, 5, 6])
    strategy = [*(replicate(at(PP=i), s, zero=1) for i, s in enumerate(sets)), split(at(), parts=2)]
    graph = apply(start(skips()), strategy)
    plans, work = lower(graph, outline=fitted(graph))
    return plans, replace(work.graph, outline=skips())


def grouped() -> tuple[Plans, Graph]:
    """Experts divided over two groups of two devices, zero=2."""
    strategy = [replicate(at(), range(4), zero=2), shard(at(EP="*"), range(4), ways=2), split(at(), parts=2)]
    graph = apply(start(mixture()), strategy)
    plans, work = lower(graph, outline=fitted(graph))
    return plans, replace(work.graph, outline=mixture())


def counted() -> tuple[Plans, Graph]:
    """A loss that is a sum and a weight, buffers, two devices a stage."""
    graph = apply(start(normed()), [replicate(at(), [0, 1]), place(at(PP=2), [2, 3])])
    plans, work = lower(graph, outline=fitted(graph))
    return plans, replace(work.graph, outline=normed())


def changed(plans: Plans, change: Change) -> Plans:
    """Plans with every instruction changed, or left out."""
    edited = [
        replace(plan, instrs=tuple(new for ins in plan.instrs if (new := change(ins)) is not None))
        for plan in plans
    ]
    assert edited != list(plans.plans), "nothing was changed"
    return replace(plans, plans=tuple(edited))


def edit(op: str, **fields: object) -> Change:
    """Change the instructions of one operation."""
    return lambda ins: replace(ins, **fields) if ins.op == op else ins  # type: ignore[arg-type]


def other_part(ins: Instr) -> Instr:
    swapped = tuple((axis, 1 - index) for axis, index in ins.part)
    return replace(ins, part=swapped) if ins.op == "load" and ins.arg == "y" else ins


def other_rows(ins: Instr) -> Instr:
    swapped = {"0:1/2": "1:2/2", "1:2/2": "0:1/2"}
    return replace(ins, arg=swapped.get(ins.arg, ins.arg)) if ins.op == "send" else ins


def other_order(ins: Instr) -> Instr:
    return replace(ins, reads=ins.reads[::-1]) if ins.op == "concat" else ins


def begin_again(ins: Instr) -> Instr:
    return replace(ins, reads=ins.reads[:1]) if ins.op == "accumulate" else ins


def one_of_two(ins: Instr) -> Instr:
    return replace(ins, op="copy", reads=ins.reads[:1]) if ins.op == "add" else ins


def without(op: str) -> Change:
    return lambda ins: None if ins.op == op else ins


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (unequal, other_part),
        (unequal, other_rows),
        (unequal, other_order),
        (unequal, begin_again),
        (unequal, one_of_two),
        (unequal, without("gather")),
        (unequal, without("update")),
        (unequal, edit("load", devices=tuple(range(7)))),
        (grouped, edit("exchange", arg="out PP=0 EP=0 route")),
        (grouped, without("reduce_scatter")),
        (grouped, without("gather")),
        (counted, without("all_reduce")),
        (counted, without("norm")),
    ],
)
def test_a_plan_that_computes_something_else(make: Callable[[], tuple[Plans, Graph]], change: Change) -> None:
    plans, graph = make()
    prove(plans)
    examine(plans, graph)
    with pytest.raises((AssertionError, KeyError)):
        examine(changed(plans, change), graph)


@pytest.mark.parametrize("field", ["copies", "zero", "seed", "weighted"])
def test_numbers_beside_the_instructions(field: str) -> None:
    plans, graph = unequal()
    if field == "seed":
        wrong = replace(plans, seed=1.0)
    elif field == "weighted":
        wrong = replace(plans, weighted=True)
    else:
        buckets = {name: replace(b, **{field: 2}) for name, b in plans.buckets.items()}  # type: ignore[arg-type]
        wrong = replace(plans, buckets=buckets)
    with pytest.raises(AssertionError):
        examine(wrong, graph)
