"""Models whose regions are divided over groups of devices, and the strategies that divide them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate_modules
from piper.check.check import Report, check, numbers
from piper.check.localise import Launch
from piper.check.reference import Reference
from piper.compiler import compile
from piper.directives import Directive, replicate, shard, split
from piper.ir.select import at
from piper.job import Job
from piper.models import decoder, huggingface, moe
from piper.models.huggingface import tensor_plan
from piper.run.launch import launch_inline
from piper.schedules import dualpipe_v, one_f_one_b, zbv, zero_bubble
from tests.runtime.sharing import Shared, one_core

VOCAB, LENGTH, SAMPLES = 64, 16, 8
FIELDS = {"tokens": 1, "labels": 1}
GPT2 = {"*c_attn|*mlp.c_fc": 1, "*attn.c_proj|*mlp.c_proj": 0, "*wte": 0}  # weights are [in, out] here


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model in some number of stages, and the weights that tensor parallelism divides."""

    build: Callable[[int], nn.Module]  # of the number of stages
    weights: Mapping[str, int]
    between: int | None = 1  # the dimension along which sequence parallelism divides its activations
    loss: Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def dense(stages: int) -> nn.Module:
    """Build our decoder."""
    sizes = decoder.Config.tiny(layers=max(2, stages), stages=stages)
    return decoder.Decoder(sizes)


def dense_of_four_heads(stages: int) -> nn.Module:
    """Build our decoder with as many key heads as four devices need."""
    sizes = decoder.Config(
        vocab=VOCAB, dim=32, layers=2, heads=4, kv_heads=4, head_dim=8, hidden=64, stages=stages
    )
    return decoder.Decoder(sizes)


def sparse(stages: int) -> nn.Module:
    """Build our mixture of experts."""
    return moe.MoEDecoder(moe.Config.tiny(layers=max(2, stages), stages=stages))


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def staged(model: nn.Module, stages: int, layers: int, path: str) -> nn.Module:
    """Annotate the layers of a model as stages."""
    each = layers // stages
    regions = [[f"{path}.{s * each + i}" for i in range(each)] for s in range(stages)]
    return annotate_modules(model, {"PP": regions})


def llama(stages: int) -> nn.Module:
    """Build an unmodified Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(2, stages)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers))
    return staged(model, stages, layers, "model.layers")


def mistral(stages: int) -> nn.Module:
    """Build an unmodified Mistral, with a window that is shorter than the sequence."""
    from transformers import MistralConfig, MistralForCausalLM

    layers = max(2, stages)
    model = MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=layers, sliding_window=6))
    return staged(model, stages, layers, "model.layers")


def qwen3(stages: int) -> nn.Module:
    """Build an unmodified Qwen3 whose head is its embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = max(2, stages)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=layers, tie_word_embeddings=True))
    return staged(model, stages, layers, "model.layers")


