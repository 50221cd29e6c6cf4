"""The random machine is worth something: it finds plans that compute something else, or in another order."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from piper.directives import remat, replicate, split
from piper.ir.graph import Graph
from piper.ir.ids import Pass, SlotId
from piper.ir.select import at
from piper.plan.instr import Instr
from piper.plan.ops import Field, Routing, Rows
from piper.plan.plan import Plans
from piper.plan.prove import problems_of
from piper.proof.values import value_problems
from tests.lower.lowering import lower
from tests.lower.machine import examine
from tests.lower.outlines import layered
from tests.proof.plans import Made, experts, made, pipeline, unequal, weighted

Change = Callable[[Instr], Instr | None]


def repeated() -> Made:
    """Two stages of layers that run again, on two devices each."""
    strategy = [*(replicate(at(PP=i), [2 * i, 2 * i + 1], zero=3) for i in range(2)), split(at(), parts=2)]
    return made(layered(), [*strategy, remat(at(), 1, across="PP")])


def changed(plans: Plans, change: Change) -> Plans:
    """Plans with every instruction changed, or left out."""
    edited = [
        replace(plan, instrs=tuple(new for ins in plan.instrs if (new := change(ins)) is not None))
        for plan in plans
    ]
    assert edited != list(plans.plans), "nothing was changed"
    return replace(plans, plans=tuple(edited))


def all_devices(ins: Instr) -> Instr:
    if not isinstance(ins.payload, Field):
        return ins
    return replace(ins, payload=replace(ins.payload, devices=tuple(range(7))))


def always_outward(ins: Instr) -> Instr:
    run = Pass(phase="F", chunk="PP=0 EP=0 route", part=ins.part)
    return replace(ins, payload=Routing(run=run)) if ins.op == "exchange" else ins


def other_part(ins: Instr) -> Instr:
    swapped = tuple((axis, 1 - index) for axis, index in ins.part)
    if not isinstance(ins.payload, Field) or ins.payload.name != "y":
        return ins
    return replace(ins, payload=replace(ins.payload, part=swapped))


def other_rows(ins: Instr) -> Instr:
    first, second = Rows(start=0, stop=1, of=2), Rows(start=1, stop=2, of=2)
    if ins.op != "send" or ins.payload not in (first, second):
        return ins
    return replace(ins, payload=second if ins.payload == first else first)


def other_order(ins: Instr) -> Instr:
    return replace(ins, reads=ins.reads[::-1]) if ins.op == "concat" else ins


def begin_again(ins: Instr) -> Instr:
    return replace(ins, reads=ins.reads[:1]) if ins.op == "accumulate" else ins


def one_of_two(ins: Instr) -> Instr:
    return replace(ins, op="copy", reads=ins.reads[:1]) if ins.op == "add" else ins


def is_forward(ins: Instr) -> bool:
    return isinstance(ins.payload, Pass) and ins.payload.phase == "F"


def kept_until_backward(ins: Instr) -> Instr:
    """Nothing is freed by a forward."""
    return replace(ins, frees=()) if is_forward(ins) and not ins.again else ins


def first_results(ins: Instr) -> Instr:
    """A backward reads what its own chunk saved at first."""
    if ins.op != "compute" or is_forward(ins):
        return ins
    first = {slot: SlotId("saved", slot.owner, part=slot.part) for slot in ins.reads if slot.kind == "saved"}
    return replace(ins, reads=tuple(first.get(slot, slot) for slot in ins.reads))


def twice(ins: Instr) -> Instr:
    """A layer's first forward runs in the place of its second."""
    first = replace(ins.computes, again=False) if ins.again else None
    return ins if first is None else replace(ins, payload=first)


def without(op: str) -> Change:
    return lambda ins: None if ins.op == op else ins


# What these hold too long, or read of a first run, has the right values: it only takes memory or time.
HARMLESS = (kept_until_backward, first_results, twice)


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
        (unequal, all_devices),
        (experts, always_outward),
        (experts, without("reduce_scatter")),
        (experts, without("gather")),
        (weighted, without("all_reduce")),
        (weighted, without("norm")),
        (repeated, kept_until_backward),
        (repeated, first_results),
        (repeated, twice),
        (repeated, lambda ins: None if ins.again and "LAYER=1" in ins.node else ins),
    ],
)
def test_a_plan_that_computes_something_else(make: Callable[[], Made], change: Change) -> None:
    plans, graph = make()
    examine(plans, graph)
    with pytest.raises(AssertionError):
        examine(changed(plans, change), graph)
    if change not in HARMLESS:
        assert list(value_problems(changed(plans, change), graph))


@pytest.mark.parametrize("make", [pipeline, unequal, experts, repeated])
def test_a_stream_that_does_not_wait(make: Callable[[], Made]) -> None:
    """The issue order stays right, so the proof of values does; the proof of order refuses it too."""
    plans, graph = make()
    hasty = changed(plans, lambda ins: replace(ins, waits=()))
    assert not list(value_problems(hasty, graph)) and list(problems_of(hasty))
    with pytest.raises(AssertionError):
        examine(hasty, graph, *range(4))


def test_members_that_meet_in_another_order_are_stuck() -> None:
    plans, graph = pipeline()
    first, *others = plans.plans
    sends = [place for place, ins in enumerate(first.instrs) if ins.op == "recv"]
    instrs = list(first.instrs)
    instrs[sends[0]] = replace(instrs[sends[0]], waits=(max(ins.signals or 0 for ins in instrs) + 1,))
    with pytest.raises(AssertionError, match="is stuck"):
        examine(replace(plans, plans=(replace(first, instrs=tuple(instrs)), *others)), graph)


def without_reruns(graph: Graph, chunks: Iterable[str]) -> Graph:
    return graph.with_options(chunks, lambda _, options: replace(options, rerun=None))


def test_a_region_that_runs_again_and_should_not_or_the_other_way_round() -> None:
    plans, graph = repeated()
    with pytest.raises(AssertionError):
        examine(plans, without_reruns(graph, graph.options))
    with pytest.raises(AssertionError):
        examine(plans, without_reruns(graph, (name for name in graph.options if "PP=1" not in name)))
    once = without_reruns(graph, graph.options)
    plain, _ = lower(once)
    examine(plain, once)
    with pytest.raises(AssertionError):
        examine(plain, graph)


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
