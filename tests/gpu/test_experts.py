"""Row counts on their way to the host, while the accelerator is still at work."""

import time

import pytest
import torch

from piper.runtime.comm.synthetic import AloneGroup
from piper.runtime.expert_exchange import back, count, outward

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
        assert splits.lengths().gives == [2, 4]
        assert time.perf_counter() - begin > 2 * issued
        returned = back(group, outward(group, rows, splits), splits)
    torch.cuda.synchronize()
    assert torch.equal(returned, rows)
    assert local.tolist() == [3, 3]
