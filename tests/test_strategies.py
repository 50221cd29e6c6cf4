"""Whole strategies: the directives that integers stand for, and what is refused."""

from collections.abc import Callable
from inspect import cleandoc

import pytest

from piper import ScheduleError, at, order, place, replicate, shard, split, strategies
from piper.directives import Directive
from piper.directives.shard import Shard
from piper.ir.select import At

LOW, HIGH = range(0, 2), range(2, 4)


def test_names() -> None:
    assert strategies.__all__ == ["boundaries", "ddp", "fsdp", "moe", "pipeline", "tensor"]


def test_a_pipeline() -> None:
    assert strategies.pipeline(layers=4, pp=2, dp=2, zero=3, schedule="1f1b", microbatches=2) == [
        replicate(at(LAYER=LOW), [0, 1], zero=3),
        replicate(at(LAYER=HIGH), [2, 3], zero=3),
        split(at(), axis="MB", parts=2),
        order([
            [at(LAYER=LOW, MB=0, PASS="F")],
            [at(LAYER=LOW, MB=1, PASS="F")],
            [at(LAYER=LOW, MB=0, PASS="B")],
            [at(LAYER=LOW, MB=1, PASS="B")],
        ]),
        order([
            [at(LAYER=HIGH, MB=0, PASS="F")],
            [at(LAYER=HIGH, MB=0, PASS="B")],
            [at(LAYER=HIGH, MB=1, PASS="F")],
            [at(LAYER=HIGH, MB=1, PASS="B")],
        ]),
    ]  # fmt: skip


def test_a_pipeline_without_replicas_has_four_microbatches_a_rank() -> None:
    strategy = strategies.pipeline(layers=2, pp=2)
    assert strategy[:3] == [
        place(at(LAYER=0), [0]),
        place(at(LAYER=1), [1]),
        split(at(), axis="MB", parts=8),
    ]
    assert [directive.verb for directive in strategy[3:]] == ["order", "order"]


def placement(strategy: list[Directive]) -> list[str]:
    return [repr(directive) for directive in strategy if directive.verb in ("place", "replicate", "shard")]


def test_stages_lie_where_the_schedule_has_them() -> None:
    assert placement(strategies.pipeline(8, pp=2, dp=2, schedule="interleaved-1f1b", bucket_mb=25)) == [
        "replicate(at(LAYER=[0, 1]), devices=[0, 1], bucket_mb=25)",
        "replicate(at(LAYER=range(2, 5)), devices=[2, 3], bucket_mb=25)",
        "replicate(at(LAYER=[5, 6]), devices=[0, 1], bucket_mb=25)",
        "replicate(at(LAYER=7), devices=[2, 3], bucket_mb=25)",
    ]
    assert placement(strategies.pipeline(8, pp=2, schedule="dualpipe-v")) == [
        "place(at(LAYER=[0, 1]), devices=[0])",
        "place(at(LAYER=range(2, 5)), devices=[1])",
        "place(at(LAYER=[5, 6]), devices=[1])",
        "place(at(LAYER=7), devices=[0])",
    ]
    both_ways = strategies.pipeline(4, pp=2, zero=1, schedule="dualpipe", microbatches=6)
    assert repr(both_ways[0]) == "split(at(), parts=6)", "before microbatches are placed"
    assert placement(both_ways) == [
        "replicate(at(LAYER=[0, 1], MB=range(0, 3)), devices=[0], zero=1)",
        "replicate(at(LAYER=[0, 1], MB=range(3, 6)), devices=[1], zero=1)",
        "replicate(at(LAYER=[2, 3], MB=range(0, 3)), devices=[1], zero=1)",
        "replicate(at(LAYER=[2, 3], MB=range(3, 6)), devices=[0], zero=1)",
    ]
    three = strategies.pipeline(6, pp=1, schedule="interleaved-1f1b", stages_per_rank=3, embedding=0, head=0)
    assert placement(three) == [
        "place(at(LAYER=[0, 1]), devices=[0])",
        "place(at(LAYER=[2, 3]), devices=[0])",
        "place(at(LAYER=[4, 5]), devices=[0])",
    ]


def test_fsdp_and_ddp() -> None:
    assert strategies.fsdp(dp=8) == [replicate(at(), range(8), zero=3)]
    assert strategies.fsdp(dp=16, within=8) == [replicate(at(), range(16), zero=3, within=8)]
    assert strategies.fsdp(dp=2, zero=2, bucket_mb=25) == [replicate(at(), [0, 1], zero=2, bucket_mb=25)]
    assert strategies.ddp(dp=2, microbatches=4) == [replicate(at(), [0, 1]), split(at(), axis="MB", parts=4)]


