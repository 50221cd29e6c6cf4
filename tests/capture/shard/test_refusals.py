"""What a division along an axis refuses, each message whole."""

import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import cleandoc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper.capture.shard.compute_rules import pointwise
from piper.capture.shard.rules import RULES, sharding_rule
from piper.capture.shard.sharder import Sharder
from piper.check.check import check
from piper.compiler import compile
from piper.directives import replicate, shard
from piper.errors import ConfigError, PiperError
from piper.ir.select import at
from piper.job import Job
from piper.losses import huggingface
from piper.models.huggingface import tensor_plan
from piper.run.launch import launch_inline


class Net(nn.Module):
    """Three heads of attention and a feed-forward."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36, bias=False)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)
        self.inner = inner or nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        result: Tensor = x + self.down(self.inner(self.up(x)))
        return result


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.argmax(-1, keepdim=True)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(x)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).pow(2).mean()
    return result


def job(inner: nn.Module | None = None, length: int = 6, ways: int = 2, **keys: Any) -> Job:  # noqa: ANN401
    x = torch.randn(4, length, 12, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: Net(inner),
        loss=loss,
        data=lambda: [{"x": x}],
        strategy=[shard(at(), list(range(ways)), **keys)],
        precision="fp64",
    )


def refused(made: Job) -> str:
    with pytest.raises(PiperError) as caught:
        compile(made, device="cpu")
    return re.sub(r"\w+\.py:\d+", "here", str(caught.value))


FFN = {"up": 0, "down": 1}


def test_heads_that_do_not_divide() -> None:
    assert refused(job(axis="TP", weights={"qkv": 0})) == cleandoc("""
        shard #0 (here): 3 heads do not divide by 2
          operation: aten.unflatten.int (here)
          operands:  getitem [4, 6, 12] sharded along 2
          hint:      choose `ways` among the divisors of 3: 1, 3
    """)


def test_a_size_that_does_not_divide() -> None:
    assert refused(job(axis="TP", ways=3, weights=FFN)) == cleandoc("""
        shard #0 (here): up.weight cannot be sharded along dimension 0
          shape: [16, 12]
          asked: ways=3
          hint:  choose a dimension from 0 to 1, and `ways` among the divisors of its size
    """)


def test_a_sequence_that_does_not_divide() -> None:
    assert refused(job(axis="CP", batch={"x": 1}, balance="zigzag")) == cleandoc("""
        shard #0 (here): the batch has no field 'x' that can be sharded along dimension 1
          fields: x [4, 6, 12]
          slices: 4
          hint:   name fields that hold one entry for each position of the sequence, with a dimension after that of the samples whose size divides by the slices
    """)


def test_activations_that_do_not_divide() -> None:
    assert refused(job(axis="TP", length=5, weights=FFN, between=1)) == cleandoc("""
        shard #0 (here): dimension 1 of size 5 does not divide by 2
          operation: aten.add.Tensor (here)
          operands:  add [4, 5, 12] whole, linear_2 [4, 5, 12] a sum to be taken
          hint:      choose another `between` or a size that divides: [4, 5, 12]
    """)


def test_a_pattern_that_matches_nothing() -> None:
    assert refused(job(axis="TP", weights={"*.upp": 0})) == cleandoc("""
        shard #0 (here): '*.upp' names no module with a weight and no parameter
          parameters: qkv.weight, up.weight, up.bias, down.weight, down.bias
          hint:       did you mean 'up'?
    """)


def test_a_dimension_that_does_not_exist() -> None:
    assert refused(job(axis="TP", weights={"up": 2})) == cleandoc("""
        shard #0 (here): up.weight cannot be sharded along dimension 2
          shape: [16, 12]
          asked: ways=2
          hint:  choose a dimension from 0 to 1, and `ways` among the divisors of its size
    """)


def test_a_field_that_does_not_exist() -> None:
    assert refused(job(axis="CP", batch={"tokens": 1})) == cleandoc("""
        shard #0 (here): the batch has no field 'tokens' that can be sharded along dimension 1
          fields: x [4, 6, 12]
          slices: 2
          hint:   name fields that hold one entry for each position of the sequence, with a dimension after that of the samples whose size divides by the slices
    """)


def test_an_operation_along_the_sharded_dimension() -> None:
    assert refused(job(Sorted(), axis="TP", weights=FFN)) == cleandoc("""
        shard #0 (here): aten.sort.default cannot be sharded: it works along the sharded dimension
          operation: aten.sort.default (here)
          operands:  linear_1 [4, 6, 16] sharded along 2
          hint:      do not shard that region, or register a rule for the operation with piper.sharding_rule
    """)


def test_the_place_of_the_largest_along_the_sharded_dimension() -> None:
    assert refused(job(Chosen(), axis="TP", weights=FFN)) == cleandoc("""
        shard #0 (here): aten.argmax.default cannot be sharded: it works along the sharded dimension
          operation: aten.argmax.default (here)
          operands:  linear_1 [4, 6, 16] sharded along 2
          hint:      count right answers as x.gather(-1, labels) >= x.amax(-1, keepdim=True), whose maximum is taken over the devices; or do not shard that region, or register a rule for the operation with piper.sharding_rule
    """)


def test_random_numbers_for_a_divided_value() -> None:
    assert refused(job(Noisy(), axis="TP", weights=FFN)) == cleandoc("""
        shard #0 (here): aten.bernoulli.default draws random numbers for a sharded value
          operation: aten.bernoulli.default (here)
          operands:  linear_1 [4, 6, 16] sharded along 2
          hint:      leave it out of sharded regions; dropout, rand_like and randn_like have rules
    """)


def test_groups_that_cannot_be_formed() -> None:
    made = replace(
        job(axis="TP", weights=FFN),
        strategy=[
            replicate(at(), [0, 1, 2, 3]),
            shard(at(), [0, 1, 2], ways=2, axis="TP", weights=FFN),
        ],
    )
    assert refused(made) == cleandoc("""
        shard #1 (here): 3 devices cannot form groups of 2
          asked: ways=2, devices=[0, 1, 2]
          hint:  ways is the size of one group: a divisor of the number of devices
    """)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"axis": "two words", "weights": FFN},
            """
            shard #0 (here): axis='two words' is not a name
              hint: name the axis in one word: axis="TP"
            """,
        ),
        (
            {"axis": "TP"},
            """
            shard #0 (here): axis='TP' shards nothing
              hint: tensor parallelism needs weights={...}, context parallelism batch={...}
            """,
        ),
        (
            {"axis": "TP", "weights": FFN, "between": 0},
            """
            shard #0 (here): between must be a whole number from 1, got 0
              hint: between=1 shards the sequence; 0 is the samples
            """,
        ),
        (
            {"axis": "CP", "batch": {"x": 1}, "attention": "round"},
            """
            shard #0 (here): attention must be "gather", "heads" or "ring", got 'round'
              hint: each shards attention in another way
            """,
        ),
        (
            {"axis": "CP", "batch": {"x": 1}, "balance": "zag"},
            """
            shard #0 (here): balance must be "zigzag", got 'zag'
              hint: leave it out for slices in order
            """,
        ),
        (
            {"axis": "CP", "batch": ["x"]},
            """
            shard (here): batch=['x'] is not a dict
              hint: write batch={"name": dimension}
            """,
        ),
        (
            {"axis": "TP", "weights": {"up": -1}},
            """
            shard (here): weights has 'up': -1
              hint: give each name a dimension from 0
            """,
        ),
        (
            {"axis": "TP", "weights": FFN, "between": "1"},
            """
            shard #0 (here): between must be a whole number from 1, got '1'
              hint: between=1 shards the sequence; 0 is the samples
            """,
        ),
        (
            {"axis": 3, "weights": FFN},
            """
            shard #0 (here): axis=3 is not a name
              hint: name the axis in one word: axis="TP"
            """,
        ),
    ],
)
def test_words_that_are_not_known(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(PiperError) as caught:
        compile(job(**keys), device="cpu")
    assert re.sub(r"\w+\.py:\d+", "here", str(caught.value)) == cleandoc(text)


def test_a_rule_of_the_user_divides_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.sort.default
    monkeypatch.delitem(RULES, op, raising=False)

    def by_rows(sharder: Sharder, node: torch.fx.Node) -> None:
        """Sort whole rows: what every device holds of them is gathered first."""
        sharder.settle(node.all_input_nodes[0])
        sharder.plain(node)

    sharding_rule(op, by_rows)
    try:
        made = job(Sorted(), axis="TP", weights=FFN)
        assert check(compile(made, device="cpu"), launch_inline, [*made.data()]).ok
    finally:
        RULES.pop(op)


def test_a_rule_needs_an_operation() -> None:
    with pytest.raises(ConfigError) as caught:
        sharding_rule("sort", pointwise)  # type: ignore[arg-type]
    text = re.sub(r"<function pointwise at 0x\w+>", "pointwise", str(caught.value))
    assert text == cleandoc("""
        sharding_rule: 'sort' is not an operation with a rule
          rule: pointwise
          hint: name one overload and a function: piper.sharding_rule(torch.ops.aten.erf.default, rule)
    """)


def test_a_config_without_a_plan() -> None:
    class Config:
        pass

    with pytest.raises(ConfigError) as caught:
        tensor_plan(Config())
    assert str(caught.value) == cleandoc("""
        tensor_plan: Config ships no plan for tensor parallelism
          hint: write the weights yourself: {"*.q_proj|*.k_proj|*.v_proj": 0, "*.o_proj": 1, ...}
    """)


def test_the_plan_of_a_llama() -> None:
    from transformers import LlamaConfig

    assert tensor_plan(LlamaConfig()) == {
        "*layers.*.self_attn.q_proj": 0,
        "*layers.*.self_attn.k_proj": 0,
        "*layers.*.self_attn.v_proj": 0,
        "*layers.*.self_attn.o_proj": 1,
        "*layers.*.mlp.gate_proj": 0,
        "*layers.*.mlp.up_proj": 0,
        "*layers.*.mlp.down_proj": 1,
        "*embed_tokens": 0,
        "*lm_head": 0,
    }


def test_the_plan_of_linear_attention_leaves_whole_what_no_layer_beside_it_takes_apart() -> None:
    from transformers import Qwen3_5TextConfig

    assert not [name for name in tensor_plan(Qwen3_5TextConfig()) if "linear_attn" in name]


def test_a_sharded_feature_is_gathered_under_sequence_parallelism_neither() -> None:
    what = "aten.sort.default cannot be sharded: it works along the sharded dimension"
    assert what in refused(job(Sorted(), axis="TP", weights=FFN, between=1))


def test_the_plan_of_latent_attention_leaves_the_shared_projection_whole() -> None:
    from transformers import DeepseekV2Config

    assert {name: dim for name, dim in tensor_plan(DeepseekV2Config()).items() if "attn" in name} == {
        "*layers.*.self_attn.q_proj": 0,
        "*layers.*.self_attn.q_b_proj": 0,
        "*layers.*.self_attn.kv_b_proj": 0,
        "*layers.*.self_attn.o_proj": 1,
    }


def test_experts_of_hugging_face_that_cannot_be_sharded_say_what_to_set() -> None:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=8, num_key_value_heads=2)
    text = {name: torch.zeros(2, 4, dtype=torch.int64) for name in ("input_ids", "labels")}
    with pytest.raises(PiperError) as caught:
        compile(
            Job(
                model=lambda: Qwen2MoeForCausalLM(config),
                loss=huggingface,
                data=lambda: [text],
                strategy=[shard(at(), [0, 1], axis="CP", batch=dict.fromkeys(text, 1))],
            )
        )
    assert caught.value.what.startswith("aten.histc.default cannot be sharded")
    assert 'experts_implementation="piper"' in caught.value.hint


def test_the_plan_of_a_model_names_only_what_it_has() -> None:
    """The plan that Qwen3-MoE ships names dense feed-forwards too, which no layer of this one has."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=8, moe_intermediate_size=8, num_hidden_layers=1, num_experts=2, head_dim=4
    )
    assert "*layers.*.mlp.gate_proj" in tensor_plan(config)
    with torch.device("meta"):
        assert tensor_plan(Qwen3MoeForCausalLM(config)) == {
            "*layers.*.self_attn.q_proj": 0,
            "*layers.*.self_attn.k_proj": 0,
            "*layers.*.self_attn.v_proj": 0,
            "*layers.*.self_attn.o_proj": 1,
            "*embed_tokens": 0,
            "*lm_head": 0,
        }


