"""Sets of devices that differ in size or overlap: samples are sliced anew, and sums still hold each row once."""

import pytest

from piper.directives import Directive, apply, order, place, replicate, shard, split
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.ir.select import at
from piper.plan.plan import Plans
from piper.plan.prove import prove
from piper.plan.text import read_plans, show_plans
from tests.lower.lowering import lower
from tests.lower.machine import examine
from tests.lower.outlines import (
    EXPERTS,
    SCALAR,
    WIDTH,
    Drawing,
    X,
    Y,
    fitted,
    frozen,
    mixture,
    normed,
    pp,
    skips,
)
from tests.slots import slot


def compiled(outline: CapturedModel, strategy: list[Directive]) -> Plans:
    """Plans that are proven, and examined in several orders that they allow."""
    graph = apply(start(outline), strategy)
    plans, work = lower(graph, outline=fitted(graph))
    prove(plans)
    examine(plans, work.graph, 0, 1)
    return plans


SETS = {
    "one device": ([0], [0], [0]),
    "a pipeline": ([0], [1], [2]),
    "growing": ([0], [1, 2], [3, 4, 5, 6]),
    "shrinking": ([3, 4, 5, 6], [1, 2], [0]),
    "two and three": ([0, 1], [2, 3, 4], [5, 6]),
    "overlapping": ([0, 1], [1, 2], [2, 0]),
    "overlapping, growing": ([0, 1], [0, 1, 2, 3], [3, 2, 1, 0]),
    "the same, in another order": ([0, 1, 2], [2, 0, 1], [0, 1, 2]),
    "inside each other": ([0], [0, 1], [0, 1, 2]),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("sets", SETS.values(), ids=list(SETS))
@pytest.mark.parametrize("outline", [skips(), normed(), frozen()], ids=["skips", "normed", "frozen"])
def test_stages_on_any_sets(outline: CapturedModel, sets: tuple[list[int], ...], zero: int) -> None:
    strategy: list[Directive] = [replicate(at(), [0])]
    last = len({dict(chunk.tags)["PP"] for chunk in outline.chunks})
    strategy += [replicate(at(PP=i), devices, zero) for i, devices in enumerate(sets[:last])]
    compiled(outline, [*strategy, split(at(), parts=2), split(at(), axis="K", parts=3)])


def test_a_tied_parameter_on_sets_of_different_sizes_is_whole_and_summed_over_all() -> None:
    strategy = [replicate(at(PP=i), devices, zero=3) for i, devices in enumerate([[0, 1], [1, 2], [3]])]
    plans = compiled(skips(), [*strategy])
    bucket = plans.buckets["tied"]
    assert (bucket.devices, bucket.groups, bucket.zero, bucket.copies) == (
        (0, 1, 2, 3),
        ((0, 1, 2, 3),),
        0,
        4,
    )
    assert plans.why == (
        "tied: not sharded, because its chunks live on sets that differ in size or overlap (0,1, 1,2, 3)",
    )


def test_a_tied_parameter_on_sets_of_one_size_stays_sharded() -> None:
    strategy = [replicate(at(PP=i), [2 * i, 2 * i + 1], zero=3 - i) for i in range(3)]
    plans = compiled(skips(), [*strategy, split(at(), parts=2)])
    tied = [bucket for bucket in plans.buckets.values() if bucket.name.startswith("tied@")]
    assert [(b.name, b.devices, b.zero, b.copies, len(b.siblings)) for b in tied] == [
        ("tied@PP=0", (0, 1), 1, 3, 2),
        ("tied@PP=1 #1", (2, 3), 1, 3, 2),
        ("tied@PP=2", (4, 5), 1, 3, 2),
    ]
    assert plans.why == ()


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("tied", [False, True])
def test_experts_over_groups_of_replicas(ways: int, zero: int, tied: bool) -> None:
    first, second = range(4), range(4) if tied else range(4, 8)
    strategy: list[Directive] = [replicate(at(PP=0), first, zero), replicate(at(PP=1), second, zero)]
    strategy += [shard(at(EP=0), first, ways), shard(at(EP=1), second, ways), split(at(), parts=2)]
    compiled(mixture(tied), strategy)


@pytest.mark.parametrize("first", [[0], [0, 3], [1, 2]])
@pytest.mark.parametrize("divided", [1, 2])
def test_two_readers_on_the_same_devices_that_have_other_samples(first: list[int], divided: int) -> None:
    """The devices of one share their samples, and those of the other do not: the value arrives for each."""
    d = Drawing()
    source = d.chunk("PP=0", pp(0), [X], [d.param("a")])
    second = d.chunk("PP=1", pp(1), [source], [d.param("b")])
    loss = d.chunk("PP=2", pp(2), [second, source, Y], [d.param("c")], [SCALAR])
    strategy: list[Directive] = [replicate(at(PP=0), first), replicate(at(PP=[1, 2]), [1, 2])]
    strategy += [shard(at(PP=divided), [1, 2], axis="TP", weights={"w": 0}), split(at(), parts=2)]
    plans = compiled(d.outline(loss), strategy)
    assert read_plans(show_plans(plans)) == plans
    arrived = {value.base for plan in plans for ins in plan.instrs for value in ins.writes}
    shared = {value for value in arrived if value.owner == "PP=0" and value.kind == "output"}
    assert len(shared - {"PP=0.out0"}) == (1 if first == [1, 2] else 2)


def test_an_expert_region_on_other_devices_than_its_neighbours() -> None:
    strategy = [place(at(), [0, 1]), shard(at(EP=0), [2, 3]), place(at(EP=1), [1, 0]), split(at(), parts=2)]
    compiled(mixture(), strategy)


def test_halves_of_backwards_in_any_order() -> None:
    strategy = [place(at(PP=0), [0, 1]), place(at(PP=1), [2]), split(at(), parts=2)]
    halves = [[at(PP=1, MB=1, PASS="BI")], [at(PP=1, MB=0, PASS="BI")], [at(PP=1, PASS="BW")]]
    for outline in (mixture(), mixture(halves="tangents")):
        compiled(outline, [*strategy, order(halves)])


def test_buffers_follow_the_first_replica() -> None:
    plans = compiled(normed(), [replicate(at(), [2, 0, 1])])
    sent = [ins for ins in plans.of(0).instrs if ins.op == "broadcast"]
    assert [(ins.reads, ins.comm) for ins in sent] == [(("buffer.mean",), "2,0,1:reduce")]
    assert plans.comms["2,0,1:reduce"].groups == ((2, 0, 1),)


def test_a_weight_from_a_part_of_the_graph_that_is_not_split() -> None:
    d = Drawing()
    loss = d.chunk("PP=0", pp(0), [X], [d.param("a")], [SCALAR])
    weight = d.chunk("TT=0", (("TT", 0),), [Y], outputs=[SCALAR])
    strategy = [replicate(at(PP=0), [0, 1]), place(at(TT=0), [2, 3, 4]), split(at(PP=0), parts=2)]
    compiled(d.outline(loss, weight), strategy)


def test_a_device_holds_the_buffers_of_its_own_experts() -> None:
    plans = compiled(mixture(), [replicate(at(), range(4)), shard(at(EP="*"), range(4), ways=2)])
    assert plans.of(0).residents[slot("buffer.used.0")].nbytes == 4 * EXPERTS * WIDTH // 2
    assert not any(ins.op == "broadcast" for ins in plans.of(0).instrs)


def test_nothing_is_learnt_of_a_parameter_without_a_gradient() -> None:
    plans = compiled(skips(), [replicate(at(), [0, 1], zero=2)])
    kinds = {piece.name: bucket.trainable for bucket in plans.buckets.values() for piece in bucket.pieces}
    assert kinds == {"a": True, "tied": True, "cold": False, "b": True, "c": True, "idle": False, "e": True}
    assert not any("state" in name for name in plans.of(0).residents if "cold" in name or "idle" in name)
