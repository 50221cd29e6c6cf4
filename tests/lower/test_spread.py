"""Microbatches of one stage on different devices: its parameters live on all of them, and sums hold each row once."""

from inspect import cleandoc

import pytest

from piper.directives import Directive, apply, order, place, replicate, shard, split
from piper.errors import ScheduleError
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.ir.select import at
from piper.plan.plan import Plans
from piper.plan.text import read_plans, show_plans
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.machine import examine
from tests.lower.outlines import fitted, frozen, mixture, normed, skips

PARTS = 4
Sets = dict[int, list[tuple[list[int], list[int]]]]  # by stage: microbatches and their devices


def compiled(outline: CapturedModel, strategy: list[Directive]) -> Plans:
    """Plans that are proven, examined in several orders that they allow, and read back from text."""
    graph = apply(start(outline), [split(at(), parts=PARTS), *strategy])
    plans, work = lower(graph, outline=fitted(graph))
    examine(plans, work.graph, 0, 1)
    assert read_plans(show_plans(plans)) == plans
    return plans


def spread(sets: Sets, zero: int) -> list[Directive]:
    return [
        replicate(at(PP=stage, MB=parts), devices, zero=zero)
        for stage, homes in sets.items()
        for parts, devices in homes
    ]


SETS: dict[str, Sets] = {
    "both ways": {s: [([0, 1], [s]), ([2, 3], [2 - s])] for s in range(3)},
    "both ways, two devices": {
        s: [([0, 2], [2 * s, 2 * s + 1]), ([1, 3], [4 - 2 * s, 5 - 2 * s])] for s in range(3)
    },
    "overlapping": {
        0: [([0], [0, 1]), ([1, 2], [1, 2]), ([3], [2, 0])],
        1: [([0, 1, 2, 3], [0, 1])],
        2: [([0, 1], [2, 3]), ([2, 3], [0, 1])],
    },
    "in another order": {s: [([0, 1], [0, 1]), ([2, 3], [1, 0])] for s in range(3)},
    "one of them alone": {
        0: [([0, 1, 2], [0]), ([3], [1])],
        1: [([0, 1, 2, 3], [2])],
        2: [([0, 1, 2, 3], [2])],
    },
}


@pytest.mark.parametrize("zero", [0, 3, *(pytest.param(z, marks=pytest.mark.slow) for z in (1, 2))])
@pytest.mark.parametrize("sets", SETS.values(), ids=list(SETS))
@pytest.mark.parametrize("outline", [skips(), normed()], ids=["skips", "normed"])
def test_microbatches_on_any_sets(outline: CapturedModel, sets: Sets, zero: int) -> None:
    last = len({dict(chunk.tags)["PP"] for chunk in outline.chunks})
    compiled(outline, spread({stage: homes for stage, homes in sets.items() if stage < last}, zero))


@pytest.mark.parametrize("devices", [[1, 2], [2, 3]], ids=["one shared", "apart"])
def test_neighbouring_backwards_on_sets_that_share_a_device(devices: list[int]) -> None:
    """One reduction takes what both sets have, of a device in both the sum, and one the rest."""
    sets = {stage: [([0, 1, 2], [0, 1]), ([3], devices)] for stage in range(2)}
    backwards = [[at(PP=stage, PASS="B")] for stage in (1, 0)]
    graph = apply(
        start(chain(2, width=8)),
        [split(at(), parts=PARTS), *spread(sets, 2), order([[at(PASS="F")], *backwards])],
    )
    plans, work = lower(graph)
    examine(plans, work.graph, 0, 1)
    for plan in plans:
        reduced = [ins.bucket for ins in plan.instrs if ins.op == "reduce_scatter"]
        assert sorted(reduced) == ["PP=0/0", "PP=0/0", "PP=1/0", "PP=1/0"]


