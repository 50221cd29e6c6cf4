"""The recorder: which steps it keeps, what it tells apart, and clocks that are not the same."""

from itertools import pairwise
from time import monotonic, sleep

import pytest
import torch

from piper.plan.instr import Instr
from piper.runtime.recorders import WARM, ClockOffset, Recorder, compare

LOAD = Instr(op="load", node="load", stream="load")


def test_the_first_steps_pass_and_the_next_are_recorded() -> None:
    recorder = Recorder(3, 2, torch.device("cpu"))
    calls: list[int] = []
    watched = [recorder.watch(place, LOAD, lambda place=place: calls.append(place)) for place in range(2)]  # type: ignore[misc]
    for _ in range(WARM + 4):
        for run in watched:
            run()
    found = recorder.take()
    assert len(calls) == 2 * (WARM + 4)
    assert (found.device, len(found.steps)) == (3, 2)
    assert all(len(step) == 2 for step in found.steps)
    for first, second in found.steps:
        assert first[0] <= first[1] <= second[0] <= second[1]


def test_a_step_that_is_not_complete_is_left_out() -> None:
    recorder = Recorder(0, 5, torch.device("cpu"))
    first, second = (recorder.watch(place, LOAD, lambda: None) for place in range(2))
    for _ in range(WARM + 1):
        first()
        second()
    first()
    assert len(recorder.take().steps) == 1


def test_waiting_is_told_apart_from_computing() -> None:
    recorder = Recorder(0, 1, torch.device("cpu"))
    watched = recorder.watch(0, LOAD, lambda: sleep(0.02))
    for _ in range(WARM + 1):
        watched()
    ((start, end, busy),) = recorder.take().steps[0]
    assert end - start >= 0.02
    assert busy < 0.01


def test_a_failure_is_not_swallowed() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    watched = Recorder(0, 1, torch.device("cpu")).watch(0, LOAD, fail)
    with pytest.raises(RuntimeError, match="no"):
        watched()


def test_the_offset_of_a_clock_is_known_to_within_half_a_round_trip() -> None:
    found = compare(lambda: monotonic() + 100)
    assert found.error < 0.1
    assert abs(found.offset - 100) <= found.error + 1e-6
    assert ClockOffset(offset=1.0, error=0.5) == ClockOffset(offset=1.0, error=0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_spans_on_an_accelerator_lie_on_the_host_clock() -> None:
    accelerator = torch.device("cuda", 0)
    recorder = Recorder(0, 1, accelerator)
    a = torch.ones(2048, 2048, device=accelerator)

    def multiply() -> None:
        torch.mm(a, a)

    watched = [recorder.watch(place, LOAD, multiply) for place in range(3)]
    for _ in range(WARM + 1):
        begin = monotonic()
        for run in watched:
            run()
    (step,) = recorder.take().steps
    end = monotonic()
    for before, after in pairwise(step):
        assert before[0] < before[1] <= after[0] + 1e-5
    assert begin - 1e-3 <= step[0][0] and step[-1][1] <= end + 1e-3
