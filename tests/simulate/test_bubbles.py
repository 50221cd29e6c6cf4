"""The bubble tables: what papers say of schedules, by the simulator over the plans that run."""

import pytest

from piper import at, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.graph import start
from piper.simulate.costs import Unit
from piper.simulate.simulate import simulate
from tests.chain import chain
from tests.lower.lowering import lower
from tests.simulate.overlapped_groups import overlapped
from tests.simulate.pipelines import pipeline

SIZES = [(1, 3), (2, 4), (3, 7), (4, 8), (4, 12), (6, 12), (8, 16)]
COSTS = [(1, 1, 1), (2, 2, 1), (3, 2, 1), (4, 4, 3)]  # F, I, W
V_COSTS = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 1)]  # the table takes F and I as equal


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), COSTS)
@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
def test_1f1b_and_gpipe(schedule: object, f: int, i: int, w: int, ranks: int, microbatches: int) -> None:
    plans, outline, _ = pipeline(schedule, ranks, microbatches)  # type: ignore[arg-type]
    found = simulate(plans, outline, Unit(forward=f, inward=i, weight=w))
    b = i + w
    assert [account.bubble for account in found.accounts] == [(ranks - 1) * (f + b)] * ranks
    assert found.step == microbatches * (f + b) + (ranks - 1) * (f + b)
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 2), (5, 5, 5)])
def test_zero_bubble(f: int, i: int, w: int, ranks: int, microbatches: int) -> None:
    plans, outline, _ = pipeline(schedules.zero_bubble, ranks, microbatches)
    found = simulate(plans, outline, Unit(forward=f, inward=i, weight=w))
    bubble = (ranks - 1) * (f + (i + w) - 2 * w)
    assert [account.bubble for account in found.accounts] == [bubble] * ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 9), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize(("f", "i", "w"), V_COSTS)
def test_dualpipe_v(f: int, i: int, w: int, ranks: int, microbatches: int) -> None:
    plans, outline, work = pipeline(
        schedules.dualpipe_v, ranks, microbatches, stages_per_rank=2, v_shape=True
    )
    units = Unit(forward=f, inward=i, weight=w)
    b = i + w
    pair = f + b
    as_pairs = simulate(plans, outline, units, together=overlapped(work.graph))
    bubble = (ranks - 1) * (pair + b - 3 * w)  # ranks = PP / 2
    assert [account.bubble for account in as_pairs.accounts] == [bubble] * ranks
    as_run = simulate(plans, outline, units)
    assert as_run.step <= as_pairs.step, "a pair's members start when each can"


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(2, 4), (4, 8), (4, 12), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((6, 12), (8, 20)))],
)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (4, 4, 1)])
def test_dualpipe(f: int, i: int, w: int, ranks: int, microbatches: int) -> None:
    plans, outline, work = pipeline(schedules.dualpipe, ranks, microbatches, both_ways=True)
    units = Unit(forward=f, inward=i, weight=w)
    b = i + w
    as_pairs = simulate(plans, outline, units, together=overlapped(work.graph))
    bubble = (ranks // 2 - 1) * ((f + b) + b - 3 * w)
    assert [account.bubble for account in as_pairs.accounts] == [bubble] * ranks
    assert simulate(plans, outline, units).step <= as_pairs.step, "a pair's members start when each can"


@pytest.mark.parametrize("schedule", ["gpipe", "dualpipe_v"])
def test_pieces_of_a_pass_do_not_wait_for_each_other(schedule: str) -> None:
    """Around experts a pass is several chunks: only the first of each pass in a group starts with the others."""
    outline = chain(4, experts=4)
    strategy: list[Directive] = [
        shard(at(PP=stage), [0, 1] if stage in (0, 3) else [2, 3], ways=2) for stage in range(4)
    ]
    orders = schedules.gpipe(4, 8) if schedule == "gpipe" else schedules.dualpipe_v(2, 8)
    plans, work = lower(apply(start(outline), [*strategy, split(at(), parts=8), *orders]))
    groups = overlapped(work.graph)
    if schedule == "gpipe":
        assert groups == []
    else:
        assert {len(group) for group in groups} == {2}
        assert ("F[PP=3 MB=0]", "B[PP=3 #1 MB=0]") not in groups
    as_pairs = simulate(plans, outline, Unit(), together=groups)
    assert as_pairs.step >= simulate(plans, outline, Unit()).step


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_interleaved(ranks: int, microbatches: int) -> None:
    plans, outline, _ = pipeline(schedules.interleaved_1f1b, ranks, microbatches, stages_per_rank=2)
    found = simulate(plans, outline, Unit())
    assert [account.bubble for account in found.accounts] == [3 * (ranks - 1)] * ranks


def test_replicas_do_not_change_the_bubble() -> None:
    plans, outline, _ = pipeline(schedules.one_f_one_b, 4, 8, replicas=3, zero=3)
    found = simulate(plans, outline, Unit())
    assert [account.bubble for account in found.accounts] == [9] * 4
