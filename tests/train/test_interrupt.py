"""Signals that ask a run to stop: the first is heard after the step, the second ends it at once."""

import signal

import pytest

from piper.train.interrupt import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_first_asks_and_the_second_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    heard: list[str] = []
    with interrupts(lambda *_: heard.append("asked")) as stopping:
        assert not stopping()
        signal.raise_signal(number)
        assert stopping() and heard == ["asked"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert heard == ["asked"]