def gpt2(stages: int) -> nn.Module:
    """Build an unmodified GPT-2 without dropout: its weights are transposed, and query, key and value are one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers = max(2, stages)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=layers, n_head=4, **drops)
    return staged(GPT2LMHeadModel(sizes), stages, layers, "transformer.h")


def hf_weights() -> dict[str, int]:
    """Return the weights of Llama and the models like it, from the plan that they ship."""
    from transformers import LlamaConfig

    return tensor_plan(LlamaConfig())


MODELS: Mapping[str, Callable[[], Model]] = {
    "decoder": lambda: Model(build=dense, weights=decoder.SHARDED_WEIGHTS, loss=decoder.token_loss),
    "decoder4": lambda: Model(
        build=dense_of_four_heads, weights=decoder.SHARDED_WEIGHTS, loss=decoder.token_loss
    ),
    "moe": lambda: Model(
        build=sparse,
        weights={"*attention.q|*attention.k|*attention.v|embedding|head": 0, "*attention.out": 1},
        loss=moe.token_loss,
    ),
    "llama": lambda: Model(build=llama, weights=hf_weights(), loss=huggingface.token_loss),
    "mistral": lambda: Model(build=mistral, weights=hf_weights(), loss=huggingface.token_loss),
    "qwen3": lambda: Model(
        build=qwen3,
        weights={name: dim for name, dim in hf_weights().items() if name != "*lm_head"},
        loss=huggingface.token_loss,
    ),
    "gpt2": lambda: Model(build=gpt2, weights=GPT2, loss=huggingface.token_loss),
}


def tensor(model: Model, ways: int = 2, *, between: int | None = None, dp: int = 1) -> list[Directive]:
    """Divide all regions over groups of `ways` devices, `dp` groups."""
    devices = list(range(ways * dp))
    return [shard(at(), devices, ways, axis="TP", weights=model.weights, between=between)]


def context(ways: int = 2, attention: str = "gather", balance: str | None = None) -> list[Directive]:
    """Divide the sequence over `ways` devices."""
    devices = list(range(ways))
    return [shard(at(), devices, axis="CP", batch=FIELDS, attention=attention, balance=balance)]


def zero(model: Model, level: int) -> list[Directive]:
    """Divide over pairs of devices, and shard what is left over the two pairs."""
    return [replicate(at(), [0, 1, 2, 3], zero=level), *tensor(model, dp=2, between=model.between)]


def pipeline(model: Model, homes: Sequence[int], schedule: Sequence[Directive]) -> list[Directive]:
    """Put each stage on a pair of devices that divides it. homes: the pair of each stage."""
    pairs = [
        shard(
            at(PP=stage),
            [2 * pair, 2 * pair + 1],
            axis="TP",
            weights=model.weights,
            between=model.between,
        )
        for stage, pair in enumerate(homes)
    ]
    return [*pairs, split(at(), axis="MB", parts=4), *schedule]


def cube(model: Model) -> list[Directive]:
    """Divide weights, then the sequence, and replicate what is left: eight devices."""
    devices = list(range(8))
    return [
        replicate(at(), devices, zero=3),
        shard(at(), devices, 2, axis="TP", weights=model.weights, between=1),
        shard(at(), devices, 2, axis="CP", batch=FIELDS, balance="zigzag"),
    ]


def experts(model: Model, between: int | None = None) -> list[Directive]:
    """Divide attention over pairs of devices, and experts over the two pairs."""
    return [*tensor(model, dp=2, between=between), shard(at(EP="*"), [0, 1, 2, 3], ways=2)]


def experts_beside(level: int, ways: int, *directives: Directive) -> list[Directive]:
    """Divide four devices along other axes, shard what is left, and divide experts over `ways` neighbours."""
    devices = [0, 1, 2, 3]
    return [replicate(at(), devices, zero=level), *directives, shard(at(EP="*"), devices, ways=ways)]


def of_four(model: Model, ways: int = 2) -> Directive:
    """Divide weights and activations over groups of four devices."""
    return shard(at(), [0, 1, 2, 3], ways, axis="TP", weights=model.weights, between=1)


def sequence_of_four(ways: int, balance: str | None = None) -> Directive:
    """Divide the sequence over groups of four devices."""
    return shard(at(), [0, 1, 2, 3], ways, axis="CP", batch=FIELDS, balance=balance)


STRATEGIES: Mapping[str, tuple[int, Callable[[Model], list[Directive]]]] = {  # stages, and the directives
    "tp2": (1, lambda m: tensor(m)),
    "tp4": (1, lambda m: tensor(m, 4)),
    "sp2": (1, lambda m: tensor(m, between=m.between)),
    "cp2": (1, lambda m: context()),
    "cp2zigzag": (1, lambda m: context(balance="zigzag")),
    "cp2heads": (1, lambda m: context(attention="heads")),
    "cp4": (1, lambda m: context(4)),
    "tp2dp2": (1, lambda m: zero(m, 0)),
    "tp2dp2z1": (1, lambda m: zero(m, 1)),
    "tp2dp2z2": (1, lambda m: zero(m, 2)),
    "tp2dp2z3": (1, lambda m: zero(m, 3)),
    "tp2pp2": (2, lambda m: pipeline(m, [0, 1], one_f_one_b(2, 4))),
    "tp2zb": (2, lambda m: pipeline(m, [0, 1], zero_bubble(2, 4))),
    "tp2zbv": (4, lambda m: pipeline(m, [0, 1, 1, 0], zbv(2, 4))),
    "tp2dualpipev": (4, lambda m: pipeline(m, [0, 1, 1, 0], dualpipe_v(2, 4))),
    "tp2ep2": (1, lambda m: experts(m)),
    "sp2ep2": (1, lambda m: experts(m, between=1)),
    "tp2cp2dp2": (1, lambda m: cube(m)),
    "sp2ep4": (1, lambda m: experts_beside(3, 4, of_four(m))),
    "sp4ep2": (1, lambda m: experts_beside(0, 2, of_four(m, 4))),
    "cp2ep4": (1, lambda m: experts_beside(2, 4, sequence_of_four(2, "zigzag"))),
    "cp2ep2": (1, lambda m: experts_beside(1, 2, sequence_of_four(2))),
    "cp4ep2": (1, lambda m: experts_beside(3, 2, sequence_of_four(4))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What a strategy chooses on each axis of the matrix of divided models."""

    weights: int = 1  # ways
    between: bool = False
    sequence: str = "whole"
    zero: int | None = None
    schedule: str = "none"
    experts: int = 1  # devices of a group


