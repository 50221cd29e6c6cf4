"""What is asked of the regions that one directive shards, and how a rule refuses: with what to write."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from piper.ir.chunk import Tags
from piper.ir.chunk_options import AxisPolicy
from piper.ir.mesh import Mesh
from piper.ir.sharding import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(AxisPolicy):
    """What one `shard` directive over an axis asks, and the regions that it shards."""

    by: str  # the directive, as messages name it
    regions: Mapping[Tags, Mesh]  # each with its devices, numbered from 0: shards pass between equal ones

    @property
    def meaning(self) -> "Request":
        """Return what is asked, whichever directive asks it and for whichever regions."""
        return replace(self, by="", regions={}, origin=0, stream="")

    def alike(self, other: "Request") -> bool:
        """Return whether two directives shard alike, so that slices may pass between their regions."""
        axes, others = (next(iter(each.regions.values())).sharing for each in (self, other))  # of all regions
        return axes == others and self.meaning == other.meaning

    def by_axes(self) -> Iterator["Request"]:
        """Yield a request for all regions that have the same axes: slices pass between no others."""
        for axes in dict.fromkeys(mesh.sharing for mesh in self.regions.values()):
            yield replace(self, regions={tags: m for tags, m in self.regions.items() if m.sharing == axes})


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSharding:
    """A request with its patterns looked up: which parameters and fields of the batch it shards, and how."""

    request: Request
    weights: Mapping[str, Shard] = field(default_factory=dict)  # by parameter name
    shared: Mapping[str, Shard] = field(default_factory=dict)  # weights that other regions read whole
    batch: Mapping[str, Shard] = field(default_factory=dict)  # by field
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
