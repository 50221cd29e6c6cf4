"""`piper train` over failures: the metrics of an undisturbed run, each step once, and a record of events."""

import json
from pathlib import Path

import pytest

from piper.checkpoint.folder import verify
from piper.cli import main
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
        if number in (3, 5):
            os.kill(descendants(os.getpid())[-1], signal.SIGKILL)
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

def broken():
    def break_it(batch):
        raise RuntimeError("no")
    return job(data=changed(3, break_it), strategy=())
"""


def metrics(folder: Path) -> list[tuple[int, float, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(m["step"], m["loss"], m["grad_norm"]) for m in map(json.loads, lines)]


@pytest.mark.timeout(180)
def test_killed_workers_leave_no_trace_in_the_metrics(
    piper: Piper, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lost.py").write_text(recipe.read_text() + LOST)
    assert piper("lost.py:job", "--out", "whole").returncode == 0
    words = ["train", "lost.py:lost", "--on", "local", "--out", "run"]
    with command(words), pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert ended.value.code in (None, 0), shown
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert [m[0] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"], e["left"]) for e in events] == [
        ("failure", 3, 2), ("recovery", 3, 2), ("failure", 5, 1), ("recovery", 5, 1),
    ]  # fmt: skip
    assert events[0]["what"] == events[2]["what"] == "the process was killed by SIGKILL"
    assert events[1]["version"] == 2 and set(events[1]["phases"]) == {"end", "start", "load", "replay"}
    assert events[3]["version"] == 4 and events[3]["source"] == "memory"
    assert (
        "Step 3: recovered in " in shown
        and "from the state after step 2 in memory, 0 steps repeated" in shown
    )
    assert "Trained 6 steps in " in shown
    assert (tmp_path / "counted").read_text() == "6", "callbacks run once for each step"
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
