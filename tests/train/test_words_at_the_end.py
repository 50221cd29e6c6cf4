"""What a run says of itself when it is over, and when its workers' clocks are not the driver's."""

from pathlib import Path

import pytest

from piper.runtime.recorders import ClockOffset, DeviceProfile, compare
from piper.train.measure import Measure, Outcome, ending, track_of


def measure(step: int, loss: float) -> Measure:
    return Measure(
        step=step, loss=loss, grad_norm=1.0, lr=0.1, tokens_per_s=1.0, samples_per_s=1.0, step_s=2.0
    )


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (4.0, 1.0, "loss 4.0000 -> 1.0000 (75 % lower)"),
        (4.0, 5.0, "loss 4.0000 -> 5.0000 (25 % higher)"),
        (0.0, 5.0, "loss 0.0000 -> 5.0000 (0 % lower)"),
    ],
)
def test_a_loss_that_fell_or_rose(first: float, last: float, said: str) -> None:
    outcome = Outcome(
        folder=Path("run"),
        done=3,
        steps=3,
        saved=False,
        seconds=6.0,
        first=measure(2, first),
        last=measure(3, last),
    )
    assert ending(outcome).splitlines()[0] == f"Trained 2 steps in 6 s: {said}"


def test_times_of_a_worker_whose_clock_is_ahead_are_set_back() -> None:
    recording = DeviceProfile(device=1, steps=(((10.0, 11.0, 0.5),), ((12.0, 12.5, 0.25),)))
    track = track_of(recording, ClockOffset(offset=4.0, error=0.125))
    assert track.steps == (((6.0, 7.0, 0.5),), ((8.0, 8.5, 0.25),))
    assert (track.device, track.error) == (1, 0.125)


def test_a_clock_is_read_half_way_through_the_shortest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round trips of 4 s and 2 s: in the shorter one the other clock said 51 at 11."""
    times = iter([0.0, 4.0, 10.0, 12.0])
    said = iter([44.0, 51.0])
    monkeypatch.setattr("piper.runtime.recorders.monotonic", lambda: next(times))
    assert compare(lambda: next(said), tries=2) == ClockOffset(offset=40.0, error=1.0)
