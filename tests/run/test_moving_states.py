"""The folder of a state that moves: nothing of it stays, whoever is killed."""

import errno
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

from piper.run.elastic import MOVED
from piper.workers import processes
from piper.workers.processes import folder_for_now, remove_left
from tests.run import test_elastic as elastic

ROOT = Path(__file__).parents[2]
BOUND = 60.0  # seconds in which a process does what it is about to do
PROGRAM = """
import json, os, signal
from piper.workers.processes import folder_for_now
with folder_for_now("piper-resize-") as path:
    (path / "moved").mkdir()
    (path / "moved" / "state").write_text("half")
    print(json.dumps([os.getpid(), str(path)]), flush=True)
    signal.pause()
"""


@dataclass(frozen=True)
class Killed:
    """A driver that has moved half of a state."""

    driver: int
    path: Path


@pytest.fixture
def one() -> Iterator[Killed]:
    words, env = [sys.executable, "-c", PROGRAM], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        driver, path = json.loads(started.stdout.readline())
        made = Killed(driver, Path(path))
        assert [*made.path.glob("*/state")]
        yield made
        started.kill()


def eventually(met: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_nothing_is_left_where_a_driver_is_killed(one: Killed) -> None:
    assert (one.path / "moved" / "state").exists(), "its run lives"
    os.kill(one.driver, signal.SIGKILL)
    eventually(lambda: not one.path.exists())


def test_nothing_is_left_after_a_block() -> None:
    with folder_for_now("piper-resize-") as path, folder_for_now("piper-resize-") as other:
        (path / "state").write_text("whole")
        assert path != other
    assert not path.exists() and not other.exists()


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MOVED}left" / "moved").mkdir(parents=True)
    left = tmp_path / f"{MOVED}left"
    with folder_for_now(MOVED, tmp_path) as path:
        remove_left(MOVED, tmp_path)
        assert left.is_dir(), "it may be about to be locked"
        monkeypatch.setattr(processes, "time", lambda: time.time() + 100)
        remove_left(MOVED, tmp_path)
        assert not left.exists() and path.is_dir()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state moves there too. What another process has left stays: it may live."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = tmp_path / f"{MOVED}left"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    remove_left(MOVED, tmp_path)
    with folder_for_now(MOVED, tmp_path) as path:
        assert path.is_dir() and left.is_dir()
    assert [*tmp_path.iterdir()] == [left]


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
