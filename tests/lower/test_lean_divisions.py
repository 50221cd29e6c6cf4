"""Divided programs are not only right but lean: what is exchanged, computed and held, counted."""

import math
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

from piper.compiler import Program, compile
from piper.directives import Directive, shard
from piper.ir.select import at
from piper.job import Job
from piper.models import decoder

WEIGHTS = {
    "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
    "*attention.out|*ffn.down": 1,
}
VOCAB, DIM, LENGTH = 160, 64, 32


@cache
def program(layers: int, samples: int, kind: str) -> Program:
    """Compile a decoder under no strategy, tensor parallelism, sequence parallelism or context parallelism."""
    sizes = decoder.Config(
        vocab=VOCAB, dim=DIM, layers=layers, heads=4, kv_heads=4, head_dim=16, hidden=192, stages=1
    )
    strategies: dict[str, list[Directive]] = {
        "one": [],
        "tp": [shard(at(), [0, 1], axis="TP", weights=WEIGHTS)],
        "sp": [shard(at(), [0, 1], axis="TP", weights=WEIGHTS, between=1)],
        "cp": [shard(at(), [0, 1], axis="CP", batch={"tokens": 1, "labels": 1})],
    }

    def data() -> list[dict[str, Tensor]]:
        tokens = torch.zeros(samples, LENGTH, dtype=torch.int64)
        return [{"tokens": tokens, "labels": tokens}]

    made = Job(
        model=lambda: decoder.Decoder(sizes), loss=decoder.token_loss, data=data, strategy=strategies[kind]
    )
    return compile(made, device="cpu")


def collectives(made: Program) -> Counter[tuple[str, str]]:
    """Count the collectives of a plan: the pass and the kind of each."""
    return Counter(
        (ins.collects.run.phase, ins.collects.how.op)
        for plan in made.plans
        for ins in plan.instrs
        if ins.op in ("collect", "slice")
    )


@pytest.mark.parametrize("samples", [1, 2])
def test_a_layer_under_sequence_parallelism_has_two_gathers_and_two_scatters_each_way(samples: int) -> None:
    one, two = collectives(program(1, samples, "sp")), collectives(program(2, samples, "sp"))
    assert two - one == {
        ("F", "all_gather"): 2,
        ("F", "reduce_scatter"): 2,
        ("B", "all_gather"): 2,
        ("B", "reduce_scatter"): 2,
    }


def test_a_layer_under_tensor_parallelism_has_two_sums_each_way() -> None:
    one, two = collectives(program(1, 2, "tp")), collectives(program(2, 2, "tp"))
    assert two - one == {("F", "all_reduce"): 2, ("B", "all_reduce"): 2}


def test_a_layer_under_context_parallelism_gathers_keys_and_values() -> None:
    one, two = collectives(program(1, 2, "cp")), collectives(program(2, 2, "cp"))
    assert two - one == {("F", "all_gather"): 2, ("B", "reduce_scatter"): 2}


@pytest.mark.parametrize("kind", ["tp", "sp", "cp"])
def test_no_logits_and_no_weights_are_exchanged(kind: str) -> None:
    made = program(2, 2, kind)
    for chunk in made.outline.chunks:
        if chunk.kind == "collective":
            assert not chunk.params
            for spec in (*chunk.input_specs, *chunk.outputs):
                assert all(size not in (VOCAB, VOCAB // 2) for size in spec.shape), (chunk.name, spec)
    assert not [ins for plan in made.plans for ins in plan.instrs if ins.op == "gather"]


def test_logits_cross_pieces_in_the_type_they_are_computed_in() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    sizes = decoder.Config(vocab=VOCAB, dim=32, layers=1, heads=2, kv_heads=2, head_dim=16, hidden=64)
    made = compile(
        Job(
            model=lambda: decoder.Decoder(sizes),
            loss=decoder.token_loss,
            data=lambda: [{"tokens": tokens, "labels": tokens}],
            strategy=[shard(at(), [0, 1], axis="TP", weights=WEIGHTS)],
            precision="bf16",
        ),
        device="cpu",
    )
    logits = [
        spec
        for chunk in made.outline.chunks
        for spec in (*chunk.input_specs, *chunk.outputs)
        if spec.shape[-1:] == (VOCAB // 2,)
    ]
    assert [spec.dtype for spec in logits] == ["bfloat16", "bfloat16"]


def flops(made: Program) -> int:
    """Return the arithmetic of one device's step."""
    return sum(spec.flops for chunk in made.outline.chunks for spec in chunk.phases.values())


def held(made: Program) -> int:
    """Return the parameters that one device holds."""
    return sum(math.prod(parameter.local_shape) for parameter in made.outline.parameters)


@pytest.mark.parametrize("kind", ["tp", "sp"])
def test_two_devices_compute_and_hold_half_each(kind: str) -> None:
    one, divided = program(2, 2, "one"), program(2, 2, kind)
    assert 0.5 <= flops(divided) / flops(one) <= 0.55
    assert 0.5 <= held(divided) / held(one) <= 0.55


def test_two_devices_of_a_divided_sequence_compute_half_each() -> None:
    one, divided = program(2, 2, "one"), program(2, 2, "cp")
    assert 0.5 <= flops(divided) / flops(one) <= 0.55
    assert held(divided) == held(one)
