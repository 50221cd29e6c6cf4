"""Calls made at the same time, in forked processes."""

import os
import signal
import time
from multiprocessing.connection import wait

import pytest

from piper.errors import WorkerError
from piper.tuning.forked_calls import ForkedCall, run_together
from tests.warm import children


def none_is_left() -> bool:
    """Whether this process has no child, but for the warm one of the tests."""
    return not children()


def raises() -> int:
    raise ValueError("no")


def interrupted() -> int:
    raise KeyboardInterrupt


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_results_come_in_order_each_from_its_own_process() -> None:
    first, second, third = run_together([os.getpid, os.getpid, lambda: 3])
    assert first == os.getpid()
    assert second != first
    assert third == 3
    assert none_is_left()


def test_a_result_larger_than_a_pipe() -> None:
    assert run_together([lambda: b"", lambda: b"x" * 300_000]) == [b"", b"x" * 300_000]


def test_an_exception_in_a_process_is_left_to_a_second_call() -> None:
    assert run_together([lambda: 1, raises, lambda: 3]) == [1, None, 3]
    with pytest.raises(ValueError, match="no"):
        run_together([raises, lambda: 2])
    assert none_is_left()


def test_ctrl_c_ends_the_processes() -> None:
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_together([interrupted, lambda: time.sleep(600)])
    assert time.monotonic() - begun < 300
    assert none_is_left()


def test_a_process_that_is_killed() -> None:
    with pytest.raises(WorkerError) as error:
        run_together([lambda: 1, killed, lambda: time.sleep(600)])
    assert str(error.value) == (
        "tune: a process that evaluated a candidate was killed by SIGKILL\n"
        "  hint: often for want of memory: try --workers 1, or tune(..., workers=1)"
    )
    assert none_is_left()


def test_the_first_call_that_has_a_result() -> None:
    def sleep() -> int:
        time.sleep(600)
        return 1

    slow, quick = ForkedCall(sleep), ForkedCall(lambda: 2)
    assert wait([slow.result_file.fileno(), quick.result_file.fileno()]) == [quick.result_file.fileno()]
    assert quick.result() == 2
    for call in (slow, quick):
        call.end()
    assert none_is_left()
