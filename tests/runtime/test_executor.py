"""Lanes of one device wait for each other, and stop when one of them fails."""

from collections.abc import Callable
from contextlib import closing
from time import monotonic

import pytest

from piper.plan.instr import Instr
from piper.plan.plan import Plan
from piper.runtime.comm.base import CommError
from piper.runtime.executor import Executor


def two_lanes(first: Callable[[], None], timeout: float = 60.0) -> Executor:
    """A lane whose instruction signals, and one that waits for the signal."""
    instrs = (
        Instr(op="compute", node="one", stream="compute", signals=0),
        Instr(op="gather", node="two", stream="gather", waits=(0,)),
    )
    plan = Plan(devices=(0,), instrs=instrs, slots={}, residents={})
    return Executor(plan, [first, lambda: None], [], {}, device=0, timeout=timeout)


def test_the_error_of_a_lane_is_raised_and_the_others_stop_soon() -> None:
    """A recovery begins when every lane has stopped."""

    def fail() -> None:
        raise ZeroDivisionError

    with closing(two_lanes(fail)) as executor:
        began = monotonic()
        with pytest.raises(ZeroDivisionError) as error:
            executor.run()
        assert monotonic() - began < 10  # not the timeout
        assert error.value.__notes__ == [
            "on device 0, at the arrow:\n-->     0  compute        one\n        1  gather         two"
        ]


def test_a_signal_that_never_comes_is_an_error() -> None:
    with closing(two_lanes(lambda: None, timeout=0.0)) as executor:
        executor.lanes[0].clear()  # the lane that would signal
        with pytest.raises(CommError, match="waited 0 s for another stream"):
            executor.run()
