"""Regions that run again, in small pictures: which forwards, where, and what is kept for them."""

from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.directives import Directive, order, place, remat, replicate, shard, split
from piper.ir.chunk import Output
from piper.ir.ids import SlotId
from piper.ir.select import at
from piper.plan.plan import Plan
from piper.plan.text import read_plans, show_plans
from piper.schedules import zero_bubble
from tests.chain import chain
from tests.lower.outlines import HIDDEN, SCALAR, Drawing, X, layered, pp
from tests.lower.test_lines import compiled, shown, stages
from tests.slots import slot, slots


def kept(plan: Plan, before: str) -> list[str]:
    """What the step has made and still holds when a node begins."""
    held: list[str] = []
    for ins in plan.instrs:
        if ins.node == before:
            return held
        held += [slot for slot in ins.writes if slot in plan.slots and slot not in held]
        held = [slot for slot in held if slot not in ins.frees]
    raise AssertionError(f"there is no {before}")


def test_a_stage_runs_again_before_each_of_its_backwards() -> None:
    plans = compiled(chain(2, width=4), *stages(2, 3), remat(at(PP=0), 1, across="PP"))
    assert shown(plans.of(0), "load", "compute", "send", "recv") == cleandoc("""
        load load[x MB=0 @0]
        F[PP=0 MB=0]
        send transfer[PP=0.out0[MB=0] @0 -> @1]
        load load[x MB=1 @0]
        F[PP=0 MB=1]
        send transfer[PP=0.out0[MB=1] @0 -> @1]
        recv transfer[PP=1.din0[MB=0] @1 -> @0]
        R[PP=0 MB=0]
        B[PP=0 MB=0]
        load load[x MB=2 @0]
        F[PP=0 MB=2]
        recv transfer[PP=1.din0[MB=1] @1 -> @0]
        send transfer[PP=0.out0[MB=2] @0 -> @1]
        R[PP=0 MB=1]
        B[PP=0 MB=1]
        recv transfer[PP=1.din0[MB=2] @1 -> @0]
        R[PP=0 MB=2]
        B[PP=0 MB=2]
    """)
    assert shown(plans.of(1), "compute") == cleandoc("""
        F[PP=1 MB=0]
        B[PP=1 MB=0]
        F[PP=1 MB=1]
        B[PP=1 MB=1]
        F[PP=1 MB=2]
        B[PP=1 MB=2]
    """)
    assert kept(plans.of(0), "R[PP=0 MB=0]") == ["batch.x@0[MB=0]", "batch.x@0[MB=1]", "PP=1.din0@0[MB=0]"]


def test_it_writes_slots_of_its_own_and_reads_what_came_into_the_region() -> None:
    plan = compiled(chain(1, width=4), remat(at(), 1, across="PP")).of(0)
    first, second, back = (ins for ins in plan.instrs if ins.op == "compute")
    assert (first.node, second.node, back.node) == ("F[PP=0]", "R[PP=0]", "B[PP=0]")
    assert replace(first.computes, again=True) == second.computes
    assert first.reads == second.reads == ("batch.x@0", "PP=0/0.param")
    assert first.writes == ("PP=0.out0", "PP=0.saved")
    assert first.frees == ("PP=0.saved",)
    assert second.writes == ("PP=0.out0.again", "PP=0.saved.again")
    assert second.frees == ("PP=0.out0.again",)
    assert back.reads == ("batch.x@0", "PP=0/0.param", "PP=0.saved.again", "seed")
    assert not first.again and second.again and not back.again
    assert sum("into loss" in ins.node for ins in plan.instrs) == 1  # the loss counts once


def test_the_plans_say_which_regions_run_again() -> None:
    plans = compiled(chain(2, width=4), *stages(2, 3), remat(at(PP=0), 1, across="PP"))
    assert plans.why == ("PP=0: keeps what comes into it; its forwards run again before its backwards",)


