"""Ranks end with their test: one that runs out of time leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.family import MARK, Family, family, wait_for

ROOT = Path(__file__).parents[2]
SLEEP = "import os, pathlib, time; pathlib.Path('rank' + os.environ['RANK']).touch(); time.sleep(300)"
LAUNCHER = f"""
import os, subprocess, sys, time
for rank in "01":  # as torchrun does it: a session for each
    environment = {{**os.environ, "RANK": rank}}
    subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env=environment, start_new_session=True)
time.sleep(300)
"""
STUCK = f"""
import sys, time
from pathlib import Path
import pytest
from tests.workers.family import family

@pytest.mark.timeout(6)
def test_stuck():
    with family() as ranks:
        ranks.mark = "{{mark}}"
        process = ranks.start([sys.executable, "-c", {LAUNCHER!r}], fresh=True)
        process.communicate(timeout=200)
"""


def test_those_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    with pytest.raises(KeyboardInterrupt), family() as ranks:
        launcher = ranks.start([sys.executable, "-c", LAUNCHER], folder=tmp_path)
        wait_for(files, 30)
        assert len(ranks.members()) == 3
        raise KeyboardInterrupt
    assert ranks.members() == []
    assert launcher.returncode == -signal.SIGKILL


def test_those_whose_launcher_was_killed_end_too(tmp_path: Path) -> None:
    with family() as ranks:
        launcher = ranks.start([sys.executable, "-c", LAUNCHER], folder=tmp_path)
        wait_for([tmp_path / "rank0", tmp_path / "rank1"], 30)
        launcher.kill()
        launcher.wait(10)
        assert len(ranks.members()) == 2, "nothing leads from it to its ranks any more"
    assert ranks.members() == []


def test_a_test_that_runs_out_of_time_leaves_nothing(tmp_path: Path) -> None:
    """Pytest's own limit ends the inner test on purpose."""
    stuck = Family()
    file = tmp_path / "test_stuck.py"
    file.write_text(STUCK.replace("{mark}", stuck.mark), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            file.name,
        ],
        env={**{k: v for k, v in os.environ.items() if k != MARK}, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert "Timeout" in done.stdout and done.returncode == 1, done.stdout
    assert (tmp_path / "rank0").exists() and (tmp_path / "rank1").exists(), "they had started"
    assert stuck.members() == []
