"""Activations on the host, in small pictures: which are copied out, when they come back, and what stays."""

from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.directives import Directive, offload, place, remat, replicate, split
from piper.errors import ScheduleError
from piper.ir.select import at
from piper.plan.memory_timeline import allocations, host_peak, timeline
from piper.plan.plan import Plans
from piper.plan.text import read_plans, show_plans
from piper.schedules import gpipe, zero_bubble
from tests.chain import chain
from tests.lower.outlines import normed, skips
from tests.lower.test_lines import compiled, shown, stages
from tests.proof.plans import made
from tests.slots import slot, slots


def lines(plans: Plans, device: int) -> str:
    return shown(plans.of(device), "compute", "offload", "fetch")


def test_a_copy_out_and_a_copy_back_each_overlap_one_compute_node() -> None:
    plans = compiled(chain(2, width=4), *stages(2, 4), offload(at(PP=0), least_mb=0), *gpipe(2, 4))
    assert lines(plans, 0) == cleandoc("""
        F[PP=0 MB=0]
        F[PP=0 MB=1]
        offload offload[PP=0.saved[MB=0]]
        F[PP=0 MB=2]
        offload offload[PP=0.saved[MB=1]]
        fetch fetch[PP=0.saved.fetched0[MB=0]]
        F[PP=0 MB=3]
        offload offload[PP=0.saved[MB=2]]
        fetch fetch[PP=0.saved.fetched0[MB=1]]
        B[PP=0 MB=0]
        offload offload[PP=0.saved[MB=3]]
        fetch fetch[PP=0.saved.fetched0[MB=2]]
        B[PP=0 MB=1]
        fetch fetch[PP=0.saved.fetched0[MB=3]]
        B[PP=0 MB=2]
        B[PP=0 MB=3]
    """)
    assert lines(plans, 1).count("offload") == 0
    assert read_plans(show_plans(plans)) == plans


def test_the_copies_have_streams_of_their_own_and_the_backward_waits() -> None:
    named = offload(at(PP=0), least_mb=0, stream="pcie")
    plan = compiled(chain(2, width=4), *stages(2, 4), named, *gpipe(2, 4)).of(0)
    out, back = (
        next(ins for ins in plan.instrs if ins.op == op and "MB=0" in ins.node) for op in ("offload", "fetch")
    )
    assert (out.stream, back.stream) == ("pcie.out", "pcie.in")
    assert out.reads == out.frees == ("PP=0.saved[MB=0]",)
    assert out.writes == back.reads == back.frees == ("PP=0.saved.host[MB=0]",)
    assert (out.nbytes, back.nbytes) == (16, 16)
    reader = next(ins for ins in plan.instrs if ins.node == "B[PP=0 MB=0]")
    assert back.signals in reader.waits
    assert slot("PP=0.saved.fetched0[MB=0]") in reader.reads
    held = plan.slots[slot("PP=0.saved.host[MB=0]")]
    assert (held.nbytes, held.host) == (0, 16)
    nodes = [ins.node for ins in plan.instrs]
    following = plan.instrs[nodes.index("F[PP=0 MB=2]")]
    assert out.signals in following.waits  # memory is what the order of issue says
    before = plan.instrs[nodes.index("F[PP=0 MB=2]")].signals
    assert back.waits == (before,)  # a prefetch begins no earlier than one compute node ahead


def test_what_comes_back_is_allocated_for_the_stream_that_reads_it() -> None:
    plan = compiled(chain(2, width=4), *stages(2, 4), offload(at(PP=0), least_mb=0), *gpipe(2, 4)).of(0)
    found = allocations(plan)
    at_node = {name: plan.instrs[place].node for name, place in found.items()}
    assert at_node[slot("PP=0.saved.fetched0[MB=0]")] == "B[PP=0 MB=0]"
    assert at_node[slot("PP=0.saved.host[MB=0]")] == "offload[PP=0.saved[MB=0]]"


def test_the_device_holds_less_and_the_host_the_rest() -> None:
    strategy = [*stages(2, 8), *gpipe(2, 8)]
    kept = compiled(chain(2, width=256), *strategy).of(0)
    less = compiled(chain(2, width=256), *strategy, offload(at(), least_mb=0)).of(0)
    # Of eight activations of 1 KiB, three are there in the first backward: one is read, one comes, one goes.
    assert timeline(kept).peak - timeline(less).peak == 5 * 1024
    assert (host_peak(kept), host_peak(less)) == (0, 6 * 1024)


