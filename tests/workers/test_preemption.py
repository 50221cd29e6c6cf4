"""SIGTERM to any process of a run: the driver hears of it, saves and exits with 75."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from piper.workers.messages import CODEC, Leaving
from piper.workers.processes import ClosedError, Termination
from piper.workers.serve import WorkerServer, serve
from piper.workers.transport.channel import Channel
from tests.workers.family import Family, command_of, family
from tests.workers.test_torchrun import BOUND, ENVIRONMENT, command

RECIPE = """
import time
from dataclasses import replace
import piper
from tests.workers.ranks import CELL
from tests.runtime.grid import batches, job

def slow():
    def data():
        while True:
            for batch in batches(CELL, 3):
                time.sleep(0.02)
                yield batch
    saved = piper.Checkpoint(folder="checkpoints", every=100000)
    return replace(job(CELL, data=data, steps=100000), checkpoint=saved)
"""


class Answers:
    """A worker that answers calls with their argument."""

    def answer(self, call: str, argument: object) -> object:
        return argument


def test_a_worker_passes_on_once_that_it_is_to_end() -> None:
    here, there = socket.socketpair()
    termination = Termination()
    driver, worker = Channel(here, 10.0, codec=CODEC), Channel(there, codec=CODEC)

    def until_the_driver_is_gone() -> None:
        with suppress(ClosedError):
            serve(worker, cast(WorkerServer, Answers()), termination)

    served = threading.Thread(target=until_the_driver_is_gone, daemon=True)
    served.start()
    assert driver.recv() is None
    driver.send(("poll", 1.0))
    assert driver.recv() == 1.0
    termination._note(signal.SIGTERM, None)
    for number, heard in ((2.0, [Leaving(), 2.0]), (3.0, [3.0])):
        driver.send(("poll", number))
        assert [driver.recv() for _ in heard] == heard
    driver.close()
    served.join(10)


def test_a_process_that_notes_the_signal_lives() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination()
    try:
        termination.install()
        signal.raise_signal(signal.SIGTERM)
        assert (termination.news(), termination.news()) == (True, False)
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_steps(process: subprocess.Popen[str], metrics: Path, steps: int) -> None:
    until = time.monotonic() + BOUND
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)


def ranks_of(members: Family, module: str) -> dict[str, int]:
    """The processes of a family that run a module, by their rank."""
    found: dict[str, int] = {}
    for pid in members.members():
        with suppress(OSError):  # it has just ended
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            ranks = [item.removeprefix("RANK=") for item in environment if item.startswith("RANK=")]
            if ranks and module.encode() in command_of(pid).split(b"\0"):
                found[ranks[0]] = pid
    return found


def assert_saved(out: Path) -> None:
    """The last step that was reported is in a complete checkpoint."""
    from piper.checkpoint.folder import verify

    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    (saved,) = (out / "checkpoints").iterdir()
    assert saved.name == f"step-{steps[-1]:08}"
    assert verify(saved).step == steps[-1]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["driver", "worker", "all"])
def test_a_local_run(tmp_path: Path, who: str) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    words = ["-m", "piper", "train", "recipe.py:slow", "--out", "run", "--on", "local"]
    with family() as members:
        driver = members.start([sys.executable, *words], env=ENVIRONMENT, folder=tmp_path)
        wait_for_steps(driver, tmp_path / "run" / "metrics.jsonl", 3)
        chosen = {"driver": [driver.pid], "all": members.members()}.get(who) or [max(members.members())]
        for pid in chosen:
            os.kill(pid, signal.SIGTERM)
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 75, err
    assert err.startswith("preempted after step ")
    assert_saved(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("who", ["torchrun", "rank 1", "all"])
def test_ranks_of_torchrun(tmp_path: Path, who: str) -> None:
    """torchrun passes the signal on to every rank. A machine that goes away may signal its own ranks only."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    words = command("-m", "piper", "train", "recipe.py:slow", "--out", "run")
    with family() as members:
        agent = members.start(words, env=ENVIRONMENT, folder=tmp_path)
        wait_for_steps(agent, tmp_path / "run" / "metrics.jsonl", 3)
        ranks = ranks_of(members, "train")
        assert sorted(ranks) == ["0", "1"]
        chosen = {"torchrun": [agent.pid], "rank 1": [ranks["1"]], "all": members.members()}[who]
        for pid in chosen:
            os.kill(pid, signal.SIGTERM)
        _, err = agent.communicate(timeout=60)
    assert "preempted after step " in err, err
    assert_saved(tmp_path / "run")


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("who", ["driver", "worker"])
def test_a_run_on_ray(tmp_path: Path, who: str) -> None:
    pytest.importorskip("ray")
    (tmp_path / "recipe.py").write_text(RECIPE)
    words = ["-m", "piper", "train", "recipe.py:slow", "--out", "run", "--on", "ray"]
    with family() as members:
        driver = members.start([sys.executable, *words], env=ENVIRONMENT, folder=tmp_path, fresh=True)
        wait_for_steps(driver, tmp_path / "run" / "metrics.jsonl", 3)
        workers = members.forked("fork_server")
        assert len(workers) == 2
        os.kill(driver.pid if who == "driver" else workers[1], signal.SIGTERM)
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 75, err
    assert_saved(tmp_path / "run")
