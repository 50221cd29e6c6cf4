"""What to write instead of an operation that cannot be sharded."""

import torch

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
