"""What is asked of the regions that one directive shards, and how a rule refuses: with what to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from piper.ir.sharding import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSharding:
    """What one `shard` directive over an axis asks of the regions it selects."""

    by: str  # the directive, as messages name it
    axis: str
    degree: int
    weights: Mapping[str, Shard] = field(default_factory=dict)  # by parameter name
    shared: Mapping[str, Shard] = field(default_factory=dict)  # weights that other regions read whole
    batch: Mapping[str, Shard] = field(default_factory=dict)  # by field
    between: int | None = None  # the dimension along which activations between sharded work are sharded
    attention: str = "gather"
    zigzag: bool = False
    gathers_rows: bool = False  # routers sort the rows of the group, where each device cannot sort its own
    inner: int = 1  # over how many devices axes that are sharded later shard what this one leaves


class NoRuleError(Exception):
    """A rule that does not cover the layouts it is given; the text says what it cannot do."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint  # where another argument of the directive is a way out


HINT = "do not shard that region, or register a rule for the operation with piper.sharding_rule"
EXPERTS = (
    'give a mixture of experts of Hugging Face experts_implementation="piper" in its config '
    "(piper.models.huggingface.register_experts)"
)
INSTEAD = {
    "aten.max": "write x.amax(dim), whose maximum is taken over the devices",
    "aten.min": "write -(-x).amax(dim), whose maximum is taken over the devices",
    "aten.argmax": "count right answers as x.gather(-1, labels) >= x.amax(-1, keepdim=True), whose maximum "
    "is taken over the devices",
    "aten.aminmax": "write x.amax(dim) and -(-x).amax(dim), whose maxima are taken over the devices",
    "aten.amin": "write -(-x).amax(dim), whose maximum is taken over the devices",
    "aten.norm": "write x.square().sum(dim).sqrt(), whose sum is taken over the devices",
    "aten.linalg_vector_norm": "write x.square().sum(dim).sqrt(), whose sum is taken over the devices",
    "aten.var": "write (x - x.mean(dim, keepdim=True)).square().mean(dim), whose means are over the devices",
    "aten.std": "write the root of (x - x.mean(dim, keepdim=True)).square().mean(dim)",
    "aten.masked_select": "write torch.where(mask, x, 0), which keeps the shape",
    "aten.nonzero": "write torch.where(mask, x, 0), which keeps the shape",
    "aten.batch_norm": "use nn.GroupNorm or nn.LayerNorm, which need no other sample",
    "aten.histc": EXPERTS,
    "aten.convolution": "along the sequence use tensor parallelism with between=1, which gathers it",
    "aten.copy_": "write torch.cat or torch.where, which make a new value, in place of x[...] = y",
    "aten.as_strided": "write it with view, slices or unfold, which say which dimension they keep",
}


def hint_for(target: object) -> str:
    """Return the way out of a refusal of an operation."""
    packet = str(target.overloadpacket) if isinstance(target, torch._ops.OpOverload) else ""
    return f"{INSTEAD[packet]}; or {HINT}" if packet in INSTEAD else HINT
