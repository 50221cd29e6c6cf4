"""One suite that every communicator passes: the same results, the same bits, and no wait without an end."""

import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from piper.plan.plan import Comm, Plans
from piper.runtime.comm.base import CommError, Comms, Form
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.inline import World
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import fork_server
from piper.workers.transport.serialize import pack, unpack

DEVICES = (0, 1, 2, 3)
PLANS = Plans(
    plans=(),
    comms={
        "all": Comm(name="all", kind="groups", groups=(DEVICES,)),
        "halves": Comm(name="halves", kind="groups", groups=((0, 1), (2, 3))),
        "ring": Comm(name="ring", kind="pairs", groups=((0, 1), (1, 2), (2, 3), (3, 0))),
    },
    buckets={},
    seed=1.0,
    weighted=False,
)
Everyone = Callable[[Callable[[int, Comms], object]], list[object]]
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def processes() -> Iterator[Everyone]:
    """Run a function on every device at once, each a process."""
    numbers = itertools.count()
    with ExitStack() as held:
        forks = held.enter_context(fork_server("tests.runtime.gloo_process"))
        store = store_on(LOOPBACK)
        channels: list[Channel] = []
        for _ in DEVICES:
            here, there = socket.socketpair()
            with there:
                forks.fork([there.fileno()])
            channels.append(Channel(held.enter_context(here), 30.0))

        def run(work: Callable[[int, Comms], object]) -> list[object]:
            number = next(numbers)
            for device, channel in enumerate(channels):
                channel.send(pack((device, PLANS, TIMEOUT, store.port, number, work)))
            return [unpack(cast(bytes, channel.recv())) for channel in channels]

        yield run


@pytest.fixture(params=["inline", "gloo", "processes"])
def everyone(request: pytest.FixtureRequest) -> Iterator[Everyone]:
    """Run a function on every device at once; its results in the order of the devices."""
    if request.param == "processes":
        yield request.getfixturevalue("processes")
        return
    with ThreadPoolExecutor(len(DEVICES)) as threads:
        if request.param == "inline":
            world = World(PLANS, TIMEOUT)
            comms: list[Comms] = [world.member(device) for device in DEVICES]
        else:
            store = HashStore()
            comms = [*threads.map(lambda d: GlooComms(PLANS, d, store, "127.0.0.1", TIMEOUT), DEVICES)]
        yield lambda work: [*threads.map(work, DEVICES, comms)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).mul(1000).to(dtype) for _ in DEVICES]


def first_to_last(given: list[Tensor]) -> Tensor:
    """The sum that every communicator must give, written out; short types are added in float32."""
    a, b, c, d = given
    if a.dtype == torch.bfloat16:
        return (((a.float() + b.float()) + c.float()) + d.float()).to(torch.bfloat16)
    return ((a + b) + c) + d


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("length", [1, 3, 4096, 4097, 10_001])
def test_all_reduce_adds_from_first_to_last(everyone: Everyone, dtype: torch.dtype, length: int) -> None:
    given = values((length,), dtype)
    wanted = first_to_last(given)
    for got in everyone(lambda device, comms: comms.group("all").all_reduce(given[device])):
        assert isinstance(got, Tensor)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("dtype", "given", "wanted"),
    [
        # float32 has steps of 8 at 1e8: the first 1 is lost, and the last is not.
        (torch.float32, [1e8, 1.0, -1e8, 1.0], 1.0),
        (torch.float64, [1e16, 1.0, -1e16, 1.0], 1.0),
        # bf16 has steps of 2 at 256: added in bf16, each 1 would be lost.
        (torch.bfloat16, [256.0, 1.0, 1.0, 1.0], 260.0),
        (torch.int64, [2**60, 1, 2, 3], 2**60 + 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 4097])
def test_a_sum_in_numbers(
    everyone: Everyone, dtype: torch.dtype, given: list[float], wanted: float, length: int
) -> None:
    rows = [torch.full((length,), number, dtype=dtype) for number in given]
    for got in everyone(lambda device, comms: comms.group("all").all_reduce(rows[device])):
        assert isinstance(got, Tensor)
        assert got.tolist() == [wanted] * length


def test_a_group_knows_only_its_members(everyone: Everyone) -> None:
    given = values((5,), torch.float32)
    got = everyone(lambda device, comms: comms.group("halves").all_reduce(given[device]))
    assert torch.equal(torch.stack(got), torch.stack([given[0] + given[1]] * 2 + [given[2] + given[3]] * 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 8, 9, 5000])
