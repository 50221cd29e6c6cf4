"""Attention by blocks on a CUDA device: the flash kernel, which skips what is masked, beside plain arithmetic."""

import pytest
import torch
from torch import Tensor

from piper.capture.shard.attention_operators import (
    Turn,
    all_keys,
    attend,
    attend_grad,
    ring_attend,
    ring_pass,
    rows_of,
)
from tests.capture.test_block_attention import own_places

pytestmark = pytest.mark.gpu
LENGTH, HEADS, KEY_HEADS, SIZE, SCALE = 512, 8, 2, 64, 0.125


def assert_near(got: Tensor, wanted: Tensor, apart: float = 2e-2) -> None:
    """Compare as far as bf16 reaches."""
    torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=apart, atol=apart)


def drawn() -> list[Tensor]:
    """Return queries, keys, values and a gradient of a whole sequence, in bf16."""
    random = torch.Generator().manual_seed(0)
    counts = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(2, n, LENGTH, SIZE, generator=random).to("cuda", torch.bfloat16) for n in counts]


def plain(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return causal attention and its gradients, in float32."""
    leaves = [x.float().requires_grad_() for x in (query, key, value)]
    wide = [x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in leaves[1:]]
    scores = leaves[0] @ wide[0].transpose(-1, -2) * SCALE
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide[1]
    return out, torch.autograd.grad(out, leaves, grad.float())


def test_the_flash_kernel_gives_the_sums_and_gradients_of_plain_arithmetic() -> None:
    """More keys than queries: the last query sees all of them."""
    query, key, value, grad = drawn()
    for block in all_keys(4, True).blocks(2, LENGTH // 4, LENGTH):
        own, given = rows_of(query, block.queries), rows_of(grad, block.queries)
        keys, values = rows_of(key, block.keys), rows_of(value, block.keys)
        out, total = attend(own, keys, values, None, SCALE, True)
        q, k, v = (x.double() for x in (own, keys, values))
        right, sums = attend(q, k, v, None, SCALE, True)
        assert_near(out, right)
        assert_near(total, sums, 1e-3)
        grads = attend_grad(given, (own, keys, values, out, total), None, SCALE, True)
        wanted = attend_grad(given.double(), (q, k, v, right, sums), None, SCALE, True)
        for got, should in zip(grads, wanted, strict=True):
            assert_near(got, should)


@pytest.mark.parametrize("zigzag", [False, True])
def test_a_ring_and_gathered_keys_give_plain_attention(zigzag: bool) -> None:
    query, key, value, grad = drawn()
    right, wanted = plain(query, key, value, grad)
    ways = 4
    ring, gathered = ([torch.zeros_like(x) for x in wanted] for _ in range(2))
    turns = [Turn(ways=ways, step=step, causal=True, zigzag=zigzag).numbers for step in range(ways)]
    for place in range(ways):
        here, rank = own_places(LENGTH, ways, zigzag, place), torch.tensor([place])  # on the host
        own, given = query[:, :, here].detach().requires_grad_(), grad[:, :, here]
        leaves = [x.detach().requires_grad_() for x in (key, value)]
        out, _ = ring_attend(own, *leaves, None, [], rank, SCALE, all_keys(ways, zigzag).numbers)
        assert_near(out, right[:, :, here])
        made = torch.autograd.grad(out, (own, *leaves), given)
        gathered[0][:, :, here] += made[0]
        gathered[1] += made[1]
        gathered[2] += made[2]
        sources = [own_places(LENGTH, ways, zigzag, (place - step) % ways) for step in range(ways)]
        blocks = [[x[:, :, there].detach().requires_grad_() for x in (key, value)] for there in sources]
        result: list[Tensor] = []
        for turn, block in zip(turns, blocks, strict=True):
            fixed = [x.detach() for x in (own, *block)]
            result = [*ring_attend(*fixed, None, result, rank, SCALE, turn)]
        passed = result[0]
        for turn, block in zip(turns, blocks, strict=True):
            passed = ring_pass(passed, own, *block, None, *result, rank, SCALE, turn)
        assert_near(passed, right[:, :, here])
        made = torch.autograd.grad(passed, [own, *(x for block in blocks for x in block)], given)
        ring[0][:, :, here] += made[0]
        for step, there in enumerate(sources):
            ring[1][:, :, there] += made[1 + 2 * step]
            ring[2][:, :, there] += made[2 + 2 * step]
    for found in (ring, gathered):
        for got, should in zip(found, wanted, strict=True):
            assert_near(got, should, 5e-2)
