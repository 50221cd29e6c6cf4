"""Attention by blocks, step by step: the numbers of plain attention, and as much work on every device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.capture.shard.attention_operators import Turn, all_keys, ring_attend, ring_pass

HEADS, SIZE = 4, 8


def own_places(length: int, ways: int, zigzag: bool, place: int) -> list[int]:
    """Return which positions of the sequence a device holds."""
    if not zigzag:
        each = length // ways
        return [*range(place * each, (place + 1) * each)]
    each = length // (2 * ways)
    mirrored = 2 * ways - 1 - place
    return [*range(place * each, (place + 1) * each), *range(mirrored * each, (mirrored + 1) * each)]


class Whole:
    """Queries, keys and values of a whole sequence, with the output and the gradients of plain attention."""

    def __init__(self, length: int, heads: int, *, causal: bool, mask: Tensor | None = None) -> None:
        random = torch.Generator().manual_seed(length)
        self.mask, self.scale = mask, SIZE**-0.5
        self.inputs = [
            torch.randn(2, count, length, SIZE, dtype=torch.float64, generator=random).requires_grad_()
            for count in (HEADS, heads, heads)
        ]
        query, key, value = self.inputs
        keys, values = (x.repeat_interleave(HEADS // heads, 1) for x in (key, value))
        self.out = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal)
        self.given = torch.randn(self.out.shape, dtype=torch.float64, generator=random)
        self.grads = torch.autograd.grad(self.out, self.inputs, self.given)
        self.found = [torch.zeros_like(x) for x in self.inputs]

    def part(self, which: int, places: list[int]) -> Tensor:
        """Return a device's own queries, keys or values, as a leaf."""
        return self.inputs[which][:, :, places].detach().requires_grad_()

    def compare(self) -> None:
        """Compare the gradients that the devices gave."""
        for found, wanted in zip(self.found, self.grads, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("kind", ["causal", "full", "mask", "scores", "padding"])
def test_a_ring_gives_the_numbers_of_plain_attention(ways: int, zigzag: bool, kind: str) -> None:
    length = 6 * ways
    random = torch.Generator().manual_seed(1)
    mask = {
        "mask": torch.rand(2, 1, length, length, generator=random) > 0.4,
        "scores": torch.randn(length, length, dtype=torch.float64, generator=random),
        "padding": torch.arange(length).view(1, 1, 1, length) < length - 2,
    }.get(kind)
    if kind == "mask":
        assert mask is not None
        mask[0, 0, 3] = False  # a query that sees no key at all
    causal = kind == "causal"
    whole = Whole(length, 2, causal=causal, mask=mask)
    turns = [Turn(ways=ways, step=step, causal=causal, zigzag=zigzag).numbers for step in range(ways)]
    for place in range(ways):
        here, rank = own_places(length, ways, zigzag, place), torch.tensor([place])
        query = whole.part(0, here)
        own = mask[..., here, :] if mask is not None and mask.shape[-2] > 1 else mask
        sources = [own_places(length, ways, zigzag, (place - step) % ways) for step in range(ways)]
        blocks = [(whole.part(1, there), whole.part(2, there)) for there in sources]
        result: list[Tensor] = []
        for turn, (key, value) in zip(turns, blocks, strict=True):
            fixed = query.detach(), key.detach(), value.detach()
            result = [*ring_attend(*fixed, own, result, rank, whole.scale, turn)]
        passed = result[0]
        for turn, block in zip(turns, blocks, strict=True):
            passed = ring_pass(passed, query, *block, own, *result, rank, whole.scale, turn)
        torch.testing.assert_close(passed, whole.out[:, :, here], rtol=1e-12, atol=1e-12)
        leaves = [query, *(x for block in blocks for x in block)]
        grads = torch.autograd.grad(passed, leaves, whole.given[:, :, here])
        whole.found[0][:, :, here] += grads[0]
        for step, there in enumerate(sources):
            whole.found[1][:, :, there] += grads[1 + 2 * step]
            whole.found[2][:, :, there] += grads[2 + 2 * step]
    whole.compare()


@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_queries_and_all_keys_give_the_numbers_of_plain_attention(
    ways: int, zigzag: bool, heads: int
) -> None:
    length = 6 * ways
    whole = Whole(length, heads, causal=True)
    for place in range(ways):
        here = own_places(length, ways, zigzag, place)
        query, (_, key, value) = whole.part(0, here), whole.inputs
        how = (torch.tensor([place]), whole.scale, all_keys(ways, zigzag).numbers)
        out, _ = ring_attend(query, key, value, None, [], *how)
        torch.testing.assert_close(out, whole.out[:, :, here], rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(out, (query, key, value), whole.given[:, :, here])
        whole.found[0][:, :, here] += grads[0]
        whole.found[1] += grads[1]
        whole.found[2] += grads[2]
    whole.compare()


def test_short_types_are_merged_in_single_precision() -> None:
    """Two steps of bf16 are as close to one attention in fp64 as bf16 itself."""
    random = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, 32, 8, generator=random).bfloat16() for _ in range(3))
    result: list[Tensor] = []
    for step in range(2):
        turn = Turn(ways=2, step=step, causal=False, zigzag=False).numbers
        block = [x[:, :, 16 * step : 16 * step + 16] for x in (key, value)]
        result = [*ring_attend(query, *block, None, result, torch.tensor([0]), 0.5, turn)]
        assert [x.dtype for x in result] == [(torch.float32, torch.bfloat16)[step], torch.float32]
    wanted = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), scale=0.5)
    torch.testing.assert_close(result[0].double(), wanted, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_zigzag_gives_every_device_as_much_to_do_and_skips_what_is_masked(ways: int) -> None:
    """Pairs of queries and keys: in all as many as the causal mask leaves, on each device the same."""
    rows = 32
    length = ways * rows
    left = length * (length + 1) // 2
    gathered = [
        sum(b.pairs for b in all_keys(ways, True).blocks(place, rows, length)) for place in range(ways)
    ]
    assert set(gathered) == {left // ways}
    steps = [
        [
            sum(
                b.pairs
                for b in Turn(ways=ways, step=step, causal=True, zigzag=True).blocks(place, rows, rows)
            )
            for place in range(ways)
        ]
        for step in range(ways)
    ]
    assert all(len(set(places)) == 1 for places in steps)  # in every step, so that none waits for another
    assert sum(map(sum, steps)) == left
    assert steps[0][0] == rows * (rows + 1) // 2 and steps[1][0] == rows * rows // 2


def test_without_balance_the_last_device_has_most_to_do() -> None:
    plain = [Turn(ways=4, step=step, causal=True, zigzag=False) for step in range(4)]
    work = [sum(b.pairs for turn in plain for b in turn.blocks(place, 8, 8)) for place in range(4)]
    assert work == [36, 100, 164, 228]
    assert [sum(b.pairs for b in all_keys(4, False).blocks(place, 8, 32)) for place in range(4)] == work