def test_a_mixture_of_experts() -> None:
    assert strategies.moe(layers=4, dp=4) == [replicate(at(), range(4)), shard(at(), range(4), ways=4)]
    assert strategies.moe(layers=4, dp=4, ep=2, zero=1, microbatches=2) == [
        replicate(at(), range(4), zero=1),
        shard(at(), range(4), ways=2),
        split(at(), axis="MB", parts=2),
    ]
    strategy = strategies.moe(layers=4, dp=2, ep=2, pp=2, zero=2, microbatches=4)
    assert strategy[:5] == [
        replicate(at(LAYER=LOW), [0, 1], zero=2),
        replicate(at(LAYER=HIGH), [2, 3], zero=2),
        shard(at(LAYER=LOW), [0, 1], ways=2),
        shard(at(LAYER=HIGH), [2, 3], ways=2),
        split(at(), axis="MB", parts=4),
    ]
    assert strategy[5:] == strategies.pipeline(4, pp=2, microbatches=4)[3:]


def test_stages_of_dense_layers_have_no_experts_to_shard() -> None:
    def layers_of(strategy: list[Directive]) -> list[At]:
        return [directive.at for directive in strategy if isinstance(directive, Shard)]

    assert layers_of(strategies.moe(layers=4, dp=2, pp=2, dense=1)) == [at(LAYER=LOW), at(LAYER=HIGH)]
    assert layers_of(strategies.moe(layers=4, dp=2, pp=2, dense=2)) == [at(LAYER=HIGH)]
    both_ways = strategies.moe(layers=4, dp=2, pp=2, dense=2, schedule="dualpipe", microbatches=4)
    assert {filter.tags[0] for filter in layers_of(both_ways)} == {("LAYER", (2, 3))}


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (32, 1, [32]),
        (32, 2, [16, 16]),
        (32, 4, [8, 9, 8, 7]),
        (8, 4, [2, 3, 2, 1]),
        (4, 4, [1, 1, 1, 1]),
        (126, 16, [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]),
    ],
)
def test_stages_balance_with_embedding_and_head(layers: int, stages: int, sizes: list[int]) -> None:
    found = strategies.boundaries(layers, stages)
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == [*range(layers)]


def test_embedding_and_head_cost_what_you_say() -> None:
    assert strategies.boundaries(8, 4, embedding=0, head=0) == [
        range(0, 2), range(2, 4), range(4, 6), range(6, 8),
    ]  # fmt: skip
    assert strategies.boundaries(8, 2, embedding=0, head=2) == [range(0, 5), range(5, 8)]
    assert strategies.boundaries(4, 2, head=9) == [range(0, 3), range(3, 4)]


def test_a_directive_knows_the_line_that_asked_for_the_strategy() -> None:
    (made,) = strategies.fsdp(dp=2)
    assert made.source.startswith("test_strategies.py:")


BAD: list[tuple[Callable[[], object], str]] = [
    (
        lambda: strategies.pipeline(layers=0, pp=2),
        """
        strategies.pipeline: layers must be a whole number from 1, got 0
          hint: layers=1 is the least
        """,
    ),
    (
        lambda: strategies.pipeline(layers=4, pp=2.0),  # type: ignore[arg-type]
        """
        strategies.pipeline: pp must be a whole number from 1, got 2.0
          hint: pp=1 is the least
        """,
    ),
    (
        lambda: strategies.pipeline(layers=4, pp=2, microbatches=0),
        """
        strategies.pipeline: microbatches must be a whole number from 1, got 0
          hint: microbatches=1 is the least
        """,
    ),
    (
        lambda: strategies.pipeline(layers=3, pp=2, schedule="zbv"),
        """
        strategies.boundaries: layers=3 cannot fill 4 stages
          hint: use fewer ranks, or fewer stages on each: every stage needs a layer
        """,
    ),
    (
        lambda: strategies.pipeline(layers=4, pp=2, schedule="1f1b", stages_per_rank=2),
        """
        1f1b: stages_per_rank=2
          needs: stages_per_rank=1
          hint:  leave stages_per_rank out, or use interleaved-1f1b
        """,
    ),
    (
        lambda: strategies.pipeline(layers=4, pp=2, schedule="1f2b"),
        """
        schedule: there is no schedule '1f2b'
          known: gpipe, 1f1b, interleaved-1f1b, zero-bubble, interleaved-zero-bubble, zbv, v-half, v-min, dualpipe-v, dualpipe, synthesised
          hint:  did you mean 1f1b?
        """,
    ),
    (
        lambda: strategies.pipeline(layers=4, pp=2, head=-1),
        """
        strategies.boundaries: head=-1
          hint: head is a whole number of layers from 0
        """,
    ),
    (
        lambda: strategies.fsdp(dp=2, zero=4),
        """
        strategies.fsdp: zero must be 0, 1, 2 or 3, got 4
          hint: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too
        """,
    ),
    (
        lambda: strategies.ddp(dp=True),
        """
        strategies.ddp: dp must be a whole number from 1, got True
          hint: dp=1 is the least
        """,
    ),
    (
        lambda: strategies.moe(layers=4, dp=4, schedule="zbw"),
        """
        schedule: there is no schedule 'zbw'
          known: gpipe, 1f1b, interleaved-1f1b, zero-bubble, interleaved-zero-bubble, zbv, v-half, v-min, dualpipe-v, dualpipe, synthesised
          hint:  did you mean zbv?
        """,
    ),
    (
        lambda: strategies.moe(layers=4, dp=4, ep=3),
        """
        strategies.moe: dp=4 devices cannot form groups of ep=3
          hint: ep is how many devices shard the experts: a divisor of dp
        """,
    ),
]


