"""The suite of communicators on 2, 3 and 4 ranks of one GPU that use NCCL."""

import time
from collections.abc import Iterator, Mapping

import pytest
import torch

from piper.runtime.comm.base import Comms
from piper.selftest.comm_cases import all_reduce
from piper.selftest.rank_process import Crew, Processes
from tests.gpu.ranks import DEVICE, MARKS, ON_GPU, rank_forks
from tests.runtime.test_comm import (
    test_a_collective_gives_what_it_must,  # noqa: F401  it runs here too, with the ranks of this module
)

SIZES = (2, 3, 4)
TIMEOUT = 30.0  # seconds of one communication
pytestmark = [*MARKS, pytest.mark.timeout(300), pytest.mark.xdist_group("ranks-comm")]


@pytest.fixture(scope="module")
def processes(clients: Mapping[str, str]) -> Iterator[Processes]:
    with rank_forks(clients, "tests.gpu.rank_comm_process") as forks:
        started = Processes(forks, max(SIZES), bound=90.0, kind=DEVICE)
        yield started
        started.close()


@pytest.fixture(scope="module", params=SIZES)
def crew(request: pytest.FixtureRequest, processes: Processes) -> Crew:
    """Ranks that keep their communicators from test to test, because NCCL takes seconds to make them."""
    return processes.crew(request.param, TIMEOUT, keep=True)


def test_sums_are_the_same_every_time(crew: Crew) -> None:
    """Recovery compares repeated steps to the bit."""
    given, device_of = all_reduce(torch.float32, 10_001).given(crew.size), crew.place

    def work(device: int, comms: Comms) -> list[torch.Tensor]:
        return [comms.group("all").all_reduce(given[device].to(device_of)).cpu() for _ in range(5)]

    for sums in crew.run(work):
        assert isinstance(sums, list)
        assert all(torch.equal(total, sums[0]) for total in sums)


@pytest.mark.skipif(not ON_GPU, reason="on hosts a wait ends by itself")
@pytest.mark.parametrize("size", SIZES)
def test_a_wait_for_nobody_ends_when_it_is_aborted(processes: Processes, size: int) -> None:
    """The second rank does not come. The others abort, and their streams go on."""

    def work(device: int, comms: Comms) -> float:
        value = torch.ones(1000, device="cuda")
        comms.group("all").all_reduce(value)
        torch.cuda.synchronize()
        if device == 1:
            time.sleep(3)  # its process must not end before the others have aborted
            return 0.0
        comms.group("all").all_reduce(value)
        done = torch.cuda.Event()
        done.record()
        time.sleep(1)
        assert not done.query(), "nobody can have added the second rank's values"
        began = time.monotonic()
        comms.abort()
        torch.cuda.synchronize()
        return time.monotonic() - began

    took = processes.crew(size, TIMEOUT).run(work)
    processes.close()  # what was aborted is of no more use
    assert all(isinstance(seconds, float) and seconds < 20 for seconds in took), took
