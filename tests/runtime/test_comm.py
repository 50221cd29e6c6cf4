"""One suite that every communicator passes: the same results, the same bits, and no wait without an end.

`tests/gpu/test_ranks_comm.py` runs the tests of `crew` on ranks that use NCCL, whose sums have other last bits.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import sleep

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from piper.runtime.comm.base import CommError, Comms, Form
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.inline import World
from piper.selftest.comm_cases import CASES, CommCase, Total, first_to_last, in_any_order
from piper.selftest.rank_process import Crew, Processes, plans_for
from piper.workers.transport.fork_server import ForkServer

SIZE = 4
PLANS = plans_for(SIZE)
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(ForkServer("piper.selftest.rank_process")) as forks:
        started = Processes(forks, SIZE, bound=30.0)
        yield started
        started.close()


@pytest.fixture(params=["inline", "gloo", "processes"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Devices as threads, as threads that use gloo, and as processes."""
    if request.param == "processes":
        started: Processes = request.getfixturevalue("processes")
        yield started.crew(SIZE, TIMEOUT)
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_collective_gives_what_it_must(crew: Crew, case: CommCase) -> None:
    assert case.problems(crew) == []


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


def test_a_wait_for_nobody_ends(crew: Crew) -> None:
    def work(device: int, comms: Comms) -> bool:
        if device == 1:
            return True
        with pytest.raises(CommError):
            comms.group("all").all_reduce(torch.ones(3))
        return True

    assert all(crew.run(work))


@pytest.mark.parametrize("total", [first_to_last, in_any_order])
def test_a_wrong_sum_is_noticed(total: Total) -> None:
    """To the bit, or beyond what rounding explains."""
    given = [torch.tensor([1e8, 3.0]), torch.tensor([1.0, 4.0])]
    assert total(given).problem(torch.tensor([1e8, 7.0])) is None
    assert total(given).problem(torch.tensor([1e8, 8.0])) == "8.0 instead of 7.0 at 1, 1 of 2 wrong"
    assert total(given).problem(torch.tensor([1e8, float("nan")])) is not None
    assert total(given).problem(torch.tensor([1e8])) is not None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_value_of_any_collective_is_noticed(case: CommCase) -> None:
    given = case.given(SIZE)
    results = [[each.value for each in case.want(given, rank, first_to_last)] for rank in range(SIZE)]
    assert case.problems(Crew(size=SIZE, run=lambda work: [*results])) == []
    for rank, values in enumerate(results):
        for index, value in enumerate(values):
            wrong = value + 100 if value.numel() else value.new_ones(1)
            spoiled = [*results]
            spoiled[rank] = [*values[:index], wrong, *values[index + 1 :]]
            (problem,) = case.problems(Crew(size=SIZE, run=lambda work, got=spoiled: got))  # type: ignore[misc]
            assert f"rank {rank} gets" in problem


def test_threads_have_read_a_shard_before_its_owner_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an update does right behind the last gather, if only the loss needs what is gathered."""
    take = World.take

    def take_late(world: World, name: str, sender: int, receiver: int) -> Tensor:
        value = take(world, name, sender, receiver)
        sleep(0.02 * (receiver == 1))
        return value

    monkeypatch.setattr(World, "take", take_late)
    world = World(PLANS, TIMEOUT)

    def work(device: int) -> list[float]:
        shard, out = torch.full((2,), float(device)), torch.empty(2 * SIZE)
        world.member(device).group("all").all_gather(shard, out)
        shard.fill_(-1.0)
        return out.tolist()

    with ThreadPoolExecutor(SIZE) as threads:
        gathered = [*threads.map(work, range(SIZE))]
    assert gathered == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * SIZE


def test_stopping_a_world_ends_every_wait() -> None:
    """Those that wait now, two of them on one pipe, and those that come later."""
    world = World(PLANS, timeout=2)
    with ThreadPoolExecutor(2) as threads:
        pipe = world.member(0).incoming("ring")
        waiting = [threads.submit(pipe.recv, Form((), torch.float32)) for _ in range(2)]
        world.stop()
        for wait in (
            waiting[0].result,
            waiting[1].result,
            lambda timeout: pipe.recv(Form((), torch.float32)),
        ):
            with pytest.raises(CommError) as caught:
                wait(timeout=5)
    assert str(caught.value) == "device 0 stops waiting on ring for device 3: a worker has failed"
