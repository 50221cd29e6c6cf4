"""One suite that every communicator passes: the same results, the same bits, and no wait without an end.

`tests/gpu/test_ranks_comm.py` runs the tests of `crew` on ranks that use NCCL, whose sums have other last bits.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from piper.runtime.comm.base import CommError, Comms, Form
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.inline import World
from piper.workers.transport.fork_server import ForkServer
from tests.runtime.comm_crew import Crew, Processes, first_to_last, plans_for

SIZE = 4
PLANS = plans_for(SIZE)
TIMEOUT = 1.0
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
SIZES = [  # of values that only travel
    *((torch.float32, 0), (torch.float32, 7), (torch.bfloat16, 1), (torch.bfloat16, 4097), (torch.int64, 9)),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(ForkServer("tests.runtime.comm_process")) as forks:
        started = Processes(forks, SIZE, bound=30.0)
        yield started
        started.close()


@pytest.fixture(params=["inline", "gloo", "processes"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Devices as threads, as threads that use gloo, and as processes."""
    if request.param == "processes":
        started: Processes = request.getfixturevalue("processes")
        yield started.crew(SIZE, "gloo", TIMEOUT)
        return
    devices = range(SIZE)
    with ThreadPoolExecutor(SIZE) as threads:
        if request.param == "inline":
            world = World(PLANS, TIMEOUT)
            comms: list[Comms] = [world.member(device) for device in devices]
        else:
            store = HashStore()
            comms = [*threads.map(lambda d: GlooComms(PLANS, d, store, "127.0.0.1", TIMEOUT), devices)]
        yield Crew(size=SIZE, run=lambda work: [*threads.map(work, devices, comms)])


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("length", [1, 3, 4096, 4097, 10_001])
def test_all_reduce_adds_from_first_to_last(crew: Crew, dtype: torch.dtype, length: int) -> None:
    given, place = crew.values((length,), dtype), crew.place
    for got in crew.run(lambda device, comms: comms.group("all").all_reduce(given[device].to(place))):
        crew.assert_sum(got, given)


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
    crew: Crew, dtype: torch.dtype, given: list[float], wanted: float, length: int
) -> None:
    rows = [torch.full((length,), number, dtype=dtype) for number in given]
    for got in crew.run(lambda device, comms: comms.group("all").all_reduce(rows[device])):
        assert isinstance(got, Tensor)
        assert got.tolist() == [wanted] * length


def test_a_group_knows_only_its_members(crew: Crew) -> None:
    given, place, cut = crew.values((5,), torch.float32), crew.place, (crew.size + 1) // 2
    got = crew.run(lambda device, comms: comms.group("halves").all_reduce(given[device].to(place)))
    for device, total in enumerate(got):
        crew.assert_sum(total, given[:cut] if device < cut else given[cut:])


@pytest.mark.parametrize(
    ("dtype", "length"),
    [*((torch.float32, length) for length in (1, 2, 8, 9, 5000)), (torch.bfloat16, 4097), (torch.int64, 7)],
)
def test_reduce_scatter_pads_with_zeros(crew: Crew, dtype: torch.dtype, length: int) -> None:
    given, place = crew.values((length,), dtype), crew.place
    shard = -(-length // crew.size)
    got = crew.run(lambda device, comms: comms.group("all").reduce_scatter(given[device].to(place), shard))
    whole = torch.cat(got)  # type: ignore[arg-type]
    crew.assert_sum(whole[:length], given)
    assert not whole[length:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_reduce_scatter_and_all_gather(crew: Crew, dtype: torch.dtype) -> None:
    lengths = [0, 5, 1, 8][: crew.size]
    given, place = crew.values((sum(lengths),), dtype), crew.place

    def work(device: int, comms: Comms) -> tuple[Tensor, Tensor, Tensor]:
        group = comms.group("all")
        shard = group.reduce_scatter_uneven(given[device].to(place), lengths)
        apart, within = (torch.zeros(sum(lengths), dtype=dtype, device=place) for _ in range(2))
        group.all_gather_uneven(shard, apart, lengths)
        own = within.split(lengths)[device]
        own.copy_(shard)
        group.all_gather_uneven(own, within, lengths)
        return shard, apart, within

    results = cast("list[tuple[Tensor, Tensor, Tensor]]", crew.run(work))
    whole = torch.cat([shard for shard, _, _ in results])
    crew.assert_sum(whole, given)
    for _, apart, within in results:
        assert torch.equal(apart, whole) and torch.equal(within, whole)


@pytest.mark.parametrize(("dtype", "length"), SIZES)
def test_all_gather_in_place_and_apart(crew: Crew, dtype: torch.dtype, length: int) -> None:
    given, place, size = crew.values((length,), dtype), crew.place, crew.size

    def work(device: int, comms: Comms) -> tuple[Tensor, Tensor]:
        group = comms.group("all")
        apart, within = (torch.zeros(length * size, dtype=dtype, device=place) for _ in range(2))
        group.all_gather(given[device].to(place), apart)
        own = within[length * device : length * (device + 1)]
        own.copy_(given[device])
        group.all_gather(own, within)
        return apart, within

    for pair in crew.run(work):
        assert isinstance(pair, tuple)
        assert all(torch.equal(got, torch.cat(given)) for got in pair)


UNEVEN = [[0, 2, 1, 0], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 4]]
COUNTS = {
    "none": [[0] * 4] * 4,
    "to the last": [[0, 7, 7, 7], [0, 3, 3, 3], [0, 1, 1, 1], [0, 5, 5, 5]],
    "even": [[3] * 4] * 4,
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*(("uneven", dtype) for dtype in DTYPES), *((case, torch.bfloat16) for case in COUNTS)],
)
def test_all_to_all_is_uneven_and_may_be_empty(crew: Crew, dtype: torch.dtype, case: str) -> None:
    counts, place = torch.tensor(COUNTS.get(case, UNEVEN))[: crew.size, : crew.size], crew.place
    rows = [torch.arange(int(row.sum()) * 3).view(-1, 3) + 50 * i for i, row in enumerate(counts)]
    given = [value.to(dtype) for value in rows]

    def work(device: int, comms: Comms) -> Tensor:
        gives, gets = counts[device].tolist(), counts[:, device].tolist()
        return torch.cat(comms.group("all").all_to_all(given[device].to(place), gives, gets))

    sent = [value.split(row.tolist()) for value, row in zip(given, counts, strict=True)]
    for device, got in enumerate(crew.run(work)):
        assert isinstance(got, Tensor)
        assert torch.equal(got, torch.cat([parts[device] for parts in sent]))