def test_more_time_for_each_copy() -> None:
    plans = compiled(chain(2, width=4), *stages(2, 6), offload(at(PP=0), least_mb=0, ahead=2), *gpipe(2, 6))
    found = lines(plans, 0).splitlines()
    assert found.index("offload offload[PP=0.saved[MB=0]]") - found.index("F[PP=0 MB=2]") == 1
    back = found.index("fetch fetch[PP=0.saved.fetched0[MB=0]]")
    computes = [line for line in found[back : found.index("B[PP=0 MB=0]")] if line[0] in "FB"]
    assert computes == ["F[PP=0 MB=4]", "F[PP=0 MB=5]"]


def test_halves_of_a_backward_read_it_at_different_times() -> None:
    """What BW reads comes back a second time, from the same copy; the input of the chunk does so too."""
    plans = compiled(chain(3, width=4), *stages(3, 8), offload(at(PP=1), least_mb=0), *zero_bubble(3, 8))
    plan = plans.of(1)
    backs = [ins for ins in plan.instrs if ins.op == "fetch"]
    outs = [ins for ins in plan.instrs if ins.op == "offload"]
    assert outs and backs
    freed = [name for ins in backs for name in ins.frees]
    assert sorted(freed) == sorted(name for ins in outs for name in ins.writes)


def test_a_value_stays_until_it_is_sent() -> None:
    """Else it would travel to the host and back first, and the receiver would not know its form."""
    strategy = [place(at(PP=i), [device]) for i, device in enumerate((0, 1, 0))]
    plans, _ = made(skips(), [*strategy, split(at(), parts=8), offload(at(), least_mb=0)])
    assert any(
        value.kind == "output" for ins in plans.of(0).instrs if ins.op == "offload" for value in ins.reads
    )
    sent = {value.kind for plan in plans for ins in plan.instrs if ins.op == "send" for value in ins.reads}
    assert sent == {"output", "input_gradient", "gradient_sum"}


def test_what_remat_keeps_across_is_offloaded() -> None:
    again = remat(at(PP=1), 1, across="PP")
    plans = compiled(chain(3, width=4), *stages(3, 4), again, offload(at(PP=1), least_mb=0), *gpipe(3, 4))
    assert lines(plans, 1).splitlines()[:4] == [
        "F[PP=1 MB=0]",
        "F[PP=1 MB=1]",
        "offload offload[PP=0.out0@1[MB=0]]",
        "F[PP=1 MB=2]",
    ]
    second = next(ins for ins in plans.of(1).instrs if ins.node == "R[PP=1 MB=0]")
    assert second.reads[0] == "PP=0.out0@1.fetched0[MB=0]"