@pytest.mark.parametrize(("ask", "message"), BAD)
def test_integers_that_cannot_be(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        ask()
    assert str(caught.value) == cleandoc(message)


WEIGHTS = {"*.q|*.k": 0, "*.out": 1}


def test_tensor_parallelism_on_one_group_needs_nothing_but_shard() -> None:
    strategy = strategies.tensor(layers=4, tp=2, weights=WEIGHTS, sequence=False)
    assert strategy == [shard(at(), [0, 1], ways=2, axis="TP", weights=WEIGHTS)]
    assert repr(strategy[0]) == (
        'shard(at(), devices=[0, 1], axis="TP", ways=2, weights={"*.q|*.k": 0, "*.out": 1})'
    )


def test_groups_of_tensor_parallelism_divide_the_samples() -> None:
    assert strategies.tensor(layers=4, tp=2, dp=2, zero=1, microbatches=4, weights=WEIGHTS, bucket_mb=25) == [
        replicate(at(), range(4), zero=1, bucket_mb=25),
        shard(at(), range(4), ways=2, axis="TP", weights=WEIGHTS, between=1),
        split(at(), axis="MB", parts=4),
    ]


def test_two_microbatches_run_against_each_other() -> None:
    pair = order([
        [at(MB=0, PASS="F"), at(MB=1, PASS="F")],
        [at(MB=0, PASS="B"), at(MB=1, PASS="B")],
    ])  # fmt: skip
    assert strategies.tensor(layers=4, tp=2, weights=WEIGHTS, overlap=True) == [
        shard(at(), [0, 1], ways=2, axis="TP", weights=WEIGHTS, between=1),
        split(at(), axis="MB", parts=2),
        pair,
    ]
    odd = strategies.tensor(layers=4, tp=2, weights=WEIGHTS, overlap=True, microbatches=3)
    assert repr(odd[-1]) == (
        'order([[at(MB=0, PASS="F"), at(MB=1, PASS="F")], [at(MB=0, PASS="B"), at(MB=1, PASS="B")], '
        'at(MB=2, PASS="F"), at(MB=2, PASS="B")])'
    )


def test_a_pipeline_of_groups() -> None:
    strategy = strategies.tensor(layers=4, tp=2, dp=2, pp=2, zero=3, microbatches=2, weights=WEIGHTS)
    assert strategy[:5] == [
        replicate(at(LAYER=LOW), range(0, 4), zero=3),
        replicate(at(LAYER=HIGH), range(4, 8), zero=3),
        shard(at(LAYER=LOW), range(0, 4), ways=2, axis="TP", weights=WEIGHTS, between=1),
        shard(at(LAYER=HIGH), range(4, 8), ways=2, axis="TP", weights=WEIGHTS, between=1),
        split(at(), axis="MB", parts=2),
    ]
    assert [directive.verb for directive in strategy[5:]] == ["order", "order"]
    alone = strategies.tensor(layers=4, tp=2, pp=2, weights=WEIGHTS)
    assert alone[:3] == [
        shard(at(LAYER=LOW), [0, 1], ways=2, axis="TP", weights=WEIGHTS, between=1),
        shard(at(LAYER=HIGH), [2, 3], ways=2, axis="TP", weights=WEIGHTS, between=1),
        split(at(), axis="MB", parts=8),
    ]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (
            {"pp": 2, "overlap": True},
            """
            strategies.tensor: overlap=True pairs microbatches without a pipeline
              asked: pp=2, microbatches=8
              hint:  give an even number of microbatches, or none, and pp=1; schedule="dualpipe-v" overlaps the forwards and backwards of a pipeline
            """,
        ),
        (
            {"overlap": True, "microbatches": 1},
            """
            strategies.tensor: overlap=True pairs microbatches without a pipeline
              asked: pp=1, microbatches=1
              hint:  give an even number of microbatches, or none, and pp=1; schedule="dualpipe-v" overlaps the forwards and backwards of a pipeline
            """,
        ),
        (
            {"tp": 0},
            """
            strategies.tensor: tp must be a whole number from 1, got 0
              hint: tp=1 is the least
            """,
        ),
    ],
)
def test_tensor_parallelism_that_is_refused(numbers: dict[str, int], said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        strategies.tensor(**{"layers": 4, "tp": 2, "weights": WEIGHTS, **numbers})  # type: ignore[arg-type]
    assert str(caught.value) == cleandoc(said)
