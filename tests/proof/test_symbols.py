"""The pieces of the proof of values: sums of contributions, covers of samples, what names mean, the specification."""

from collections import Counter
from dataclasses import replace

from piper.directives import apply, order, replicate, shard, split
from piper.ir.graph import Graph, microbatches_of, start
from piper.ir.ids import Pass, SlotId
from piper.ir.mesh import Axis
from piper.ir.select import at
from piper.plan.ops import Field, OfBucket, OfChunk, Payload, Routing, Rows
from piper.plan.plan import Comm, Plan, Plans
from piper.proof.covers import Covers
from piper.proof.local_rules import described
from piper.proof.specification import Specification
from piper.proof.symbolic_state import SymbolicState
from piper.proof.symbolic_values import NOTHING, Amounts
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.outlines import normed, skips
from tests.proof.plans import pipeline


def test_sums_do_not_depend_on_the_order_but_on_how_often() -> None:
    amounts = Amounts()
    a, b, c = map(amounts.single, "abc")
    assert len({a, b, c, NOTHING}) == 4
    assert amounts.single("a") == a
    assert amounts.add(amounts.add(a, b), c) == amounts.add(c, amounts.add(b, a))
    assert amounts.add(a, NOTHING) == a == amounts.add(NOTHING, a)
    assert amounts.add(a, a) != a
    assert amounts.times(a, 3) == amounts.add(a, amounts.add(a, a))
    assert amounts.times(a, 0) == NOTHING
    assert amounts.add(a, amounts.times(b, 2)) != amounts.add(amounts.times(a, 2), b)


def test_a_sum_can_be_written_out() -> None:
    amounts = Amounts()
    total = NOTHING
    for label in "abcab":
        total = amounts.add(total, amounts.single(label))
    assert amounts.contributions(total) == Counter(a=2, b=2, c=1)
    assert amounts.contributions(amounts.add(total, total)) == Counter(a=4, b=4, c=2)
    assert amounts.contributions(NOTHING) == Counter()


def four_devices(*programs: tuple[int, ...], comms: tuple[Comm, ...] = ()) -> Covers:
    """Covers of programs of a job on four devices, whose samples are cut into four cells."""
    plans = [Plan(devices=devices, instrs=(), slots={}, residents={}) for devices in programs]
    by_name = {comm.name: comm for comm in comms}
    return Covers(Plans(plans=tuple(plans), comms=by_name, buckets={}, seed=1.0, weighted=False), cells=4)


def held(covers: Covers, cover: int | None) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    assert cover is not None
    return covers.on_devices(cover)


def test_the_slices_of_a_set() -> None:
    covers = four_devices((0, 1), (2, 3))
    assert held(covers, covers.of_set(0, (0, 1))) == (((0, 2, 1),), ((2, 4, 1),))
    assert held(covers, covers.of_set(0, (1, 0))) == (((2, 4, 1),), ((0, 2, 1),))
    assert held(covers, covers.of_set(1, (0, 1, 2, 3))) == (((2, 3, 1),), ((3, 4, 1),))
    assert covers.of_set(1, (0, 1)) is None
    assert covers.of_set(0, (0, 1, 2)) is None  # four cells do not divide by three


def test_the_rows_of_divided_experts() -> None:
    """Each device of a group works on all rows of its group, at its own share: four cells further on."""
    covers = four_devices((0, 1, 2, 3))
    assert held(covers, covers.of_set(0, (0, 1, 2, 3), experts=Axis(degree=2))) == (
        ((0, 2, 1),), ((4, 6, 1),), ((2, 4, 1),), ((6, 8, 1),),
    )  # fmt: skip
    assert held(covers, covers.own_share(0, (0, 1, 2, 3), Axis(degree=2))) == (
        ((0, 4, 1),), ((4, 8, 1),), ((0, 4, 1),), ((4, 8, 1),),
    )  # fmt: skip
    assert (
        held(covers, covers.own_share(0, (0, 1, 2, 3), Axis(degree=2), every_share=True))
        == (((0, 8, 1),),) * 4
    )


def test_cutting_and_joining() -> None:
    covers = four_devices((0,), (1,))
    whole = covers.of_set(0, (0,))
    assert whole is not None
    first, second = covers.cut(whole, 0, 1, 2), covers.cut(whole, 1, 2, 2)
    assert held(covers, first) == (((0, 2, 1),),)
    assert held(covers, second) == (((2, 4, 1),),)
    assert first is not None and second is not None
    assert covers.joined((first, second)) == whole
    assert covers.joined((second, first)) is None
    assert covers.joined((first, first)) is None
    assert covers.cut(whole, 0, 1, 3) is None  # within a cell
    assert covers.cut(whole, 1, 1, 2) is None
    assert covers.cut(whole, 1, 3, 2) is None


def test_sums_over_groups() -> None:
    everyone = Comm(name="all", kind="groups", groups=((0, 1, 2, 3),))
    across = Comm(name="across", kind="groups", groups=((0, 2), (1, 3)))
    covers = four_devices((0, 1), (2, 3), comms=(everyone, across))
    slices = [covers.of_set(0, (0, 1, 2, 3)), covers.of_set(1, (0, 1, 2, 3))]
    assert slices[0] is not None and slices[1] is not None
    given = ((0, slices[0]), (1, slices[1]))
    assert covers.summed("all", given, (0, 1)) == {
        0: covers.own_share(0, (0, 1), None),
        1: covers.own_share(1, (2, 3), None),
    }
    crossed = covers.summed("across", given, (0, 1))
    assert held(covers, crossed[0]) == (((0, 1, 1), (2, 3, 1)), ((1, 2, 1), (3, 4, 1)))
    full = ((0, covers.own_share(0, (0, 1), None)), (1, covers.own_share(1, (2, 3), None)))
    assert held(covers, covers.summed("all", full, (0, 1))[0]) == (((0, 4, 4),),) * 2