def test_values_that_share_a_storage_go_together_and_count_once() -> None:
    outline = chain(2, width=4)
    first, last = outline.chunks
    view = replace(first.saved[0], storage=0)
    first = replace(first, outputs=(view,), saved=(view,), storages=(16,))
    plan = compiled(
        replace(outline, chunks=(first, last)), split(at(), parts=4), *gpipe(2, 4), offload(at(), least_mb=0)
    ).of(0)
    out = next(ins for ins in plan.instrs if ins.op == "offload")
    back = next(ins for ins in plan.instrs if ins.op == "fetch" and out.writes[0] in ins.reads)
    assert out.reads == slots("PP=0.out0[MB=0]", "PP=0.saved[MB=0]", "PP=1.saved[MB=0]")
    assert out.nbytes == back.nbytes == 2 * 16
    assert [plan.slots[name].host for name in out.writes] == [0, 16, 16]  # the one that is read last
    shared = slot("PP=0.storage0.fetched0[MB=0]")
    assert [plan.slots[name].shares for name in back.writes] == [((shared, 16),), ((shared, 16),), ()]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            [offload(at(), what="gradients")],
            """
            offload #0 (test_offload_lines.py:…): what must be "activations" or "optimizer", got 'gradients'
              hint: "optimizer" means its state
            """,
        ),
        (
            [offload(at(), to="disk")],
            """
            offload #0 (test_offload_lines.py:…): to must be "host", got 'disk'
              hint: there is no other memory to offload to
            """,
        ),
        (
            [offload(at(), ahead=0)],
            """
            offload #0 (test_offload_lines.py:…): ahead must be a whole number from 1, got 0
              hint: each copy may take so many compute nodes of the device
            """,
        ),
        (
            [offload(at(), least_mb=float("nan"))],
            """
            offload #0 (test_offload_lines.py:…): least_mb must be a size in MiB from 0, got nan
              hint: values that are smaller stay on the device
            """,
        ),
        (
            [offload(at(PP=7))],
            """
            offload #0 (test_offload_lines.py:…): the filter matches no node
              asked: at(PP=7)
              known: PP=0..1
              hint:  use an index that exists; only an order that asks for halves makes a backward BI and BW
            """,
        ),
        (
            [offload(at(PP=0, PASS="B"))],
            """
            offload #0 (test_offload_lines.py:…): the filter cuts through a chunk
              matched:  B[PP=0]
              left out: F[PP=0]
              hint:     select whole regions: leave PASS and axes of split out of the filter
            """,
        ),
        (
            [*stages(2, 3), offload(at(PP=0), least_mb=0), *gpipe(2, 3)],
            """
            offload #3 (test_offload_lines.py:…): everything that these regions save is read again too soon
              regions: PP=0
              needed:  3 compute nodes of the device between two uses (ahead=1)
              hint:    select earlier stages, split into more microbatches, or leave offload out
            """,
        ),
    ],
)
def test_errors(strategy: list[Directive], said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        compiled(chain(2, width=4), *strategy)
    found = str(caught.value)
    where = found[found.index("(") : found.index(")") + 1]
    assert found.replace(where, "(test_offload_lines.py:…)") == cleandoc(said)


def test_a_region_without_a_backward_saves_nothing() -> None:
    asked = [*(place(at(PP=i), [i]) for i in range(3)), split(at(), parts=4), offload(at(PP=0), least_mb=0)]
    with pytest.raises(ScheduleError) as caught:
        made(normed(), asked)
    assert str(caught.value).splitlines()[1:] == [
        "  regions: PP=0",
        "  hint:    select regions whose backward reads activations; rows that are routed, and what eager "
        "autograd saves, stay on the device",
    ]


def test_rows_that_are_routed_stay() -> None:
    plans = compiled(
        chain(1, width=4, experts=2), split(at(), parts=8), *gpipe(1, 8), offload(at(), least_mb=0)
    )
    moved = {name for plan in plans for ins in plan.instrs if ins.op == "offload" for name in ins.reads}
    assert moved
    assert not any(plans.of(0).slots[name].dynamic for name in moved)


def test_small_values_stay_and_the_plan_says_so() -> None:
    plans = compiled(chain(2, width=4), *stages(2, 4), offload(at(PP=0)), *gpipe(2, 4))
    assert lines(plans, 0).count("offload") == 0
    assert plans.why == ("PP=0: some saved activations stay on the device, because they are too small",)


def test_state_goes_through_the_device_bucket_by_bucket() -> None:
    """Each copy to the device is one update ahead, each copy back is over before the next update begins."""
    stage = [replicate(at(PP=0), [0], bucket_mb=1e-5), place(at(PP=1), [1]), split(at(), parts=2)]
    away = offload(at(PP=0), what="optimizer")
    plans = compiled(chain(2, width=4, layers=3), *stage, *gpipe(2, 2), away)
    plan = plans.of(0)
    assert shown(plan, "compute", "fetch", "update", "offload") == cleandoc("""
        F[PP=0 MB=0]
        F[PP=0 MB=1]
        B[PP=0 MB=0]
        fetch fetch[PP=0/0.state @0]
        B[PP=0 MB=1]
        fetch fetch[PP=0/1.state @0]
        update update[PP=0/0 @0]
        offload offload[PP=0/0.state @0]
        fetch fetch[PP=0/2.state @0]
        update update[PP=0/1 @0]
        offload offload[PP=0/1.state @0]
        update update[PP=0/2 @0]
        offload offload[PP=0/2.state @0]
    """)
    named = {ins.node: ins for ins in plan.instrs}
    first, out, second = (
        named[name] for name in ("update[PP=0/0 @0]", "offload[PP=0/0.state @0]", "update[PP=0/1 @0]")
    )
    assert first.reads == slots("PP=0/0.grad", "PP=0/0.state.fetched0")
    assert out.frees == slots("PP=0/0.state.fetched0")
    assert out.signals in second.waits
    assert named["fetch[PP=0/2.state @0]"].waits == (first.signals,)
    state = plan.residents[slot("PP=0/0.state")]
    assert (state.nbytes, state.host, state.everywhere) == (0, 128, 128)
    assert host_peak(plan) == 3 * 128
    assert plans.of(1).residents[slot("PP=1/0.state")].host == 0
    assert read_plans(show_plans(plans)) == plans


def test_both_kinds_at_once() -> None:
    both = [offload(at(PP=0), least_mb=0), offload(at(PP=0), what="optimizer")]
    plan = compiled(chain(2, width=4), *stages(2, 4), *both, *gpipe(2, 4)).of(0)
    assert {ins.node.partition("[")[0] for ins in plan.instrs if ins.op in ("offload", "fetch")} == {
        "offload",
        "fetch",
    }
    assert sum(ins.op == "fetch" for ins in plan.instrs) == 4 + 1


def test_parameters_that_do_not_train_have_no_state() -> None:
    with pytest.raises(ScheduleError) as caught:
        made(normed(), [offload(at(PP=0), what="optimizer")])
    assert str(caught.value).splitlines()[1:] == [
        "  regions: PP=0",
        "  hint:    select regions with parameters that train, under an optimizer that keeps state",
    ]
    assert "there is no optimizer state to offload" in str(caught.value)