class Crossed(nn.Module):
    """Attention whose keys, or whose mask, a ring cannot pass on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.q, self.bias = kind, nn.Linear(12, 12), nn.Parameter(torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (3, 4)).transpose(1, 2)
        if self.kind == "longer":
            keys = torch.cat([q, q], 2)
            y = nn.functional.scaled_dot_product_attention(q, keys, keys)
        elif self.kind == "biased":
            y = nn.functional.scaled_dot_product_attention(q, q, q, self.bias)
        else:
            y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5)
        return y.transpose(1, 2).flatten(2)


def test_attention_that_a_ring_cannot_pass_on() -> None:
    def found(kind: str) -> str:
        made = job(axis="CP", batch={"x": 1}, attention="ring")
        return refused(replace(made, model=lambda: Crossed(kind)))

    assert found("biased") == cleandoc("""
        shard #0 (here): aten.scaled_dot_product_attention.default cannot be sharded: its mask has a gradient, which a ring does not compute
          operation: aten.scaled_dot_product_attention.default (here)
          operands:  transpose [4, 3, 6, 4] sharded along 2, arg3_1 [6, 6] whole
          hint:      use attention="gather" there
    """)
    assert found("longer").startswith(
        "shard #0 (here): aten.scaled_dot_product_attention.default cannot be sharded: "
        "a ring passes on as many keys as there are queries, not 12 for 6"
    )
    assert found("dropped").startswith(
        "shard #0 (here): aten.scaled_dot_product_attention.default cannot be sharded: "
        "dropout inside attention does not go round a ring"
    )
