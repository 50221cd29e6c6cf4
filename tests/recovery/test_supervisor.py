"""A supervisor runs drivers in processes of their own: answers, ends, signals, and one that is killed again."""

import json
import os
import random
import signal
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from piper.compiler import Program
from piper.launchers.processes import gone
from piper.recovery.journal import Note, Progress
from piper.recovery.supervisor import Supervisor
from piper.train.supervised import supervises
from tests.launchers.family import command_of, family
from tests.train.test_kill import RECIPE

ROOT = Path(__file__).parents[2]


def test_what_a_driver_returns() -> None:
    ended = Supervisor().run(lambda: b"done")
    assert (ended.code, ended.answer) == (0, b"done") and ended.process != os.getpid()


def leave() -> bytes:
    sys.exit(7)


def crash() -> bytes:
    os.kill(os.getpid(), signal.SIGUSR1)
    return b"never"


def test_how_a_driver_ends() -> None:
    assert Supervisor().run(leave).code == 7
    ended = Supervisor().run(crash)
    assert (ended.code, ended.answer) == (-signal.SIGUSR1, b"")


def test_what_a_driver_raises_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> bytes:
        sys.stderr = os.fdopen(2, "w")
        raise RuntimeError("broken")

    assert Supervisor().run(fail).code == 1
    assert capfd.readouterr().err.endswith("RuntimeError: broken\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_and_the_handlers_are_those_before(number: signal.Signals) -> None:
    """The driver gets the handlers that were there before, and so does the supervisor afterwards."""
    seen: list[int] = []

    def wait() -> bytes:
        os.kill(os.getppid(), number)
        while not seen:
            time.sleep(0.01)
        return str(seen[0]).encode()

    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        supervisor = Supervisor()
        ended = supervisor.run(wait)
        assert ended.answer == str(int(number)).encode() and supervisor.asked and seen == []
        assert supervisor.preempted == (number == signal.SIGTERM)
    finally:
        signal.signal(number, before)


def test_a_signal_between_two_drivers_is_for_the_next_one() -> None:
    """Which gets it when it is ready. One that has ended does not, even if nobody has seen that yet."""
    seen: list[int] = []

    def wait() -> bytes:
        assert seen == []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        while not seen:
            time.sleep(0.01)
        return b"heard"

    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("it is not passed on"))
    ended = os.fork()
    if not ended:
        os._exit(0)
    try:
        supervisor = Supervisor()
        with supervisor.passing():
            assert supervisor.run(crash).code == -signal.SIGUSR1
            until = time.monotonic() + 60
            while not gone(ended):
                assert time.monotonic() < until
            supervisor.process = ended
            signal.raise_signal(signal.SIGTERM)
            supervisor.process = None
            assert supervisor.pending == [signal.SIGTERM] and not supervisor.asked
            found = supervisor.run(wait, held=True)
        assert (found.code, found.answer) == (0, b"heard")
        assert supervisor.asked and supervisor.preempted and supervisor.pending == []
    finally:
        signal.signal(signal.SIGTERM, before)
        os.waitpid(ended, 0)


def test_a_driver_may_compute_on_several_threads() -> None:
    """OpenMP's threads of a process that was forked are gone. A fork of a new thread starts others."""

    def compute() -> bytes:
        torch.set_num_threads(2)
        return str(float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())).encode()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.ones(400, 400) @ torch.ones(400, 400)).sum()
        assert Supervisor().run(compute).answer == b"64000000.0"
    finally:
        torch.set_num_threads(before)


def test_a_driver_ends_with_its_supervisor(tmp_path: Path) -> None:
    def wait() -> bytes:
        (tmp_path / "driver").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(300)
        return b"never"

    assert Supervisor().run(lambda: Supervisor().run(wait).answer).code == -signal.SIGKILL
    driver, until = Path("/proc") / (tmp_path / "driver").read_text(), time.monotonic() + 60
    while driver.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_driver_that_prints_into_memory_is_not_forked() -> None:
    """Only this process could read it."""
    program = cast(Program, SimpleNamespace(device="cpu"))
    assert not supervises("local", program, StringIO())


def progress(done: int) -> Progress:
    return Progress(
        done=done, ended=False, left=3, results={}, options={}, layout=None, saving=None, states=None
    )


def test_a_note_that_is_not_complete_is_not_there() -> None:
    note = Note()
    assert note.read() is None
    for done in (1, 2):
        note.write(progress(done))
        assert note.read() == progress(done)
    os.pwrite(note.files[0], bytes(8), 0)  # as a driver leaves the third that is killed while it writes
    assert note.read() == progress(1)
    note.close()


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_twenty_drivers_are_killed(tmp_path: Path) -> None:
    """At random moments, in starts and recoveries too: the curve of a run that was never killed."""
    (tmp_path / "net.py").write_text(RECIPE.replace("STEPS", "80"))
    words = [sys.executable, "-m", "piper", "train", "net.py:job", "--on", "local", "--retries", "30"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    memory = {path.name for path in Path("/dev/shm").iterdir()}
    rng, kills = random.Random(4), 0
    with family() as members:
        run = members.start([*words, "--out", "killed"], env=env, folder=tmp_path)
        while kills < 20 and run.poll() is None:
            time.sleep(rng.choice([0.0, 0.3, 1.5]) * rng.random())
            drivers = [pid for pid in members.members() if pid != run.pid and is_driver(pid)]
            if drivers and (kills or told(tmp_path / "killed")):
                os.kill(drivers[0], signal.SIGKILL)
                kills += 1
                until = time.monotonic() + 60
                while is_driver(drivers[0]) and time.monotonic() < until:
                    time.sleep(0.01)
        _, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
    assert kills == 20
    with family() as members:
        whole = members.start([*words, "--out", "whole"], env=env, folder=tmp_path)
        assert whole.communicate(timeout=100)[1] == "" and whole.returncode == 0
    assert told(tmp_path / "killed") == told(tmp_path / "whole")
    assert [step for step, *_ in told(tmp_path / "killed")] == [*range(1, 81)]
    events = [json.loads(line) for line in (tmp_path / "killed" / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "failure" for event in events) == 20
    assert {event["event"] for event in events} == {"failure", "recovery"}, "no repeated step differs"
    seconds = [event["seconds"] for event in events if event["event"] == "recovery"]
    sys.stdout.write(f"recoveries: {sorted(seconds)}\n")
    assert {path.name for path in Path("/dev/shm").iterdir()} - memory == set()


def is_driver(pid: int) -> bool:
    return b"net.py:job" in command_of(pid)


def told(out: Path) -> list[tuple[int, float, float, float]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in found]
