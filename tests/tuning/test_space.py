"""The space of candidates: what the model, the batch and the devices allow."""

from dataclasses import replace

import numpy as np

from piper.ir.dtypes import JobPrecision
from piper.simulate.measured import prices_of
from piper.tuning.choice import Divide, Recompute, StrategyChoice, directives_of
from piper.tuning.model import captured_model, scaled
from piper.tuning.space import Shapes, Sizes, Space, balanced, divisors, grid_of, late, meshes, schedules_of
from tests.chain import chain
from tests.tuning.models import JOB

DENSE = Shapes(devices=8, samples=32, layers=8, experts=0, tensor=False, context=False)


def arranged(space: Space, shapes: Shapes) -> set[tuple[int, ...]]:
    return {(c.ranks, c.replicas, c.tensor, c.context, c.experts) for c in meshes(space, shapes)}


def test_meshes_of_a_dense_model() -> None:
    assert arranged(Space(), DENSE) == {(1, 8, 1, 1, 1), (2, 4, 1, 1, 1), (4, 2, 1, 1, 1), (8, 1, 1, 1, 1)}


def test_no_pipeline_is_longer_than_the_model() -> None:
    short = Shapes(devices=8, samples=32, layers=2, experts=0, tensor=False, context=False)
    assert {ranks for ranks, *_ in arranged(Space(), short)} == {1, 2}


def test_microbatches_divide_the_samples_of_a_replica() -> None:
    found = {(c.replicas, c.rows, c.microbatches) for c in meshes(Space(ranks=(2,)), DENSE)}
    assert found == {(4, 1, 8), (4, 2, 4), (4, 4, 2), (4, 8, 1)}


def test_experts_divide_over_replicas() -> None:
    routed = Shapes(devices=8, samples=32, layers=8, experts=12, tensor=False, context=False)
    assert {(ranks, ep) for ranks, *_, ep in arranged(Space(), routed)} == {
        (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1),
    }  # fmt: skip


def test_tensor_and_context_groups() -> None:
    wide = Shapes(devices=4, samples=32, layers=8, experts=0, tensor=True, context=True)
    found = arranged(Space(ranks=(1,)), wide)
    assert {(tensor, context) for _, _, tensor, context, _ in found} == {
        (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1),
    }  # fmt: skip


def test_schedules_of_a_pipeline() -> None:
    space = Space(schedules=("1f1b", "interleaved-1f1b", "zbv", "synthesised"), stages_per_rank=(1, 2))
    assert list(schedules_of(space, 1)) == [("", 1, "loop")]
    assert list(schedules_of(space, 4)) == [
        ("1f1b", 1, "loop"),
        ("interleaved-1f1b", 2, "loop"),
        ("zbv", 2, "v"),
        ("synthesised", 1, "loop"),
        ("synthesised", 2, "loop"),
        ("synthesised", 2, "v"),
    ]


def test_stages_are_balanced_by_what_layers_cost() -> None:
    costs = [1] * 8
    costs[-1] = 5  # with a head

    def loads(sizes: Sizes) -> Sizes:
        found = [sorted((sum(costs[:one]), sum(costs[one:])), reverse=True) for one, _ in sizes]
        return np.array(found)

    assert balanced((4, 4), loads) == (6, 2)


def test_of_equally_busy_ranks_the_later_stage_has_more_layers() -> None:
    """The stages of a V: each of two ranks has two."""

    def loads(sizes: Sizes) -> Sizes:
        outer, inner = sizes[:, 0] + sizes[:, 3], sizes[:, 1] + sizes[:, 2]
        return np.stack([np.maximum(outer, inner), np.minimum(outer, inner)], axis=1)

    assert balanced((3, 2, 2, 3), loads) == (2, 2, 3, 3)


def test_later_stages_have_more_layers_where_no_stage_becomes_the_longest() -> None:
    """The stages of a V of three ranks; the last layer costs as much as three."""

    def loads(sizes: Sizes) -> Sizes:
        spent = sizes + np.array([0, 0, 0, 0, 0, 2])
        ranks = spent[:, :3] + spent[:, :2:-1]
        return np.concatenate([-np.sort(-ranks, axis=1), spent.max(axis=1, keepdims=True)], axis=1)

    assert late((2, 2, 2, 2, 3, 1), (0, 1, 2, 2, 1, 0), loads) == (2, 2, 1, 3, 3, 1)


def test_the_directives_of_a_candidate() -> None:
    choice = StrategyChoice(
        ranks=2,
        replicas=2,
        rows=1,
        microbatches=2,
        sizes=(3, 1),
        schedule="1f1b",
        zeros=(1, 3),
        recompute=Recompute(across=True),
    )
    made = directives_of(choice, grid_of(choice), "LAYER", Divide(), routed=False)
    assert list(map(str, made)) == [
        "replicate(at(LAYER=range(0, 3)), devices=[0, 1], zero=1)",
        "replicate(at(LAYER=3), devices=[2, 3], zero=3)",
        "split(at(), parts=2)",
        'order([at(LAYER=range(0, 3), MB=0, PASS="F"), at(LAYER=range(0, 3), MB=1, PASS="F"), '
        'at(LAYER=range(0, 3), MB=0, PASS="B"), at(LAYER=range(0, 3), MB=1, PASS="B")])',
        'order([at(LAYER=3, MB=0, PASS="F"), at(LAYER=3, MB=0, PASS="B"), at(LAYER=3, MB=1, PASS="F"), '
        'at(LAYER=3, MB=1, PASS="B")])',
        'remat(at(), budget=1.0, across="LAYER")',
    ]
    assert choice.label == ("PP2 DP2 zero 1/3, 2 microbatches of 1, 1f1b, stages 3 1, recompute layers")


def test_an_outline_between_equal_ones_is_the_same() -> None:
    from dataclasses import replace

    one = chain(2)
    two = replace(one, rows=one.rows * 2)
    made = scaled(one, two, one.rows * 4)
    assert made is not None
    assert made.rows == one.rows * 4
    assert [chunk.phases for chunk in made.chunks] == [chunk.phases for chunk in one.chunks]


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_the_bytes_of_the_optimizer_count_what_rounding_leaves() -> None:
    def bytes_in(precision: JobPrecision) -> int:
        job = replace(JOB, precision=precision)
        return captured_model(job, prices_of("cpu", None), Space(), 2).optimizer_bytes

    plain = bytes_in("fp32")
    assert bytes_in("bf16") == plain + 2
