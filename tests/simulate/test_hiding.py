"""Two microbatches of a divided model run against each other: what of the collectives stays in sight."""

import pytest
import torch
from torch import Tensor

from benchmarks.exposure import Exposure, exposure, main_phase
from piper import at, order, schedules, shard, split, strategies
from piper.compiler import compile
from piper.directives import Directive
from piper.job import Job
from piper.models import decoder
from piper.plan.ops import Op
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate

COLLECTIVES: tuple[Op, ...] = ("collect",)
WEIGHTS = {
    "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
    "*attention.out|*ffn.down": 1,
}


def exposed(layers: int, vocab: int, strategy: list[Directive]) -> tuple[Exposure, Exposure | None, float]:
    """Simulate a decoder with layers of an 8B model; return its exposures, whole and main, and its step."""
    sizes = decoder.Config(
        vocab=vocab, dim=4096, layers=layers, heads=32, kv_heads=8, head_dim=128, hidden=12_288, qk_norm=True
    )

    def data() -> list[dict[str, Tensor]]:
        tokens = torch.zeros(4, 2048, dtype=torch.int64)
        return [{"tokens": tokens, "labels": tokens}]

    job = Job(
        model=lambda: decoder.Decoder(sizes),
        loss=decoder.token_loss,
        data=data,
        strategy=strategy,
        precision="bf16",
    )
    made = compile(job, device="cpu")
    found = simulate(made.plans, made.outline, Roofline(load_cluster("h100")))
    plan, spans = made.plans.of(0), found.timelines[0].spans
    assert {ins.stream for ins in plan.instrs if ins.op == "collect"} == {"tp"}, "compute has another stream"
    window = main_phase(made.graph, plan, spans)
    main = exposure(plan, spans, COLLECTIVES, window) if window else None
    return exposure(plan, spans, COLLECTIVES), main, found.step


def one_by_one() -> list[Directive]:
    return [shard(at(), range(8), axis="TP", weights=WEIGHTS, between=1), split(at(), parts=2)]


def test_two_microbatches_hide_each_others_collectives() -> None:
    _, main, _ = exposed(2, 32_768, strategies.tensor(layers=2, tp=8, weights=WEIGHTS, overlap=True))
    assert main is not None
    assert main.share <= 0.2


@pytest.mark.slow
def test_an_8b_model_hides_at_least_85_percent() -> None:
    alone, _, slow = exposed(12, 151_936, one_by_one())
    _, main, fast = exposed(12, 151_936, strategies.tensor(layers=12, tp=8, weights=WEIGHTS, overlap=True))
    assert main is not None
    assert alone.share > 0.9, "one microbatch after the other hides next to nothing"
    assert main.share <= 0.15
    assert main.communication == pytest.approx(alone.communication)
    assert fast < 0.8 * slow


@pytest.mark.slow
def test_a_forward_and_a_backward_hide_each_others_collectives() -> None:
    pair = [at(MB=0, PASS="B"), at(MB=1, PASS="F")]
    chain = order([[at(MB=0, PASS="F")], pair, [at(MB=1, PASS="B")]])
    _, main, _ = exposed(4, 32_768, [*one_by_one(), chain])
    assert main is not None
    assert main.share <= 0.2


def test_pairs_of_microbatches() -> None:
    assert [repr(directive) for directive in schedules.pairs(2, part="PART")] == [
        'order([[at(PART=0, PASS="F"), at(PART=1, PASS="F")], [at(PART=0, PASS="B"), at(PART=1, PASS="B")]])'
    ]