def test_what_is_received_is_what_the_peer_sent() -> None:
    straight = Comm(name="straight", kind="pairs", groups=((0, 2), (1, 3)))
    crossed = Comm(name="crossed", kind="pairs", groups=((0, 3), (1, 2)))
    covers = four_devices((0, 1), (2, 3), comms=(straight, crossed))
    sent = covers.of_set(0, (0, 1))
    assert sent is not None
    assert held(covers, covers.received("straight", 1, ((0, sent),))) == (((0, 2, 1),), ((2, 4, 1),))
    assert held(covers, covers.received("crossed", 1, ((0, sent),))) == (((2, 4, 1),), ((0, 2, 1),))


def test_slots_are_read_as_the_runtime_reads_them() -> None:
    plans, graph = pipeline()
    state = SymbolicState(plans, Specification(graph, clip=False))
    name, bucket = next(iter(plans.buckets.items()))
    run = Pass(phase="B", chunk="PP=0", part=(("MB", 0),))
    for slot in (SlotId("grad", name), SlotId("grad_shard", name), SlotId("grad", name, run=run)):
        assert state.gradient_bucket(slot) is bucket
    for other in (SlotId("grad", "PP=9/0"), SlotId("gradient", name, part=(("MB", 0),)), SlotId("loss")):
        assert state.gradient_bucket(other) is None


def test_payloads_in_words() -> None:
    run = Pass(phase="F", chunk="PP=0", part=(("MB", 1),))
    payloads: dict[str, Payload] = {
        "run=F[PP=0 MB=1]": run,
        "field=x devices=0": Field(name="x", part=(), devices=(0,)),
        "rows=1:3/4": Rows(start=1, stop=3, of=4),
        "run=F[PP=0 MB=1] outward=0": Routing(run=run, outward=False),
        "bucket=PP=0/0 run=F[PP=0 MB=1]": OfBucket(bucket="PP=0/0", run=run),
        "chunk=PP=0": OfChunk(chunk="PP=0"),
        "nothing": None,
    }
    assert [described(payload) for payload in payloads.values()] == [*payloads]


def settled(outline: object, *strategy: object) -> Graph:
    graph = apply(start(outline), list(strategy))  # type: ignore[arg-type]
    return replace(lower(graph)[1].graph, outline=graph.outline)


def test_microbatches_in_order() -> None:
    assert microbatches_of(()) == ((),)
    assert microbatches_of((("MB", 2), ("K", 2))) == (
        (("MB", 0), ("K", 0)),
        (("MB", 0), ("K", 1)),
        (("MB", 1), ("K", 0)),
        (("MB", 1), ("K", 1)),
    )


def test_the_specification_of_a_graph() -> None:
    graph = settled(skips(), replicate(at(), [0, 1]), split(at(), parts=2))
    spec = Specification(graph, clip=False)
    assert spec.cells == 2
    assert spec.seed == 0.25
    assert spec.axes == {"MB": 2}
    assert spec.contributors == {
        "a": ["PP=0"], "tied": ["PP=0", "PP=1 #1"], "b": ["PP=0 #1"], "c": ["PP=1"], "e": ["PP=2"],
    }  # fmt: skip
    assert spec.readers[("PP=0", 0)] == [
        ("PP=0 #1", 0), ("PP=0 #1", 1), ("PP=1", 0), ("PP=1 #1", 0), ("PP=2", 1),
    ]  # fmt: skip
    weighted = Specification(settled(normed(), replicate(at(), [0, 1])), clip=True)
    assert weighted.seed == 1.0
    assert weighted.mutated == {"mean"}


def test_a_route_that_moves_nothing_is_seen_through() -> None:
    outline = chain(1, width=8, experts=4)
    route, expert = "PP=0 EP=0 route", "PP=0 EP=0"
    alone = Specification(settled(outline, replicate(at(), [0, 1])), clip=False)
    assert alone.moves_nothing(route) and not alone.routed(expert)
    assert alone.readers[("PP=0", 0)] == [(expert, 0)]
    divided = settled(outline, replicate(at(), [0, 1]), shard(at(EP="*"), [0, 1]))
    spec = Specification(divided, clip=False)
    assert not spec.moves_nothing(route) and spec.routed(expert) and not spec.routed("PP=0 EP=0 unroute")
    assert spec.readers[("PP=0", 0)] == [(route, 0)]


def test_forwards_are_in_order_unless_a_directive_says_otherwise() -> None:
    def steps(*parts: int) -> object:
        return order([[at(PP=0, MB=part, PASS="F")] for part in parts])

    outline, parts = chain(1, width=8), split(at(), parts=3)
    assert Specification(settled(outline, parts), clip=False).in_order("PP=0")
    assert Specification(settled(outline, parts, steps(0, 1, 2)), clip=False).in_order("PP=0")
    assert not Specification(settled(outline, parts, steps(0, 2, 1)), clip=False).in_order("PP=0")
    assert not Specification(settled(outline, parts, steps(0, 1)), clip=False).in_order("PP=0")
