"""Lowering in numbers that were worked out by hand: bytes that travel, copies that count, what is trained."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args

import pytest

from piper.directives import Directive, apply, order, place, remat, replicate, split
from piper.directives.order import Order
from piper.errors import ScheduleError
from piper.ir.chunk import CapturedModel, Chunk, Phase, PhaseSpec, TensorSpec, bundles
from piper.ir.graph import start
from piper.ir.ids import SlotId
from piper.ir.select import at
from piper.lower.explain import explain
from piper.lower.state import LoweringState, Settings
from piper.plan.bucket import Bucket
from piper.plan.ops import DOES, Op
from piper.plan.plan import Plans
from piper.plan.prove import prove
from piper.schedules import one_f_one_b, zero_bubble
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.outlines import HIDDEN, SCALAR, Drawing, X, Y, fitted, normed, pp

WHOLE = 8 * 8 * 4  # bytes of a stage's one matrix


def lowered(outline: CapturedModel, *strategy: Directive, **settings: int) -> tuple[Plans, LoweringState]:
    plans, work = lower(apply(start(outline), strategy), Settings(**settings))  # type: ignore[arg-type]
    prove(plans)
    return plans, work


def buckets(outline: CapturedModel, *strategy: Directive) -> Mapping[str, Bucket]:
    return lowered(outline, *strategy)[0].buckets


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        (0, {"all_reduce": 2 * WHOLE * 3 // 4}),
        (1, {"reduce_scatter": WHOLE * 3 // 4, "gather": WHOLE * 3 // 4}),
        (2, {"reduce_scatter": WHOLE * 3 // 4, "gather": WHOLE * 3 // 4}),
        (3, {"reduce_scatter": WHOLE * 3 // 4, "gather": WHOLE * 3 // 4}),
    ],
)
def test_what_each_of_four_devices_sends(zero: int, wanted: dict[str, int]) -> None:
    plans, _ = lowered(chain(1, width=8), replicate(at(), range(4), zero))
    sent = {ins.op: ins.nbytes for ins in plans.of(0).instrs if ins.comm and ins.op != "total"}
    assert sent == wanted


@pytest.mark.parametrize(
    ("first", "last", "zeros", "copies", "wanted"),
    [
        ((0, 1), (2, 3), (0, 0), 4, 0),  # two sets of two replicas: four hold each element
        ((0, 1), (2, 3), (1, 3), 2, 1),  # sharded in each set, by the lower of the two levels
        ((0, 1), (0, 1), (0, 0), 2, 0),
        ((0, 1), (0, 1), (3, 2), 1, 2),
        ((0,), (1,), (0, 0), 2, 0),
        ((0, 1), (1, 2), (3, 3), 3, 0),  # sets that overlap: one bucket over all, never sharded
    ],
)
def test_how_many_devices_hold_each_element_of_a_tied_parameter(
    first: tuple[int, ...], last: tuple[int, ...], zeros: tuple[int, int], copies: int, wanted: int
) -> None:
    strategy = [replicate(at(PP=0), first, zeros[0]), replicate(at(PP=1), last, zeros[1])]
    found = buckets(chain(2, width=8, tied=True), *strategy)
    tied = [bucket for name, bucket in found.items() if name.startswith("shared")]
    assert {(bucket.copies, bucket.zero) for bucket in tied} == {(copies, wanted)}
    assert sum(len(bucket.devices) for bucket in tied) == len({*first, *last})


def test_a_parameter_that_no_backward_reaches_is_not_trained() -> None:
    outline = chain(1, width=8, layers=2)
    (chunk,) = outline.chunks
    phases = {
        phase: replace(spec, grad_params=tuple(name for name in spec.grad_params if name.endswith("0.0")))
        for phase, spec in chunk.phases.items()
    }
    made = replace(outline, chunks=(replace(chunk, phases=phases),))
    plans, work = lowered(made, replicate(at(), [0, 1]), state_bytes=8)
    trained = {piece.name: bucket.trainable for bucket in plans.buckets.values() for piece in bucket.pieces}
    assert trained == {"stages.0.0": True, "stages.0.1": False}
    states = {name: slot.nbytes for name, slot in work.residents.items() if name.endswith(".state")}
    assert states == {"PP=0/0.state": 8 * 64}


def test_a_bucket_is_closed_before_it_is_too_large() -> None:
    """A matrix of 512 x 512 takes 1 MiB: two fit into 2 MB, and one into 1.5."""
    outline = chain(1, width=512, layers=4)
    for limit, wanted in ((2, [2, 2]), (1.5, [1, 1, 1, 1]), (3, [3, 1]), (0.1, [1, 1, 1, 1]), (4, [4])):
        made = buckets(outline, replicate(at(), [0, 1], bucket_mb=limit))
        assert [len(bucket.pieces) for bucket in made.values()] == wanted, limit


def computes(plans: Plans, device: int = 0) -> str:
    shorts = []
    for ins in plans.of(device).instrs:
        if ins.op == "compute":
            shorts.append(ins.computes.phase + ".".join(str(index) for _, index in ins.part))
    return " ".join(shorts)


def test_an_order_before_a_split_holds_for_each_part() -> None:
    forward_first = order([[at(PP=0, PASS="F")], [at(PP=0, PASS="B")]])
    after, _ = lowered(chain(1), forward_first, split(at(), parts=2))
    assert computes(after) == "F0 B0 F1 B1"
    before, _ = lowered(chain(1), split(at(), parts=2), forward_first)
    assert computes(before) == "F0 F1 B0 B1"


def test_an_order_that_begins_with_backwards_holds_for_each_part_where_nothing_trains() -> None:
    outline = chain(1)
    forwards = (replace(chunk, phases={"F": chunk.phases["F"]}) for chunk in outline.chunks)
    untrained = replace(outline, chunks=tuple(forwards))
    backward_first = order([[at(PP=0, PASS="B")], [at(PP=0, PASS="F")]])
    plans, _ = lowered(untrained, backward_first, split(at(), parts=2), trains=False)
    assert computes(plans) == "F0 F1"


def test_of_two_that_could_run_the_one_with_more_behind_it_goes_first() -> None:
    """What follows PP=1 also runs on another device; PP=0 is only needed at the end."""
    d = Drawing()
    short = d.chunk("PP=0", pp(0), [X], [d.param("a")], [HIDDEN])
    first = d.chunk("PP=1", pp(1), [X], [d.param("b")], [HIDDEN])
    long = d.chunk("PP=2", pp(2), [first], [d.param("c")], [HIDDEN])
    last = d.chunk("PP=3", pp(3), [short, long, Y], [d.param("d")], [SCALAR])
    plans, _ = lowered(d.outline(last), place(at(), [0]), place(at(PP=2), [1]))
    forwards = [i.node for i in plans.of(0).instrs if i.op == "compute" and i.computes.phase == "F"]
    assert forwards == ["F[PP=1]", "F[PP=0]", "F[PP=3]"]


def test_a_region_that_writes_buffers_sees_the_parts_one_after_another() -> None:
    graph = apply(start(normed()), [split(at(), parts=3)])
    _, work = lower(graph, Settings(), fitted(graph))
    writes = next(chunk.name for chunk in work.graph.outline.chunks if chunk.mutated)
    edges = [(first, then) for first, then, by in work.temporal if by < 0]
    for part in range(2):
        assert (f"F[{writes} MB={part}]", f"F[{writes} MB={part + 1}]") in edges


def test_a_half_with_nothing_to_do_is_dropped() -> None:
    outline = chain(2, width=8)
    first, last = outline.chunks
    phases = {phase: replace(spec, grad_params=()) for phase, spec in last.phases.items()}
    halves = order([[at(PP=1, PASS="BI")], [at(PP=1, PASS="BW")]])
    plans, _ = lowered(replace(outline, chunks=(first, replace(last, phases=phases))), halves)
    backward = [i.node for i in plans.of(0).instrs if i.op == "compute" and i.computes.phase != "F"]
    assert backward == ["BI[PP=1]", "B[PP=0]"]


def test_the_error_of_a_place_names_the_place_and_not_the_remat_after_it() -> None:
    strategy = [place(at(), [0]), place(at(PP=0, PASS="F"), [1]), remat(at(PP=0), 0.5)]
    with pytest.raises(ScheduleError) as caught:
        lowered(chain(2), *strategy)
    assert str(caught.value).startswith("place #0 (test_plans_in_numbers.py:")


@pytest.mark.parametrize(("kept", "wanted"), [({}, "F[PP=1]"), ({"B": (0,)}, "B[PP=1]")])
def test_an_input_that_a_backward_still_uses_lives_until_then(
    kept: dict[Phase, tuple[int, ...]], wanted: str
) -> None:
    """A chunk under eager autograd holds on to its inputs, though its backward does not read them."""
    outline = chain(2, width=8)
    first, last = outline.chunks
    phases = {**last.phases, "B": replace(last.phases["B"], inputs=())}
    made = replace(outline, chunks=(first, replace(last, phases=phases, kept_inputs=kept)))
    plans, _ = lowered(made)
    freed = {slot: ins.node for ins in plans.of(0).instrs for slot in ins.frees}
    assert freed[SlotId("output", "PP=0")] == wanted


def test_what_the_weight_gradients_need_is_kept_apart() -> None:
    spec = TensorSpec(shape=(2,), dtype="float32", nbytes=8)
    chunk = Chunk(name="PP=0", tags=(("PP", 0),), saved=(spec, spec, spec))
    assert bundles(chunk) == {"saved": [0, 1, 2]}
    split_up = replace(chunk, phases={"BI": PhaseSpec(saved=(0, 2)), "BW": PhaseSpec(saved=(2, 1))})
    assert bundles(split_up) == {"saved": [0], "kept": [1, 2]}


def test_an_explanation_says_who_asked_and_where_values_come_from() -> None:
    asked = order([[at(MB=0, PASS="F")], [at(MB=1, PASS="F")]])
    plans, work = lowered(chain(1, width=8), split(at(), parts=2), asked)
    said = explain(work, plans, "F[PP=0 MB=1]")
    assert re.search(r"after    F\[PP=0 MB=0\] \(order #1 \(test_plans_in_numbers\.py:\d+\)\)", said)
    assert "reads    PP=0/0.param from the last step" in said
    assert "reads    batch.x@0[MB=1] from load[x MB=1 @0]" in said
    first, both = lowered(chain(1, width=8), order([[at(PASS="F")], [at(PASS="B")]]))
    assert "(order #0 (" in explain(both, first, "B[PP=0]")
    ours, free = lowered(chain(2, width=8), place(at(PP=0), [0]), place(at(PP=1), [1]), split(at(), parts=4))
    assert "after    B[PP=0 MB=0] (our choice)" in explain(free, ours, "F[PP=0 MB=2]")


def test_copies_of_a_tied_parameter_travel_in_one_type() -> None:
    """Their gradients are one sum: a device that sends bf16 to one that expects float32 would never end."""
    halves = replicate(at(PP=0), [0, 1], reduce="bf16"), replicate(at(PP=1), [2, 3])
    plans, _ = lowered(chain(2, width=8, tied=True), *halves)
    tied = {b.precision.travel_dtype for b in plans.buckets.values() if b.siblings}
    assert tied == {"float32"}
    assert {b.reduced_as for b in plans.buckets.values() if not b.siblings} == {"bfloat16", ""}


def test_every_node_is_explained_in_a_sentence() -> None:
    """Users read what a node does. The name of its operation alone does not say it."""
    plans, work = lowered(chain(2, width=8), replicate(at(), [0, 1], zero=3), split(at(), parts=2))
    said = [explain(work, plans, node.name).splitlines()[0] for node in work.sequence]
    sentences = {line.rsplit("]: ")[-1].removeprefix("total: ") for line in said}
    assert {node.op for node in work.sequence} >= {"compute", "load", "gather", "norm", "total", "update"}
    assert all(re.fullmatch(r"[A-Z].* .*\.", sentence) for sentence in sentences), sentences
    # Operations that only the plan has belong to a node that is another one there.
    assert set(get_args(Op)) - DOES.keys() == {"send", "recv", "copy", "concat", "shift"}


@pytest.mark.parametrize("build", [one_f_one_b, zero_bubble])
def test_a_device_receives_values_in_the_order_in_which_it_reads_them(
    build: Callable[[int, int], list[Order]],
) -> None:
    """It receives one after another: a value that it reads later must not hold up the next one."""
    places = [place(at(PP=stage), [stage]) for stage in range(4)]
    plans, _ = lowered(chain(4, width=8), *places, split(at(), parts=8), *build(4, 8))
    for plan in plans:
        received = [slot for ins in plan.instrs if ins.op == "recv" for slot in ins.writes]
        reads = [min(i for i, ins in enumerate(plan.instrs) if slot in ins.reads) for slot in received]
        assert reads == sorted(reads)
        assert len(reads) == (8 if plan.devices[0] in (0, 3) else 16)
