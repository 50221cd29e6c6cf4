"""The folder of a state that moves: nothing of it stays, whoever is killed."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from piper.run.elastic import MOVED, MovingStates, locked_folder, remove_left, try_lock
from tests.run import test_elastic as elastic

ROOT = Path(__file__).parents[2]
BOUND = 60.0  # seconds in which a process does what it is about to do
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from piper.run.elastic import MovingStates
states = MovingStates()
(states.path / "moved").mkdir()
(states.path / "moved" / "state").write_text("half")
print(json.dumps([os.getpid(), states.remover.pid, str(states.path)]), flush=True)
signal.pause()
"""


@dataclass(frozen=True)
class Killed:
    """A driver that has moved half of a state."""

    driver: int
    remover: int
    path: Path

    def kill(self, *processes: int) -> None:
        for process in processes:
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def one() -> Iterator[Killed]:
    words, env = [sys.executable, "-c", PROGRAM], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        driver, remover, path = json.loads(started.stdout.readline())
        made = Killed(driver, remover, Path(path))
        assert [*made.path.glob("*/state")]
        yield made
        started.kill()
    if "piper" in command(made.remover):
        os.kill(made.remover, signal.SIGKILL)


def command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def eventually(met: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)


def locked(path: Path) -> bool:
    with try_lock(path) as lock:
        return lock is None


def test_nothing_is_left_where_a_driver_is_killed(one: Killed) -> None:
    remove_left(one.path.parent)
    assert locked(one.path) and (one.path / "moved" / "state").exists(), "its run lives"
    one.kill(one.driver)
    eventually(lambda: not one.path.exists())
    eventually(lambda: not command(one.remover))


def test_what_is_left_when_both_are_killed_goes_with_the_next_start(one: Killed) -> None:
    one.kill(one.remover, one.driver)
    eventually(lambda: not locked(one.path))
    assert one.path.exists()
    states = MovingStates()
    assert not one.path.exists() and states.path.exists()
    other = MovingStates()
    assert states.path.exists(), "its run lives"
    for made in (states, other):
        made.close()
        made.close()
        assert not made.path.exists() and not command(made.remover.pid)


@pytest.mark.parametrize("when", ["open", "flock"])
def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another run takes it for one that was left: before it is opened, or between that and the lock."""
    removed: list[Path] = []
    owner: object = {"open": os, "flock": fcntl}[when]
    act = getattr(owner, when)

    def late(*given: object) -> object:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        return act(*given)

    monkeypatch.setattr(owner, when, late)
    path, lock = locked_folder(tmp_path)
    assert [*tmp_path.iterdir()] == [path] != removed and locked(path)
    os.close(lock)
    assert not locked(path)


RECIPE = (
    elastic.RECIPE
    + """
from piper.run.elastic import ElasticRecovery
move = ElasticRecovery._move
def kill(self, state, *given):
    assert list(state.iterdir())
    print(state, flush=True)
    os.kill(os.getpid(), 9)
ElasticRecovery._move = kill
"""
)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_driver_is_killed_in_a_resize(tmp_path: Path) -> None:
    before = elastic.memory()
    (tmp_path / "net.py").write_text(
        RECIPE.replace("RUN", "run").replace("KILLS", "False").replace("SIZES", '{3: "2"}')
    )
    words = [sys.executable, "-m", "piper", "train", "net.py:job", "--on", "local", "--out", "run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert MOVED in done.stdout
    eventually(lambda: elastic.memory() <= before)