def test_the_second_of_two_regions_on_a_device_starts_from_what_the_first_gave() -> None:
    plan = compiled(chain(2, width=4), remat(at(), 1, across="PP")).of(0)
    assert shown(plan, "compute") == cleandoc("""
        F[PP=0]
        F[PP=1]
        R[PP=1]
        B[PP=1]
        R[PP=0]
        B[PP=0]
    """)
    for node in ("F[PP=1]", "R[PP=1]", "B[PP=1]"):
        assert "PP=0.out0" in next(ins.reads for ins in plan.instrs if ins.node == node)
    assert kept(plan, "R[PP=1]") == ["batch.x@0", "PP=0.out0", "loss"]


def test_sharded_parameters_are_gathered_again() -> None:
    plans = compiled(chain(2, width=4), replicate(at(), [0, 1], zero=3), remat(at(), 1, across="PP"))
    assert shown(plans.of(1), "compute", "gather", "reduce_scatter", "update") == cleandoc("""
        gather gather[PP=0/0 for F[PP=0]]
        gather gather[PP=1/0 for F[PP=1]]
        F[PP=0]
        F[PP=1]
        R[PP=1]
        gather gather[PP=0/0 for R[PP=0]]
        B[PP=1]
        R[PP=0]
        reduce_scatter reduce[PP=1/0 after B[PP=1]]
        B[PP=0]
        reduce_scatter reduce[PP=0/0 after B[PP=0]]
        update update[@0,1]
    """)


def test_across_the_outer_of_two_regions_all_inside_runs_again_at_once() -> None:
    plan = compiled(layered(), remat(at(), 1, across="PP")).of(0)
    assert shown(plan, "compute").split("F[PP=1 #1]\n")[1] == cleandoc("""
        R[PP=1]
        R[PP=1 LAYER=2]
        R[PP=1 LAYER=3]
        R[PP=1 #1]
        B[PP=1 #1]
        B[PP=1 LAYER=3]
        B[PP=1 LAYER=2]
        B[PP=1]
        R[PP=0]
        R[PP=0 LAYER=0]
        R[PP=0 LAYER=1]
        R[PP=0 #1]
        B[PP=0 #1]
        B[PP=0 LAYER=1]
        B[PP=0 LAYER=0]
        B[PP=0]
    """)


def test_across_the_inner_of_two_regions_each_runs_again_by_itself() -> None:
    plan = compiled(layered(), remat(at(LAYER="*"), 1, across="LAYER")).of(0)
    assert shown(plan, "compute").split("F[PP=1 #1]\n")[1] == cleandoc("""
        B[PP=1 #1]
        R[PP=1 LAYER=3]
        B[PP=1 LAYER=3]
        R[PP=1 LAYER=2]
        B[PP=1 LAYER=2]
        B[PP=1]
        B[PP=0 #1]
        R[PP=0 LAYER=1]
        B[PP=0 LAYER=1]
        R[PP=0 LAYER=0]
        B[PP=0 LAYER=0]
        B[PP=0]
    """)


def test_some_of_a_region_runs_again_from_what_the_others_gave() -> None:
    plan = compiled(layered(), remat(at(LAYER=1), 1, across="PP")).of(0)
    assert [ins.node for ins in plan.instrs if ins.again] == ["R[PP=0 LAYER=1]"]
    again = next(ins for ins in plan.instrs if ins.again)
    assert again.reads[:3] == ("PP=0.out0", "PP=0 LAYER=0.out0", "PP=0.out1")


def test_a_forward_whose_results_nobody_needs_again_does_not_run_again() -> None:
    """Backwards that start from inputs need the forwards before their own."""
    order_of = order([[at(PASS="F")], [at(PASS="B")]])
    plan = compiled(layered("inputs"), order_of, remat(at(), 0, across="PP")).of(0)
    assert shown(plan, "compute").split("F[PP=1 #1]\n")[1] == cleandoc("""
        R[PP=1]
        R[PP=1 LAYER=2]
        R[PP=1 LAYER=3]
        B[PP=1 #1]
        B[PP=1 LAYER=3]
        B[PP=1 LAYER=2]
        B[PP=1]
        R[PP=0]
        R[PP=0 LAYER=0]
        R[PP=0 LAYER=1]
        B[PP=0 #1]
        B[PP=0 LAYER=1]
        B[PP=0 LAYER=0]
        B[PP=0]
    """)