def test_reduce_scatter_pads_with_zeros(everyone: Everyone, length: int) -> None:
    given = values((length,), torch.float32)
    shard = -(-length // len(DEVICES))
    got = everyone(lambda device, comms: comms.group("all").reduce_scatter(given[device], shard))
    whole = torch.cat(got)  # type: ignore[arg-type]
    assert torch.equal(whole[:length], first_to_last(given))
    assert not whole[length:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_gather_in_place_and_apart(everyone: Everyone, dtype: torch.dtype) -> None:
    given = values((7,), dtype)

    def work(device: int, comms: Comms) -> tuple[Tensor, Tensor]:
        group = comms.group("all")
        apart, within = torch.empty(28, dtype=dtype), torch.zeros(28, dtype=dtype)
        group.all_gather(given[device], apart)
        own = within[7 * device : 7 * device + 7]
        own.copy_(given[device])
        group.all_gather(own, within)
        return apart, within

    for pair in everyone(work):
        assert isinstance(pair, tuple)
        assert all(torch.equal(got, torch.cat(given)) for got in pair)


def test_all_to_all_is_uneven_and_may_be_empty(everyone: Everyone) -> None:
    counts = torch.tensor([[0, 2, 1, 0], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 4]])
    given = [torch.arange(int(row.sum()) * 3.0).view(-1, 3) + 100 * i for i, row in enumerate(counts)]

    def work(device: int, comms: Comms) -> Tensor:
        gives, gets = counts[device].tolist(), counts[:, device].tolist()
        return torch.cat(comms.group("all").all_to_all(given[device], gives, gets))

    sent = [rows.split(row.tolist()) for rows, row in zip(given, counts, strict=True)]
    for device, got in enumerate(everyone(work)):
        assert isinstance(got, Tensor)
        assert torch.equal(got, torch.cat([parts[device] for parts in sent]))


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_gives_to_the_next_and_takes_from_the_one_before(everyone: Everyone, by: int) -> None:
    given = values((5,), torch.float32)

    def work(device: int, comms: Comms) -> Tensor:
        got = comms.group("all").shift(given[device], by)
        assert got.data_ptr() != given[(device - by) % 4].data_ptr()  # it may be added to where it arrives
        return got

    for device, got in enumerate(everyone(work)):
        assert isinstance(got, Tensor)
        assert torch.equal(got, given[(device - by) % 4])


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_broadcast_gives_the_first_ones_value(everyone: Everyone, shape: tuple[int, ...]) -> None:
    given = values(shape, torch.float32)
    for got in everyone(lambda device, comms: comms.group("all").broadcast(given[device])):
        assert isinstance(got, Tensor)
        assert torch.equal(got, given[0])


def test_pipes_keep_the_order(everyone: Everyone) -> None:
    def work(device: int, comms: Comms) -> list[Tensor]:
        out, into = comms.outgoing("ring"), comms.incoming("ring")
        forms = [Form() for _ in range(4)]
        got = []
        for step in range(2):
            # A send may wait for its receive, so half of them receive first.
            for receive in (device % 2 == 1, device % 2 == 0):
                if receive:
                    got += [into.recv(forms[2]), into.recv(forms[3])]
                    continue
                for shape, form in zip([(2, 3), ()], forms[:2], strict=True):
                    out.send(torch.full(shape, 10.0 * device + step), form)
        return got

    for device, got in enumerate(everyone(work)):
        assert isinstance(got, list)
        before = (device - 1) % 4
        for step in range(2):
            assert torch.equal(got[2 * step], torch.full((2, 3), 10.0 * before + step))
            assert torch.equal(got[2 * step + 1], torch.tensor(10.0 * before + step))


def test_a_wait_for_nobody_ends(everyone: Everyone) -> None:
    def work(device: int, comms: Comms) -> bool:
        if device == 1:
            return True
        with pytest.raises(CommError):
            comms.group("all").all_reduce(torch.ones(3))
        return True

    assert all(everyone(work))


def test_stopping_a_world_ends_every_wait() -> None:
    """Those that wait now, two of them on one pipe, and those that come later."""
    world = World(PLANS, timeout=2)
    with ThreadPoolExecutor(2) as threads:
        pipe = world.member(0).incoming("ring")
        waiting = [threads.submit(pipe.recv, Form()) for _ in range(2)]
        world.stop()
        for wait in (waiting[0].result, waiting[1].result, lambda timeout: pipe.recv(Form())):
            with pytest.raises(CommError) as caught:
                wait(timeout=5)
    assert str(caught.value) == "device 0 stops waiting on ring for device 3: a worker has failed"