@pytest.mark.parametrize("zero", [0, 2, *(pytest.param(z, marks=pytest.mark.slow) for z in (1, 3))])
def test_experts_are_divided_alike_on_each_set(zero: int) -> None:
    homes = [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    strategy: list[Directive] = [replicate(at(MB=parts), devices, zero=zero) for parts, devices in homes]
    strategy += [shard(at(EP="*", MB=parts), devices, ways=2) for parts, devices in homes]
    plans = compiled(mixture(), strategy)
    divided = [bucket for bucket in plans.buckets.values() if bucket.pieces[0].shardings]
    assert {(bucket.devices, bucket.groups) for bucket in divided} == {((0, 1, 2, 3), ((0, 2), (1, 3)))}
    assert {bucket.devices for bucket in plans.buckets.values()} == {(0, 1, 2, 3)}


def test_parameters_live_on_all_devices_and_are_sharded_over_them() -> None:
    plans = compiled(frozen(), spread({s: [([0, 1], [s]), ([2, 3], [1 - s])] for s in range(2)}, 3))
    owned = {(b.devices, b.groups, b.zero) for b in plans.buckets.values() if b.chunks[0].startswith("PP=1")}
    assert owned == {((1, 0), ((1, 0),), 3)}
    first = plans.chunks["PP=0"]
    assert (first.devices, first.elsewhere) == ((0,), {(("MB", 2),): (1,), (("MB", 3),): (1,)})
    assert [first.devices_for((("MB", i),)) for i in range(PARTS)] == [(0,), (0,), (1,), (1,)]


def said(outline: CapturedModel, *strategy: Directive) -> str:
    with pytest.raises(ScheduleError) as caught:
        graph = apply(start(outline), list(strategy))
        lower(graph, outline=fitted(graph))
    return str(caught.value)


def without_lines(text: str) -> str:
    """A message without the numbers of source lines."""
    head, *rest = text.splitlines()
    return "\n".join([head.partition(" (")[0] + head.partition(")")[2], *rest])


def test_a_microbatch_whose_passes_are_apart() -> None:
    found = said(
        skips(), split(at(), parts=2), place(at(), 0), place(at(PP=1, MB=1), 1), place(at(PP=1, PASS="B"), 0)
    )
    assert without_lines(found) == cleandoc("""
        place #3: PP=1 #1 would live in two places
          F[PP=1 #1 MB=1]: on 1
          B[PP=1 #1 MB=1]: on 0
          hint:            place all passes of a microbatch on the same devices
    """)


def test_sets_of_different_sizes() -> None:
    found = said(skips(), split(at(), parts=2), place(at(), [0, 1]), place(at(PP=1, MB=1), 2))
    assert without_lines(found) == cleandoc("""
        place #2: the microbatches of PP=1 are on sets of different sizes
          F[PP=1 MB=0]: on 0,1
          F[PP=1 MB=1]: on 2
          hint:         place them on sets of one size: they get slices of the samples of one size
    """)


def test_groups_that_contradict() -> None:
    found = said(
        mixture(),
        split(at(), parts=2),
        shard(at(MB=0), [0, 1], ways=2),
        shard(at(MB=1), [1, 0], ways=2),
    )
    assert without_lines(found).splitlines()[0] == (
        "shard #2: the groups of 2 devices that shard PP=0 EP=0 route contradict each other"
    )
    assert found.endswith("put each device into the same group, at the same place, for all microbatches")


def test_microbatches_that_ask_for_different_levels() -> None:
    found = said(
        skips(),
        split(at(), parts=2),
        replicate(at(MB=0), [0, 1], zero=1),
        replicate(at(MB=1), [2, 3], zero=3, bucket_mb=4),
    )
    assert without_lines(found).splitlines()[0] == (
        "replicate #2: the microbatches of PP=0 contradict each other about its parameters"
    )
    facts = [line.split(" by ")[0] for line in found.splitlines()[1:3]]
    assert facts == ["  PP=0 MB=0: zero=1, ways=1", "  PP=0 MB=1: zero=3, ways=1, bucket_mb=4"]


def test_microbatches_that_shard_different_weights() -> None:
    found = said(
        skips(),
        split(at(), parts=2),
        shard(at(MB=0), [0, 1], axis="TP", weights={"a": 0}),
        shard(at(MB=1), [0, 1], axis="TP", weights={"b": 0}),
    )
    assert without_lines(found).splitlines()[0] == (
        "shard #2: the microbatches of PP=0 contradict each other about its parameters"
    )
    facts = [line.split(" by ")[0] for line in found.splitlines()[1:3]]
    assert facts == ["  PP=0 MB=0: zero=0, ways=1, TP=2 of a", "  PP=0 MB=1: zero=0, ways=1, TP=2 of b"]


def test_microbatches_that_there_are_not_yet() -> None:
    found = said(skips(), place(at(PP=0, MB=0), 0), split(at(), parts=2))
    assert without_lines(found) == cleandoc("""
        place #0: there is no tag 'MB'
          asked: at(MB=0, PP=0)
          tags:  PP
          hint:  annotate the model with it, or split along it first
    """)
