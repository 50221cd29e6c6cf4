"""Row counts on their way to the host, while the accelerator is still at work."""

import time

import pytest
import torch

from piper.runtime.comm.synthetic import AloneGroup
from piper.runtime.expert_exchange import count, count_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
CYCLES = 400_000_000  # some 0.2 s


def test_the_host_goes_on_until_it_needs_the_numbers() -> None:
    group, stream = AloneGroup("experts", 0, 2), torch.cuda.Stream()
    counts, rows = torch.tensor([2, 0, 1, 3], device="cuda"), torch.randn(6, 8, device="cuda")
    count(group, counts)[0].lengths()  # memory is pinned, kernels are loaded
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin = time.perf_counter()
        torch.cuda._sleep(CYCLES)
        splits, local = count(group, counts)
        assert not stream.query()
        issued = time.perf_counter() - begin
        assert splits.lengths()[0] == [[2, 0], [1, 3]]
        assert time.perf_counter() - begin > 2 * issued
        returned = splits.back(group, splits.outward(group, rows))
    torch.cuda.synchronize()
    assert torch.equal(returned, rows)
    assert local.tolist() == [3, 3]


def test_a_graph_of_an_exchange_in_blocks_follows_other_counts() -> None:
    group, stream = AloneGroup("experts", 0, 2), torch.cuda.Stream()
    counts = torch.tensor([2, 0, 1, 3], device="cuda")
    rows = torch.randn(6, 8, device="cuda")

    def exchanged() -> tuple[torch.Tensor, ...]:
        blocks, local, overflow = count_blocks(group, counts, 6, 4)
        arrived = blocks.outward(group, rows, gradients=True)
        return blocks.back(group, arrived), arrived, local, overflow

    with torch.cuda.stream(stream):
        exchanged()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        returned, arrived, local, overflow = exchanged()
    for given, wanted in (([2, 0, 1, 3], [3, 5]), ([0, 3, 2, 1], [2, 6])):
        counts.copy_(torch.tensor(given))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(returned, rows)
        assert torch.equal(arrived[6:], torch.zeros(2, 8, device="cuda"))
        assert local.tolist() == wanted
        assert not overflow.item()
    counts.copy_(torch.tensor([4, 1, 1, 0]))
    graph.replay()
    torch.cuda.synchronize()
    assert overflow.item()
