"""`piper train` over failures: the metrics of an undisturbed run, each step once, and a record of events."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from piper.checkpoint.folder import verify
from piper.errors import WorkerError
from piper.launchers.driver import RemoteRun
from piper.recovery.starters import LocalStarter
from piper.recovery.supervisor import Supervisor
from piper.runtime.worker import Options
from piper.train import supervised as supervision
from tests.train.conftest import Piper, command

LOST = """
import os, signal
from contextlib import suppress
from pathlib import Path

def descendants(pid):
    try:
        threads = [thread / "children" for thread in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return []  # the process has just ended
    children = []
    for path in threads:
        with suppress(FileNotFoundError):  # the thread has just ended
            children += map(int, path.read_text().split())
    return children + [found for child in children for found in descendants(child)]

def lost():
    def kill(number, batch):
        once = Path(f"killed-{number}")  # another driver reads the same batches again
        if number in (3, 5) and not once.exists():
            once.touch()
            workers = [pid for pid in descendants(os.getppid()) if pid != os.getpid()]
            os.kill(workers[-1] if number == 3 else os.getpid(), signal.SIGKILL)
        return batch
    def data():
        for number, batch in enumerate(Samples(rows(), batch=8, seed=1), start=1):
            yield kill(number, batch)
    return job(data=data, callbacks=[Counts()])

class Counts(piper.callbacks.Callback):
    steps = 0
    def on_step(self, run, step, result):
        self.steps += 1
    def on_end(self, run, step):
        Path("counted").write_text(str(self.steps))
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

def stuck():
    import time
    def wait(batch):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(50)
    return job(data=changed(3, wait), checkpoint=piper.Checkpoint(folder="checkpoints", every=100))

def preempted():
    def data():
        again = Path("killed-3").exists()  # the driver after the one that was killed
        if again and WHEN == "start" and not Path("asked").exists():
            Path("asked").touch()
            signal.raise_signal(signal.SIGTERM)
        for number, batch in enumerate(Samples(rows(), batch=8, seed=1), start=1):
            if number == 3 and not again:
                Path("killed-3").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch
    return job(data=data, checkpoint=piper.Checkpoint(folder="checkpoints", every=100), callbacks=[Counts()])

def broken():
    def break_it(batch):
        raise RuntimeError("no")
    return job(data=changed(3, break_it), strategy=())
"""


def metrics(folder: Path) -> list[tuple[int, float, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(m["step"], m["loss"], m["grad_norm"]) for m in map(json.loads, lines)]


def supervised(words: list[str], shown: Path) -> int:
    """Run the command line in a process of its own, without the threads of pytest-xdist. Return its exit code."""
    from piper.cli import main

    def act() -> bytes:
        sys.stdout = sys.stderr = shown.open("a", buffering=1)
        with command(words):
            main()
        return b""

    return Supervisor().run(act).code


@pytest.mark.timeout(180)
def test_a_killed_worker_and_a_killed_driver_leave_no_trace_in_the_metrics(
    piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "lost.py").write_text(recipe.read_text() + LOST)
    assert piper("lost.py:job", "--out", "whole").returncode == 0
    words = ["train", "lost.py:lost", "--on", "local", "--out", "run"]
    code, shown = supervised(words, tmp_path / "shown"), (tmp_path / "shown").read_text()
    assert code == 0, shown
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert [m[0] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"], e["left"]) for e in events] == [
        ("failure", 3, 2), ("recovery", 3, 2), ("failure", 5, 1), ("recovery", 5, 1),
    ]  # fmt: skip
    assert events[0]["what"] == "the process was killed by SIGKILL"
    assert events[2]["what"] == "the driver was killed by SIGKILL"
    assert events[1]["version"] == 2 and set(events[1]["phases"]) == {"end", "start", "load", "replay"}
    assert events[3]["version"] in (3, 4) and events[3]["source"] == "memory"
    assert (
        "Step 3: recovered in " in shown
        and "from the state after step 2 in memory, 0 steps repeated" in shown
    )
    assert "Trained 6 steps in " in shown, "what an earlier driver has trained counts too"
    assert (tmp_path / "counted").read_text() == "6", "callbacks go on where they were"
    assert verify(tmp_path / "run" / "checkpoints" / "step-00000006").step == 6
    assert not (tmp_path / "whole" / "events.jsonl").exists()


def test_a_step_that_does_not_end_in_time_is_left_and_the_newest_version_saved(
    piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "lost.py").write_text(recipe.read_text() + LOST)
    done = piper("lost.py:stuck", "--out", "run", "--grace", "1")
    assert done.returncode == 75
    assert done.stderr.startswith("preempted after step 2 of 6; go on with: ")
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step-00000002" and verify(saved).step == 2
    (event,) = (json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["step"]) == ("preemption", 3)
    assert piper("lost.py:job", "--out", "run", "--resume").returncode == 0
    assert piper("lost.py:job", "--out", "whole").returncode == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "when",
    ["between", pytest.param("start", marks=pytest.mark.slow), pytest.param("late", marks=pytest.mark.slow)],
)
def test_a_preemption_while_a_driver_takes_the_place_of_another(
    piper: Piper, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Between the two, when the second one starts, and when its start takes longer than there is time."""
    (tmp_path / "lost.py").write_text(recipe.read_text() + LOST.replace("WHEN", repr(when)))
    error, start = supervision.lost, LocalStarter.start

    def between(*given: object) -> WorkerError:
        signal.raise_signal(signal.SIGTERM)
        return error(*given)  # type: ignore[arg-type]

    def never(self: LocalStarter, options: Options) -> RemoteRun:
        if not (tmp_path / "killed-3").exists():
            return start(self, options)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)
        raise AssertionError("it is interrupted")

    grace = "2" if when == "late" else "60"
    words = ["train", "lost.py:preempted", "--on", "local", "--out", "run", "--grace", grace]
    with monkeypatch.context() as patched:
        if when == "between":
            patched.setattr(supervision, "lost", between)
        if when == "late":
            patched.setattr(LocalStarter, "start", never)
        code = supervised(words, tmp_path / "shown")
    shown = (tmp_path / "shown").read_text()
    assert code == 75, shown
    done = 2 if when == "late" else 3
    assert f"preempted after step {done} of 6; go on with: " in shown
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert verify(saved).step == done
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    seen = [(event["event"], event["step"]) for event in events]
    again = [] if when == "late" else [("recovery", 3)]
    assert seen == [("failure", 3), ("preemption", 3), *again]
    assert piper("lost.py:preempted", "--out", "run", "--resume").returncode == 0
    assert piper("lost.py:job", "--out", "whole").returncode == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert (tmp_path / "counted").read_text() == "6"


def test_what_the_data_raises_is_not_tried_again(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(recipe.read_text() + LOST)
    assert piper("lost.py:broken", "--out", "run").returncode == 2
    assert not (tmp_path / "run" / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--retries", "-1"), "--retries -1\n  hint: 0 ends the run with the first failure\n"),
        (("--stall", "0"), "--stall 0\n  hint: give a step some seconds: --stall 60\n"),
    ],
)
def test_numbers_that_cannot_be(piper: Piper, recipe: Path, words: tuple[str, ...], said: str) -> None:
    done = piper(f"{recipe}:single", *words)
    assert (done.returncode, done.stderr) == (2, f"error: piper train: {said}")
