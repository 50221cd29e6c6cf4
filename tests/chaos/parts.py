"""Disturb runs at random moments, one way after another, and compare each with a run that nothing disturbed."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from piper.checkpoint.folder import verify
from piper.compiler import compile
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run_events import Event
from piper.runtime.worker import Options
from piper.train.train_options import sizes_of
from piper.workers.results import StepResult
from tests.run import test_elastic
from tests.run.test_recovery import SHARDED, Killer, shared_memory
from tests.runtime.grid import batches, compiled
from tests.workers.family import MARK, Family, family
from tests.workers.sabotage import Sabotaged, SleepOnce
from tests.workers.test_max_restarts import written
from tests.workers.test_preemption import ranks_of
from tests.workers.test_torchrun import ENVIRONMENT, command

BOUND = 240.0  # seconds that a process may take to start, to train some steps or to end
STALL = 3.0  # seconds after which a hang has failed
LINGER = 10.0  # seconds in which processes that have lost their driver end
RECIPE = """
import time
from dataclasses import replace
import piper
from tests.workers.ranks import CELL
from tests.runtime.grid import batches, job as made

class Slow(piper.data.Samples):
    def collect(self, samples):
        time.sleep(0.05)
        return super().collect(samples)

def job():
    rows = [dict(zip(batch, row)) for batch in batches(CELL, 8) for row in zip(*batch.values())]
    size = len(next(iter(batches(CELL, 1)[0].values())))
    found = made(CELL, data=lambda: Slow(rows, batch=size, seed=3), steps=STEPS)
    return replace(found, checkpoint=piper.Checkpoint(folder="checkpoints", every=50))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How often a part disturbs its run."""

    events: int
    until: float  # by `time.monotonic`: no event begins later
    seed: int
    members: Family  # of which every process is that a part starts

    def numbers(self) -> Iterator[int]:
        """Yield the number of each event, until there were enough or the time is over."""
        for number in range(self.events):
            if number and time.monotonic() > self.until:
                return
            yield number


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a part has seen."""

    events: int = 0
    recovered: int = 0
    seconds: list[float] = field(default_factory=list)  # from an event to the next step, or to the end
    warm: list[float] = field(default_factory=list)  # until the agent of a machine that joined was warm
    identical: bool = False
    orphans: int = 0
    left: list[str] = field(default_factory=list)  # in shared memory

    def sound(self) -> bool:
        """Return whether every event was recovered from, and nothing was left behind."""
        return self.recovered == self.events > 0 and self.identical and not self.orphans and not self.left


Part = Callable[[Asked], Seen]


def measure(part: Part, *, events: int, minutes: float, seed: int) -> Seen:
    """Return what a part has seen, with the processes and the memory that it left behind."""
    before = shared_memory()
    with family() as members, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, MARK, members.mark)
        until = time.monotonic() + 60 * minutes
        seen = part(Asked(events=events, until=until, seed=seed, members=members))
        last = time.monotonic() + LINGER
        while members.members() and time.monotonic() < last:
            time.sleep(0.05)
        seen.orphans = len(members.members())
    seen.left = sorted(shared_memory() - before)
    return seen


# --- Workers of a run in this process.


class Signals(Killer):
    """Sends signals from threads, while workers end and start."""

    def send(self, number: signal.Signals = signal.SIGKILL, among: int = 1) -> None:
        pids, hit = self.pids(), 0
        for pid in self.rng.sample(pids, min(among, len(pids))):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                hit += 1
        if hit:
            self.sent.append(time.monotonic())


def signalled(number: signal.Signals, asked: Asked) -> Seen:
    """Signal a worker during every fourth step. A tenth of SIGKILLs is for two at once, a tenth in recoveries."""
    rng, given, seen = Random(asked.seed), batches(SHARDED, 50), Seen()
    events: list[Event] = []
    results: list[StepResult] = []
    with recovering(compiled(SHARDED), "local", Options(), retries=10**6, notify=events.append) as run:
        signals, timers = Signals(run, rng), list[threading.Timer]()

        def train(count: int) -> None:
            for _ in range(count):
                known = recoveries(events)
                results.append(run.step(given[len(results) % len(given)]))
                if recoveries(events) > known:
                    count_recovered(seen, signals.sent)

        def later(seconds: float, among: int) -> None:
            timers.append(threading.Timer(seconds, signals.send, (number, among)))
            timers[-1].start()

        train(2)
        for _ in asked.numbers():
            kills = number == signal.SIGKILL
            later(rng.uniform(0, 0.08), 2 if kills and rng.random() < 0.1 else 1)
            if kills and rng.random() < 0.1:
                later(rng.uniform(0.3, 1.0), 1)
            train(4)
        for timer in timers:
            timer.join()
        train(4)
        seen.events = len(signals.sent)
    seen.identical = same(results, undisturbed(len(results))) and not mismatches(events)
    return seen


def recoveries(events: Sequence[Event]) -> int:
    return sum(event.event == "recovery" for event in events)


def mismatches(events: Sequence[Event]) -> int:
    return sum(event.event == "mismatch" for event in events)


def count_recovered(seen: Seen, sent: Sequence[float]) -> None:
    """Count the signals since the last recovery. Times are of those that were alone."""
    new = sent[seen.recovered :]
    if len(new) == 1:
        seen.seconds.append(time.monotonic() - new[0])
    seen.recovered += len(new)


