"""Lets plain PyTorch run `flex_attention` as products, a softmax and nothing else.

Its own operator is what a captured model runs, so it is no reference for one. Torch also refuses its gradient
on a CPU, and compiles it, which takes longer than a step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention

from piper.process.attributes import replaced
from piper.process.flex_on_host import flex_gradients_on_host


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """Attend inside the block by operations that autograd knows, also where it would be compiled."""
    with (
        flex_gradients_on_host(),
        replaced(flex_attention, "flex_attention_hop", _attend),
        replaced(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    blocks: Sequence[Any],
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and in base 2 the log-sum-exp and the largest of each query's scores."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).expand(len(query), -1, -1, -1) for x in (key, value))
    scores = query @ keys.transpose(-1, -2) * scale
    indices = [torch.arange(size, device=query.device) for size in scores.shape]
    with TransformGetItemToIndex():  # tensors are indexed by single indices, each on its own under vmap
        scores = _of_all(score_mod, 1)(scores, *indices)
        seen = _of_all(blocks[-1], 0)(*indices)
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - largest.detach().masked_fill(~seen.any(-1, keepdim=True), 0.0)).exp()
    sums = powers.sum(-1, keepdim=True)
    weights = powers / sums.masked_fill(sums == 0, 1.0)  # a query that sees no key has zeros
    in_base_two = [x / math.log(2) for x in (scores.logsumexp(-1), largest.squeeze(-1))]
    return weights @ values, in_base_two[0], in_base_two[1]


def _of_all(function: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """Return a function of a sample, a head, a query and a key over all of them, as [b, h, q, k].

    scores: how many arguments before these have all four dimensions.
    """
    for dim in reversed(range(4)):
        indices = [0 if dim == other else None for other in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in range(scores)), *indices))
    return function