def test_a_piece_that_trains_nothing_runs_again_only_for_another() -> None:
    d = Drawing()
    cold = d.chunk("PP=0", pp(0), [X], [d.param("cold", frozen=True)], [HIDDEN, SCALAR])
    aside = d.chunk("PP=0 #1", pp(0), [X], [d.param("colder", frozen=True)], [SCALAR])
    last = d.chunk("PP=0 #2", pp(0), [cold], [d.param("a")], [SCALAR])
    plan = compiled(d.outline(last, weight=aside), remat(at(), 1, across="PP")).of(0)
    assert [ins.node for ins in plan.instrs if ins.again] == ["R[PP=0]", "R[PP=0 #2]"]
    assert sum("into weight" in ins.node for ins in plan.instrs) == 1


def test_rows_do_not_travel_to_their_experts_twice() -> None:
    strategy = [replicate(at(), [0, 1]), shard(at(EP=0), [0, 1]), remat(at(), 1, across="PP")]
    plan = compiled(chain(1, width=4, experts=4), *strategy).of(0)
    assert shown(plan, "compute", "counts", "exchange") == cleandoc("""
        F[PP=0]
        counts counts[PP=0 EP=0 route]
        F[PP=0 EP=0 route]
        F[PP=0 EP=0]
        F[PP=0 EP=0 unroute]
        F[PP=0 #1]
        R[PP=0 #1]
        B[PP=0 #1]
        B[PP=0 EP=0 unroute]
        R[PP=0 EP=0]
        B[PP=0 EP=0]
        B[PP=0 EP=0 route]
        R[PP=0]
        B[PP=0]
    """)
    assert [slot for slot in kept(plan, "R[PP=0 #1]") if slot.startswith("PP=0")] == [
        "PP=0 EP=0 route.splits",
        "PP=0 EP=0 route.out1",
        "PP=0 EP=0 route.out0",
        "PP=0 EP=0 unroute.out0",
    ]


def test_experts_that_stay_run_again_with_their_stage() -> None:
    plan = compiled(chain(1, width=4, experts=4), remat(at(), 1, across="PP")).of(0)
    assert shown(plan, "compute").split("F[PP=0 #1]\n")[1] == cleandoc("""
        R[PP=0]
        R[PP=0 EP=0]
        R[PP=0 #1]
        B[PP=0 #1]
        B[PP=0 EP=0]
        B[PP=0]
    """)


def test_a_region_on_two_devices_keeps_what_crosses_them() -> None:
    d = Drawing()
    outer = (("ALL", 0),)
    source = d.chunk("ALL=0 PP=0", (*outer, *pp(0)), [X], [d.param("a")])
    last = d.chunk("ALL=0 PP=1", (*outer, *pp(1)), [source], [d.param("b")], [SCALAR])
    strategy: list[Directive] = [place(at(PP=0), [0]), place(at(PP=1), [1]), remat(at(), 1, across="ALL")]
    plans = compiled(d.outline(last), *strategy)
    assert [ins.node for ins in plans.of(0).instrs if ins.again] == ["R[ALL=0 PP=0]"]
    (again,) = (ins for ins in plans.of(1).instrs if ins.again)
    assert again.reads[0] == "ALL=0 PP=0.out0@1"
    assert sum(ins.op == "recv" for plan in plans for ins in plan.instrs) == 2  # a value, and its gradient


@pytest.mark.parametrize("halves", ["carried", "tangents"])
def test_the_halves_of_a_backward_share_one_run(halves: str) -> None:
    strategy = [*stages(2, 2), *zero_bubble(2, 2), remat(at(), 1, across="PP")]
    for stage, plan in enumerate(compiled(layered(halves), *strategy)):
        nodes = [ins.node for ins in plan.instrs if ins.op == "compute"]
        for part in range(2):
            last = f"[PP={stage} #1 MB={part}]"
            assert nodes.count(f"R{last}") == 1
            assert nodes.index(f"R{last}") + 1 == nodes.index(f"BI{last}") < nodes.index(f"BW{last}")


