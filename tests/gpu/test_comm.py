"""What communicators do with tensors on a CUDA device: NCCL as far as one device allows, and through the host."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from piper.plan.plan import Comm, Plans
from piper.runtime.comm.base import CommError, Comms, Form, summed
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.nccl import NcclComms
from piper.runtime.comm.staged import StagedComms

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]  # each process takes seconds to get there
CUDA = torch.device("cuda", 0)
DEVICES = (0, 1, 2)
PLANS = Plans(
    plans=(),
    comms={
        "all": Comm(name="all", kind="groups", groups=(DEVICES,)),
        "ring": Comm(name="ring", kind="pairs", groups=((0, 1), (1, 2), (2, 0))),
        "self": Comm(name="self", kind="groups", groups=((0,), (1,), (2,))),
    },
    buckets={},
    seed=1.0,
    weighted=False,
)
ALONE = Plans(plans=(), comms={"self": PLANS.comms["self"]}, buckets={}, seed=1.0, weighted=False)


def everyone(work: Callable[[int, Comms], object]) -> list[object]:
    store = HashStore()

    def member(device: int) -> object:
        comms = StagedComms(GlooComms(PLANS, device, store, "127.0.0.1", 5.0), CUDA)
        with torch.cuda.stream(torch.cuda.Stream()):
            result = work(device, comms)
            torch.cuda.current_stream().synchronize()
        return result

    with ThreadPoolExecutor(len(DEVICES)) as threads:
        return [*threads.map(member, DEVICES)]


def values(length: int, dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(length, generator=rng, dtype=torch.float64).mul(100).to(CUDA, dtype) for _ in DEVICES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("length", [1, 4096, 10_001])
def test_sums_through_the_host_have_the_bits_of_every_group(dtype: torch.dtype, length: int) -> None:
    given = values(length, dtype)
    wanted = summed([value.cpu() for value in given])
    for got in everyone(lambda device, comms: comms.group("all").all_reduce(given[device].clone())):
        assert isinstance(got, Tensor) and got.device == CUDA
        assert torch.equal(got.cpu(), wanted)


def test_the_rest_through_the_host() -> None:
    given = values(7, torch.float32)

    def work(device: int, comms: Comms) -> tuple[Tensor, ...]:
        group = comms.group("all")
        out = torch.empty(21, device=CUDA)
        group.all_gather(given[device], out)
        shard = group.reduce_scatter(out, 8)
        first = group.broadcast(given[device])
        shifted = group.shift(given[device], 1)
        rows = torch.cat(group.all_to_all(given[device], [device, 0, 7 - device], gets(device)))
        pipes = comms.outgoing("ring"), comms.incoming("ring")
        form = Form((7,), torch.float32)
        if device % 2:
            got = pipes[1].recv(form)
            pipes[0].send(given[device])
        else:
            pipes[0].send(given[device])
            got = pipes[1].recv(form)
        return out, shard, first, rows, got, shifted

    def gets(device: int) -> list[int]:
        return [0, 1, 2] if device == 0 else [0, 0, 0] if device == 1 else [7, 6, 5]

    for device, results in enumerate(everyone(work)):
        assert isinstance(results, tuple)
        out, shard, first, rows, got, shifted = results
        assert torch.equal(shifted, given[device - 1])
        assert torch.equal(out, torch.cat(given))
        whole = torch.cat([out * 3, out.new_zeros(3)])
        torch.testing.assert_close(shard, whole[8 * device : 8 * device + 8])
        assert torch.equal(first, given[0])
        assert len(rows) == sum(gets(device))
        assert torch.equal(got, given[device - 1])


def test_nccl_with_one_member_changes_nothing() -> None:
    comms = NcclComms(ALONE, 0, HashStore(), CUDA, 20.0)
    group = comms.group("self")
    side = torch.cuda.Stream()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        given = values(1000, dtype)[0]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(group.all_reduce(given.clone()), given)
            out = torch.empty_like(given)
            group.all_gather(given, out)
            assert torch.equal(out, given)
            assert torch.equal(group.reduce_scatter(given, 1000), given)
            padded = group.reduce_scatter(given, 1003)
            assert torch.equal(padded[:1000], given) and not padded[1000:].any()
            assert torch.equal(torch.cat(group.all_to_all(given, [1000], [1000])), given)
            assert torch.equal(group.broadcast(given), given)
            assert torch.equal(group.shift(given, 1), given)
    comms.abort()


def test_nccl_works_on_the_current_stream() -> None:
    """What is issued there is behind what was there: the host does not wait, and nobody has to say so."""
    comms = NcclComms(ALONE, 0, HashStore(), CUDA, 20.0)
    group, side = comms.group("self"), torch.cuda.Stream()
    value = torch.zeros(1 << 20, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        group.all_reduce(value)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        value.add_(1)
        begin = time.perf_counter()
        group.all_reduce(value)
        result = group.reduce_scatter(value, 1 << 20)
        took = time.perf_counter() - begin
        side.synchronize()
    assert took < 0.05
    assert result.sum().item() == 1 << 20
    comms.abort()


def test_nccl_refuses_two_members_on_one_gpu_in_bounded_time() -> None:
    plans = Plans(
        plans=(),
        comms={"pair": Comm(name="pair", kind="groups", groups=((0, 1),))},
        buckets={},
        seed=1.0,
        weighted=False,
    )
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(NcclComms, plans, device, store, CUDA, 10.0) for device in (0, 1)]
        for future in futures:
            with pytest.raises((CommError, RuntimeError)):
                future.result(timeout=60)
