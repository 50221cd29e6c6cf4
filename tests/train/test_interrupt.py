"""Signals that ask a run to stop: the first is heard after the step, a second Ctrl-C ends it at once."""

import signal
import time
from pathlib import Path

import pytest

from piper.train.interrupt import PreemptedError, interrupts, preemptible
from tests.train.conftest import Piper


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_the_first_asks_and_the_second_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    heard: list[str] = []
    with interrupts(lambda *_: heard.append("asked")) as stopping:
        assert not stopping()
        signal.raise_signal(number)
        assert stopping() and heard == ["asked"] and not stopping.preempted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert heard == ["asked"]


def test_a_preemption_may_be_heard_twice() -> None:
    before = signal.getsignal(signal.SIGTERM)
    heard: list[int] = []
    with interrupts(heard.append) as stopping:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping() and stopping.preempted and heard == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_preemption_ends_when_its_time_is_over() -> None:
    with interrupts(lambda number: None, grace=0.2) as stopping, pytest.raises(PreemptedError):
        began = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        assert stopping.preempted
        while time.monotonic() < began + 60:
            time.sleep(60)
    assert 0.2 <= time.monotonic() - began < 40


def test_a_preemption_in_time_ends_nothing() -> None:
    with interrupts(lambda number: None, grace=0.1):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(0.2)


def test_a_preemption_before_the_first_step_ends_now_and_once() -> None:
    with preemptible():
        with pytest.raises(PreemptedError):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_preempted_while_it_compiles(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        recipe.read_text() + "\ndef early():\n    signal.raise_signal(signal.SIGTERM)\n"
    )
    done = piper("early.py:early", "--out", "run")
    assert done.returncode == 75
    assert done.stderr == "preempted; --resume goes on from the newest checkpoint, if any\n"


def test_a_run_needs_some_time_to_save(piper: Piper, recipe: Path) -> None:
    done = piper(f"{recipe}:single", "--grace", "0")
    assert done.returncode == 2
    assert (
        done.stderr == "error: piper train: --grace 0\n  hint: give a run some seconds to save: --grace 30\n"
    )