def same(found: Sequence[StepResult], wanted: Sequence[StepResult]) -> bool:
    """Return whether results are equal. Print the first step that differs."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            sys.stderr.write(f"step {number} differs: {one} where it should be {other}\n")
            return False
    return True


def undisturbed(count: int) -> list[StepResult]:
    given = batches(SHARDED, 50)
    with launch_inline(compiled(SHARDED)) as run:
        return [run.step(given[step % len(given)]) for step in range(count)]


def hangs(asked: Asked) -> Seen:
    """Let a worker sleep inside a computation."""
    given, seen = batches(SHARDED, 50), Seen()
    events: list[Event] = []
    results: list[StepResult] = []
    with tempfile.TemporaryDirectory() as folder:
        slept = Path(folder) / "slept"
        slept.touch()
        stuck = Sabotaged(program=compiled(SHARDED), arg="F PP=1", act=SleepOnce(path=slept))
        with recovering(stuck, "local", Options(), retries=10**6, stall=STALL, notify=events.append) as run:
            for _ in asked.numbers():
                results += [run.step(given[(len(results) + n) % 50]) for n in range(2)]
                known, began = recoveries(events), time.monotonic()
                slept.unlink()
                seen.events += 1
                results.append(run.step(given[len(results) % 50]))
                if recoveries(events) > known:
                    seen.recovered += 1
                    seen.seconds.append(time.monotonic() - began)
    seen.identical = same(results, undisturbed(len(results))) and not mismatches(events)
    return seen


def elastic(asked: Asked) -> Seen:
    """Change from four devices to two and back. The numbers are those of one device to 1e-9."""
    program, events, seen = compile(test_elastic.job()), list[Event](), Seen()
    sizes = sizes_of(program, 2, 4)
    given = test_elastic.batches(4 * asked.events)
    losses: list[float] = []
    with test_elastic.running(program, sizes, events, "local") as run:
        for number in asked.numbers():
            for size, batch in zip((4, 4, 2, 2), given[4 * number :], strict=False):
                run.resize(size)
                losses.append(run.step(batch).loss)
            seen.events += 1
        state = run.state_dict()
    found = [event.seconds for event in events if event.event == "recovery"]
    seen.seconds, seen.recovered = [s for s in found if s is not None], (len(found) + 1) // 2
    with suppress(AssertionError):
        test_elastic.assert_plain(losses, state)
        seen.identical = True
    return seen


# --- Runs of the command line.


@contextmanager
def training(asked: Asked, length: int) -> Iterator[Path]:
    """Yield a folder with a recipe, and `whole` in it: a run that nothing disturbed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "net.py").write_text(RECIPE.replace("STEPS", str(length)))
        whole = train(asked.members, folder, "inline", "whole")
        assert whole.communicate(timeout=BOUND + length)[1] == "" and whole.returncode == 0
        yield folder


def train(members: Family, folder: Path, on: str, out: str, *words: str) -> subprocess.Popen[str]:
    given = ["-m", "piper", "train", "net.py:job", "--out", out, *words]
    start = command(*given) if on == "torchrun" else [sys.executable, *given, "--on", on]
    return members.start(start, env=ENVIRONMENT, folder=folder, fresh=True)


def wait_for_more(process: subprocess.Popen[str], run: Path, more: int) -> None:
    """Wait until a run has reported some steps more, or has ended."""
    wanted, until = len(written(run)) + more, time.monotonic() + BOUND
    while len(written(run)) < wanted and process.poll() is None:
        assert time.monotonic() < until, f"{run}: step {wanted} does not come"
        time.sleep(0.01)


def preempted(on: str, asked: Asked) -> Seen:
    """Send SIGTERM to a process of a run, and resume the run: its last step is in a complete checkpoint."""
    rng, seen, members = Random(asked.seed), Seen(), asked.members
    targets = {"local": ["driver", "worker", "all"], "torchrun": ["driver", "worker", "all"]}
    with training(asked, 15 * asked.events + 20) as folder:
        run = folder / "run"
        for _ in asked.numbers():
            process = train(members, folder, on, "run", "--resume")
            wait_for_more(process, run, rng.randint(5, 15))
            chosen = pids(members, process, on, rng.choice(targets.get(on, ["driver", "worker"])))
            began = time.monotonic()
            for pid in chosen:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            _, said = process.communicate(timeout=BOUND)
            seen.events += 1
            newest = max((run / "checkpoints").iterdir())
            saved = verify(newest).step == written(run)[-1][0]
            if saved and "preempted after step " in said and (on == "torchrun" or process.returncode == 75):
                seen.recovered += 1
                seen.seconds.append(time.monotonic() - began)
        last = train(members, folder, on, "run", "--resume")
        last.communicate(timeout=BOUND + 15 * asked.events)
        seen.identical = last.returncode == 0 and written(run) == written(folder / "whole")
    return seen


def pids(members: Family, process: subprocess.Popen[str], on: str, target: str) -> list[int]:
    """Return the processes of a run to signal."""
    if target == "driver":
        return [process.pid]
    if target == "all":
        return members.members()
    if on == "torchrun":
        return [ranks_of(members, "train")["1"]]
    return members.forked("fork_server")[-1:]
