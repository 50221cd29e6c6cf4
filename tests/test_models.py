"""The reference models: what they compute, and that every case of the zoo runs."""

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from piper import losses
from piper.check.check import check
from piper.compiler import compile
from piper.directives import replicate, split
from piper.errors import ConfigError
from piper.ir.select import at
from piper.job import Job
from piper.losses import IGNORED
from piper.models import causal, decoder, huggingface, layers, moe
from piper.models.layers import rotate
from piper.plan.memory_timeline import timeline
from piper.run.launch import launch_inline
from tests import deepseek, zoo


def total(loss: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_case_runs_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    case = zoo.case(name)
    model = zoo.build(case, dtype=dtype)
    loss = total(case.loss(model, case.batch(4, 0)))
    loss.backward()
    assert loss.dtype == dtype and loss.isfinite()
    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_seed_decides_a_case(name: str) -> None:
    case = zoo.case(name)
    first, again, other = (zoo.build(case, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    assert all(
        torch.equal(a, b) for a, b in zip(case.batch(3, 5).values(), case.batch(3, 5).values(), strict=True)
    )


@pytest.mark.parametrize("name", ["decoder", "moe", "deepseek"])
def test_a_position_sees_only_what_came_before(name: str) -> None:
    model, tokens = zoo.build(zoo.case(name)), zoo.tokens(2, 0)["tokens"]
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % zoo.VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_do_not_change_the_result(stages: int) -> None:
    tokens = zoo.tokens(2, 0)["tokens"]
    results = []
    for count in (1, stages):
        torch.manual_seed(0)
        results.append(decoder.Decoder(decoder.Config.tiny(layers=4, stages=count))(tokens))
    assert torch.equal(*results)


def test_stages_are_as_even_as_the_numbers_allow() -> None:
    assert [list(stage) for stage in causal.stage_ranges(5, 3)] == [[0], [1, 2], [3, 4]]


def test_a_tied_decoder_has_one_embedding() -> None:
    tied = decoder.Decoder(decoder.Config.tiny(tied=True))
    assert tied.head.weight is tied.embedding.weight
    assert len(list(tied.parameters())) == len(list(decoder.Decoder(decoder.Config.tiny()).parameters())) - 1


def test_the_token_loss_adds_up_over_uneven_parts() -> None:
    model, batch = zoo.build(zoo.case("sum_weight"), dtype=torch.float64), zoo.uneven_tokens(6, 0)
    whole, weight = decoder.token_loss(model, batch)
    parts = [decoder.token_loss(model, {k: v[i : i + 2] for k, v in batch.items()}) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.stack([p[0] for p in parts]).sum(), whole)
    assert len({p[1].item() for p in parts}) > 1 and sum(p[1].item() for p in parts) == weight.item()
    torch.testing.assert_close(whole / weight, decoder.loss(model, batch))


def dense_experts(layer: moe.SparseFeedForward, x: Tensor) -> Tensor:
    """Every expert on every token, masked by the router's choice."""
    scores = layer.router(x).softmax(-1)
    top, chosen = scores.topk(layer.top_k, dim=-1)
    weights = torch.zeros_like(scores).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
    gate, up = torch.einsum("...d,edf->...ef", x, layer.gate_up).chunk(2, dim=-1)
    return torch.einsum("...ef,efd,...e->...d", F.silu(gate) * up, layer.down, weights)


def test_experts_equal_every_expert_on_every_token() -> None:
    torch.manual_seed(0)
    layer = moe.SparseFeedForward(moe.Config.tiny()).double()
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    inputs = (x.requires_grad_(), *layer.parameters())
    ours, plain = layer(x), dense_experts(layer, x)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours.square().sum(), inputs),
        torch.autograd.grad(plain.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_latent_attention_equals_its_parts() -> None:
    """Written out head by head: what latent attention saves is memory, not mathematics."""
    torch.manual_seed(0)
    config = deepseek.Config.tiny()
    layer = deepseek.LatentAttention(config).double()
    x = torch.randn(2, 5, config.dim, dtype=torch.float64)
    rotation = layers.rope(5, config.rope_dim, config.rope_base, like=x)
    latent, key = layer.kv_down(x).split([config.kv_rank, config.rope_dim], dim=-1)
    key = layers.rotate(key, rotation)
    queries = layer.q_up(layer.q_norm(layer.q_down(x))).chunk(config.heads, dim=-1)
    pairs = layer.kv_up(layer.kv_norm(latent)).chunk(config.heads, dim=-1)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    outs = []
    for query, pair in zip(queries, pairs, strict=True):
        plain, turned = query.split([config.head_dim, config.rope_dim], dim=-1)
        own, value = pair.chunk(2, dim=-1)
        scores = plain @ own.mT + layers.rotate(turned, rotation) @ key.mT
        scores = (scores / (config.head_dim + config.rope_dim) ** 0.5).masked_fill(hidden, float("-inf"))
        outs.append(scores.softmax(-1) @ value)
    torch.testing.assert_close(layer(x, rotation), layer.out(torch.cat(outs, dim=-1)), rtol=1e-12, atol=1e-12)


def test_a_bias_moves_the_choice_towards_balance_and_not_the_weights() -> None:
    torch.manual_seed(0)
    layer = deepseek.SharedAndRouted(deepseek.Config.tiny()).double()
    x = torch.randn(64, 32, dtype=torch.float64)
    weights, chosen = layer._choose(x)
    torch.testing.assert_close(weights.sum(-1), torch.full((64,), layer.scale, dtype=torch.float64))
    layer(x)
    seen = chosen.flatten().bincount(minlength=8)
    assert torch.equal(layer.bias, 1e-3 * torch.sign(16.0 - seen.double()))
    kept = layer.bias.clone()
    layer.eval()(x)
    assert torch.equal(layer.bias, kept)


def test_a_size_with_a_billion_parameters() -> None:
    with torch.device("meta"):
        parameters = decoder.Decoder(decoder.Config.medium(stages=4)).parameters()
    assert sum(p.numel() for p in parameters) / 1e9 == pytest.approx(1.138, abs=1e-3)


def test_layers_as_regions_let_zero_3_hold_less_and_give_the_same_numbers() -> None:
    def layered(by_layer: bool) -> Job:
        config = replace(decoder.Config.tiny(), by_layer=by_layer)
        stages = [replicate(at(PP=stage), [2 * stage, 2 * stage + 1], zero=3) for stage in range(2)]
        return Job(
            model=lambda: decoder.Decoder(config),
            loss=decoder.loss,
            data=lambda: [zoo.tokens(8, 0)],
            strategy=[*stages, split(at(), parts=2)],
            precision="fp64",
        )

    program = compile(layered(by_layer=True))
    assert [chunk.name for chunk in program.outline.chunks][:3] == ["PP=0", "PP=0 LAYER=0", "PP=0 LAYER=1"]
    assert check(program, launch_inline, [zoo.tokens(8, 0)]).ok
    whole = compile(layered(by_layer=False))
    for device in range(4):
        assert timeline(program.plans.of(device)).peak < timeline(whole.plans.of(device)).peak


def test_hugging_face_experts_equal_its_own() -> None:
    case = zoo.case("qwen3_moe_hf")
    model: Any = zoo.build(case, dtype=torch.float64)
    batch = case.batch(4, 0)
    results = []
    for implementation in (huggingface.NAME, "eager"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = total(case.loss(model, batch))
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_missing_registry_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ConfigError) as error:
        huggingface.register_experts()
    assert str(error.value) == (
        "register_experts: transformers has no registry of experts\n"
        "  cause: import of transformers.integrations.moe halted; None in sys.modules\n"
        "  hint:  install transformers 5 or later: pip install 'transformers>=5'"
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: decoder.Config(layers=2, stages=3),
            "Config: every stage needs a layer\n"
            "  stages: 3\n"
            "  layers: 2\n"
            "  hint:   choose stages from 1 to 2",
        ),
        (
            lambda: decoder.Config(heads=4, kv_heads=3),
            "Config: query heads cannot share key and value heads evenly\n"
            "  heads:    4\n"
            "  kv_heads: 3\n"
            "  hint:     choose kv_heads that divides heads",
        ),
        (
            lambda: decoder.Config(head_dim=7),
            "Config: rotary positions turn features in pairs\n"
            "  head_dim: 7\n"
            "  hint:     choose an even head_dim",
        ),
        (
            lambda: moe.Config(experts=4, top_k=5),
            "Config: a token cannot go to that many experts\n"
            "  top_k:   5\n"
            "  experts: 4\n"
            "  hint:    choose top_k from 1 to 4",
        ),
    ],
)
def test_impossible_sizes_are_refused(build: type[decoder.Config], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert str(error.value) == message


def test_a_rotation_turns_the_first_half_into_the_second() -> None:
    """By a right angle, (1, 0) becomes (0, 1) and (0, 1) becomes (-1, 0)."""
    quarter = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])  # cosines, then sines, of one position
    assert rotate(torch.tensor([[1.0, 0.0]]), quarter).tolist() == [[0.0, 1.0]]
    assert rotate(torch.tensor([[0.0, 1.0]]), quarter).tolist() == [[-1.0, 0.0]]


def test_losses_of_short_logits_are_taken_in_single_precision() -> None:
    logits, labels = torch.zeros(1, 2, 3, dtype=torch.bfloat16), torch.tensor([[0, IGNORED]])
    total, weight = losses.cross_entropy(logits, labels)
    assert total.dtype == weight.dtype == torch.float32
    assert total.item() == pytest.approx(math.log(3), rel=1e-6)
    assert weight.item() == 1.0
    mean = causal.mean_cross_entropy(logits, labels)
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(math.log(3), rel=1e-6)