def test_a_split_made_later_divides_what_runs_again() -> None:
    early = compiled(chain(2, width=4), remat(at(), 1, across="PP"), *stages(2, 2))
    late = compiled(chain(2, width=4), *stages(2, 2), remat(at(), 1, across="PP"))
    assert [shown(plan, "compute") for plan in early] == [shown(plan, "compute") for plan in late]


def test_the_text_of_a_plan_keeps_what_runs_again() -> None:
    plans = compiled(layered(), *stages(2, 2), remat(at(), 1, across="PP"))
    read = read_plans(show_plans(plans))
    assert read.plans == plans.plans
    assert sum(ins.again for plan in read for ins in plan.instrs) == 2 * len(layered().chunks)


def test_a_later_budget_without_across_keeps_what_is_saved() -> None:
    plan = compiled(chain(2), remat(at(), 1, across="PP"), remat(at(PP=0), 1)).of(0)
    assert [ins.node for ins in plan.instrs if ins.again] == ["R[PP=1]"]


def test_sizes_are_those_of_the_first_run() -> None:
    plan = compiled(layered(), split(at(), parts=2), remat(at(), 1, across="PP")).of(0)
    twice = [made for made in plan.slots if made.again]
    assert len(twice) == 2 * (
        8 * 2 + 2 + 8
    )  # of each part: outputs, two of them with a second one, two bundles
    for made in twice:
        assert plan.slots[made] == plan.slots[SlotId(made.kind, made.owner, made.position, part=made.part)]


def test_storages_that_slots_share_are_apart_from_those_of_the_first_run() -> None:
    """An output and a saved value lie in one storage; the output of the first run is still held."""
    outline = chain(2, width=4)
    first, last = outline.chunks
    shared = replace(first.outputs[0], storage=0)
    first = replace(first, outputs=(shared,), saved=(shared,), storages=(shared.nbytes,))
    outline = replace(outline, chunks=(first, last))
    plan = compiled(outline, split(at(), parts=2), remat(at(PP=0), 1, across="PP")).of(0)
    for name in ("PP=0.out0", "PP=0.saved"):
        assert plan.slots[slot(f"{name}[MB=1]")].shares == (("PP=0.storage0[MB=1]", shared.nbytes),)
        assert plan.slots[slot(f"{name}.again[MB=1]")].shares == (
            ("PP=0.storage0.again[MB=1]", shared.nbytes),
        )


def test_what_a_backward_still_uses_of_its_input_is_that_of_the_second_run() -> None:
    """A chunk that keeps its input without reading it, as one under eager autograd does."""
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a")])
    last = d.chunk("PP=0 #1", pp(0), [first], [d.param("b")], [SCALAR])
    outline = d.outline(last)
    back = replace(outline.chunks[1].phases["B"], inputs=())
    eager = replace(outline.chunks[1], kept_inputs={"B": (0,)})
    eager = replace(eager, phases={**eager.phases, "B": back})
    outline = replace(outline, chunks=(outline.chunks[0], eager))
    plan = compiled(outline, remat(at(), 1, across="PP")).of(0)
    freed = {slot: ins.node for ins in plan.instrs for slot in ins.frees}
    assert freed[slot("PP=0.out0")] == "F[PP=0 #1]"
    assert freed[slot("PP=0.out0.again")] == "B[PP=0 #1]"


def test_an_output_that_two_regions_read_is_one_value() -> None:
    """What the first run gave is read outside, what the second gave inside."""
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a")])
    second = d.chunk("PP=0 #1", pp(0), [first], [d.param("b")])
    last = d.chunk("PP=1", pp(1), [second, first], [d.param("c")], [SCALAR])
    assert first == Output(chunk="PP=0", index=0)
    plan = compiled(d.outline(last), remat(at(PP=0), 1, across="PP")).of(0)
    readers = {
        slot: [ins.node for ins in plan.instrs if slot in ins.reads]
        for slot in slots("PP=0.out0", "PP=0.out0.again")
    }
    assert readers == {
        "PP=0.out0": ["F[PP=0 #1]", "F[PP=1]", "B[PP=1]"],
        "PP=0.out0.again": ["R[PP=0 #1]", "B[PP=0 #1]"],
    }