@pytest.mark.parametrize(("dtype", "length"), SIZES)
@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_gives_to_the_next_and_takes_from_the_one_before(
    crew: Crew, by: int, length: int, dtype: torch.dtype
) -> None:
    given, place, size = crew.values((length,), dtype), crew.place, crew.size

    def work(device: int, comms: Comms) -> Tensor:
        got = comms.group("all").shift(given[device].to(place), by)
        # It may be added to where it arrives.
        assert not length or got.data_ptr() != given[(device - by) % size].data_ptr()
        return got

    for device, got in enumerate(crew.run(work)):
        assert isinstance(got, Tensor)
        assert torch.equal(got, given[(device - by) % size])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_uneven_shift(crew: Crew, dtype: torch.dtype) -> None:
    lengths = [3, 0, 7, 1][: crew.size]
    given = [value[:length] for value, length in zip(crew.values((7,), dtype), lengths, strict=True)]
    place = crew.place

    def work(device: int, comms: Comms) -> Tensor:
        return comms.group("all").shift_uneven(given[device].to(place), lengths[device - 1])

    for device, got in enumerate(crew.run(work)):
        assert isinstance(got, Tensor)
        assert torch.equal(got, given[device - 1])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.float32), ((3,), torch.bfloat16), ((2, 2), torch.int64), ((0, 3), torch.float32)],
)
def test_broadcast_gives_the_first_ones_value(crew: Crew, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given, place = crew.values(shape, dtype), crew.place
    for got in crew.run(lambda device, comms: comms.group("all").broadcast(given[device].to(place))):
        assert isinstance(got, Tensor)
        assert torch.equal(got, given[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pipes_keep_the_order(crew: Crew, dtype: torch.dtype) -> None:
    place, shapes = crew.place, [(2, 3), (), (4097,)]

    def work(device: int, comms: Comms) -> list[Tensor]:
        out, into = comms.outgoing("ring"), comms.incoming("ring")
        outward, inward = ([Form() for _ in shapes] for _ in range(2))
        got = []
        for step in range(2):
            # A send may wait for its receive, so half of them receive first.
            for receive in (device % 2 == 1, device % 2 == 0):
                if receive:
                    got += [into.recv(form) for form in inward]
                    continue
                for shape, form in zip(shapes, outward, strict=True):
                    out.send(torch.full(shape, 10 * device + step, dtype=dtype, device=place), form)
        return got

    for device, got in enumerate(crew.run(work)):
        assert isinstance(got, list)
        before = (device - 1) % crew.size
        wanted = [torch.full(shape, 10 * before + step, dtype=dtype) for step in range(2) for shape in shapes]
        assert [value.dtype for value in got] == [dtype] * len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_a_wait_for_nobody_ends(crew: Crew) -> None:
    def work(device: int, comms: Comms) -> bool:
        if device == 1:
            return True
        with pytest.raises(CommError):
            comms.group("all").all_reduce(torch.ones(3))
        return True

    assert all(crew.run(work))


def test_sums_of_a_crew_are_compared() -> None:
    """A wrong sum is noticed, to the bit or beyond what rounding explains."""
    given = [torch.tensor([1e8, 3.0]), torch.tensor([1.0, 4.0])]
    for exact in (True, False):
        crew = Crew(size=2, run=lambda work: [], exact=exact)
        crew.assert_sum(first_to_last(given), given)
        with pytest.raises(AssertionError):
            crew.assert_sum(torch.tensor([1e8, 8.0]), given)


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