AXES: Mapping[str, Axes] = {
    "tp2": Axes(weights=2),
    "tp4": Axes(weights=4),
    "sp2": Axes(weights=2, between=True),
    "cp2": Axes(sequence="2"),
    "cp2zigzag": Axes(sequence="2 zigzag"),
    "cp2heads": Axes(sequence="2 heads"),
    "cp4": Axes(sequence="4"),
    "tp2dp2": Axes(weights=2, between=True, zero=0),
    "tp2dp2z1": Axes(weights=2, between=True, zero=1),
    "tp2dp2z2": Axes(weights=2, between=True, zero=2),
    "tp2dp2z3": Axes(weights=2, between=True, zero=3),
    "tp2pp2": Axes(weights=2, between=True, schedule="1f1b"),
    "tp2zb": Axes(weights=2, between=True, schedule="zero-bubble"),
    "tp2zbv": Axes(weights=2, between=True, schedule="zbv"),
    "tp2dualpipev": Axes(weights=2, between=True, schedule="dualpipe-v"),
    "tp2ep2": Axes(weights=2, experts=2),
    "sp2ep2": Axes(weights=2, between=True, experts=2),
    "tp2cp2dp2": Axes(weights=2, between=True, sequence="2 zigzag", zero=3),
    "sp2ep4": Axes(weights=2, between=True, zero=3, experts=4),
    "sp4ep2": Axes(weights=4, between=True, experts=2),
    "cp2ep4": Axes(sequence="2 zigzag", zero=2, experts=4),
    "cp2ep2": Axes(sequence="2", zero=1, experts=2),
    "cp4ep2": Axes(sequence="4", experts=2),
}


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    """Return batches of tokens, some of whose labels do not count."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator)
        labels = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator)
        labels[:3, :5] = -100
        found.append({"tokens": tokens, "labels": labels})
    return found


@cache
def builder(model: str, stages: int) -> Callable[[], nn.Module]:
    """Return what builds a model, always the same object: its captures can be shared."""
    made = MODELS[model]()
    return lambda: made.build(stages)


def job(model: str, strategy: str) -> Job:
    """Return the job of a model under a strategy, in fp64."""
    return job_of(model, *STRATEGIES[strategy])


def job_of(model: str, stages: int, directives: Callable[[Model], list[Directive]]) -> Job:
    """Return the job of a model in some number of stages, in fp64."""
    made = MODELS[model]()
    return Job(
        model=builder(model, stages),
        loss=made.loss,
        data=batches,
        strategy=directives(made),
        precision="fp64",
        clip_norm=1.0,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )


def checked(made: Job, shared: Shared, launch: Launch = launch_inline) -> Report:
    """Compare a job with one device.

    All strategies of a model train on the same samples, so one device gives the same numbers for all of them.
    """
    given = [*made.data()]
    with shared.capturing(), one_core():
        program = compile(made, device="cpu")
        key = (made.model, bool(program.outline.degrees))
        if key not in shared.references:
            shared.references[key] = list(numbers(Reference(program), given))
        return check(program, launch, given, tol=1e-9, wanted=shared.references[key])
