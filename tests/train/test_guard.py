"""One run at a time in a folder, nothing of the user's overwritten, and a way on when a checkpoint is damaged."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.checkpoint.folder import latest
from piper.checkpoint.target import UndroppedError, unwritten
from piper.errors import ConfigError
from piper.train.interrupt import interrupts
from piper.train.run_folder import locked
from piper.workers.results import StepResult
from tests.train.conftest import Piper
from tests.train.counting import Counting

HOLD = """
import os, signal, sys, time
from pathlib import Path
from piper.train.run_folder import locked
with locked(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    if len(sys.argv) == 2:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""
LEAVE = """
import os, sys
from contextlib import ExitStack
from pathlib import Path
from piper.train.run_folder import locked
with ExitStack() as held:
    held.enter_context(locked(Path(sys.argv[1])))
    if os.fork() == 0:
        other = os.open(os.devnull, os.O_RDONLY)  # has the number that the lock had
        held.close()
        os.fstat(other)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def refused(piper: Piper, recipe: Path, name: str, message: str, *words: str) -> None:
    done = piper(f"{recipe}:{name}", *words)
    assert done.returncode == 2
    assert done.stderr.strip() == cleandoc(message)


def test_a_folder_of_the_users_is_not_a_runs(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("plan.txt", "recipe.py", "metrics.jsonl", "run.json", "thesis.tex"):
        (theirs / name).write_text("{}")
    message = """
        error: theirs: this folder holds files that are not a run's
          has:  metrics.jsonl, plan.txt, recipe.py, and 2 more
          hint: name a new or empty folder: --out DIR
    """
    refused(piper, recipe, "single", message, "--out", "theirs")
    refused(piper, recipe, "single", message, "--out", "theirs", "--resume")
    assert {path.name: path.read_text() for path in theirs.iterdir()} == dict.fromkeys(
        ("plan.txt", "recipe.py", "metrics.jsonl", "run.json", "thesis.tex"), "{}"
    )


def test_checkpoints_of_another_run_are_not_overwritten(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    assert piper(f"{recipe}:single", "--out", "run", "--steps", "2").returncode == 0
    (tmp_path / "run" / "metrics.jsonl").unlink()
    message = """
        error: run/checkpoints: this folder holds the checkpoints of another run
          newest: step-00000002
          hint:   go on with it: --resume, or piper.launch(program, resume=...); or let the job save elsewhere: Checkpoint(folder=...)
    """
    refused(piper, recipe, "single", message, "--out", "run")


def test_an_edited_recipe_of_an_earlier_run_is_kept(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    piper(f"{recipe}:single", "--out", "run", "--steps", "1")
    copy = tmp_path / "run" / "recipe.py"
    copy.write_text("# my notes\n" + copy.read_text())
    edited = copy.read_text()
    assert piper(f"{recipe}:single", "--out", "run", "--steps", "2", "--resume").returncode == 0
    assert (tmp_path / "run" / "recipe-1.py").read_text() == edited
    assert copy.read_text() == recipe.read_text()
    assert piper("run/recipe.py:single", "--out", "run", "--steps", "3", "--resume").returncode == 0
    assert sorted(path.name for path in (tmp_path / "run").glob("recipe*")) == ["recipe-1.py", "recipe.py"]


def test_a_second_run_in_a_folder(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, "run"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        pid = other.stdout.readline().strip()
        message = f"""
            error: run: another run is using this folder
              holder: process {pid} on {socket.gethostname()}
              hint:   wait for it or stop it, or name another folder with --out
        """
        refused(piper, recipe, "single", message, "--out", "run")
        refused(piper, recipe, "single", message, "--out", "run", "--resume")
        other.kill()
        other.wait()
    assert (tmp_path / "run" / "run.lock").exists(), "the file stays, the lock does not"
    assert piper(f"{recipe}:single", "--out", "run", "--steps", "1").returncode == 0
    assert json.loads((tmp_path / "run" / "run.lock").read_text())["pid"] == os.getpid()


def test_a_child_that_outlives_its_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path), "fork"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        with pytest.raises(ConfigError, match="another run is using this folder"), locked(tmp_path):
            pass
        other.kill()
        other.wait()
        try:
            with locked(tmp_path) as warning:
                assert warning is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_leaves_the_lock_closes_no_other_file(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LEAVE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0"], done.stderr


def test_a_folder_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path) as warning:
        assert warning == f"{tmp_path} cannot be locked (No locks available): start no second run in it"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flip": (lambda path: flip(path / "device-00000.safetensors"), "device-00000.safetensors: bytes 0 to "),
    "short": (
        lambda path: (path / "device-00000.safetensors").write_bytes(b"x"),
        "device-00000.safetensors has 1 bytes, not ",
    ),
    "record": (
        lambda path: (path / "checkpoint.json").write_text("{}"),
        "checkpoint.json: ValueError: it is not",
    ),
    "no record": (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_goes_on_from_the_newest_good_one(
    damage: str, piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    """The run that goes on from step 4 is the run that was never stopped, and saves step 6 again."""
    assert piper(f"{recipe}:single", "--out", "run").returncode == 0
    before = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    act, why = DAMAGES[damage]
    act(tmp_path / "run" / "checkpoints" / "step-00000006")
    done = piper(f"{recipe}:single", "--out", "run", "--resume")
    assert done.returncode == 0, done.stderr
    where = "run/checkpoints/step-0000000"
    assert f"{where}6 is damaged ({why}" in done.stdout
    assert f"): using {where}4 instead\nGoing on from {where}4, after step 4\n" in done.stdout
    after = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["loss"]) for m in after] == [(m["step"], m["loss"]) for m in before]
    assert latest(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step-00000006"


def test_a_resume_without_any_good_one(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    assert piper(f"{recipe}:single", "--out", "run", "--steps", "4").returncode == 0
    for step in (2, 4):
        (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" / "device-00000.safetensors").unlink()
    message = """
        error: --resume: no checkpoint of this run can be loaded
          folder:        run/checkpoints
          step-00000004: device-00000.safetensors is missing
          step-00000002: device-00000.safetensors is missing
          hint:          bring one back from a copy, or start a run of its own with another --out
    """
    refused(piper, recipe, "single", message, "--out", "run", "--resume")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


FULL = unwritten(Path("run/step-1"), "the disk is full")
STUCK = UndroppedError("an old checkpoint could not be dropped", by="save", hint="look")
BROKEN = ConfigError("the state cannot be written down", by="save", hint="change it")


@pytest.mark.parametrize(
    ("begun", "finished", "last", "warned", "raised", "saved"),
    [
        (None, None, False, [], None, ["saved 4 keep 2"]),
        (None, None, True, [], None, ["saved 4 last keep 2"]),
        (None, FULL, False, [FULL], None, ["saved 4 keep 2"]),
        (None, FULL, True, [FULL], None, ["saved 4 last keep 2"]),
        (None, STUCK, False, [STUCK], None, ["saved 4 keep 2"]),
        (FULL, None, False, [FULL], None, []),
        (FULL, None, True, [], FULL, []),
        (STUCK, None, True, [STUCK], None, []),
        (BROKEN, None, False, [], BROKEN, []),
    ],
)
def test_which_saves_may_fail(
    begun: ConfigError | None,
    finished: ConfigError | None,
    last: bool,
    warned: list[ConfigError],
    raised: ConfigError | None,
    saved: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What can never be saved ends the run at once; a disk that is full only when it is the last save."""
    run = Counting(every=4)
    run.folder, run.sessions.done = tmp_path, 4
    run.sessions.begun, run.sessions.finished = begun, finished
    result = StepResult(loss=1.0, grad_norm=1.0)
    with nullcontext() if raised is None else pytest.raises(ConfigError) as error:
        run.after_step(4, result, 4 if last else 9)
    assert raised is None or (error is not None and error.value is raised)
    assert caplog.messages == [f"warning: {error}" for error in warned]
    assert run.events == ["told 4", *saved]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_once_and_then_ends(number: signal.Signals) -> None:
    asked: list[int] = []

    def ask(given: int) -> None:
        asked.append(given)
        raise OSError(5, "the terminal is gone")

    before = signal.getsignal(number)
    with interrupts(ask) as stopping:
        assert not stopping() and signal.getsignal(number) != before
        signal.raise_signal(number)
        assert stopping() and asked == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts(lambda number: None) as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert not stopping()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "code", "said"), [("SIGTERM", 75, "preempted"), ("SIGHUP", 130, "stopped")])
def test_a_signal_finishes_the_step_and_saves(
    name: str,
    code: int,
    said: str,
    piper: Piper,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = recipe.read_text()
    assert source.count("signal.SIGINT") == 1
    (tmp_path / "stopped.py").write_text(source.replace("signal.SIGINT", f"signal.{name}"))
    done = piper("stopped.py:interrupted", "--out", "run")
    assert done.returncode == code
    assert done.stderr.startswith(f"{said} after step 3 of 6; go on with: ")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_terminal_that_is_closed(recipe: Path, tmp_path: Path) -> None:
    """The run is the leader of a terminal's session; when the terminal goes, it saves and ends."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        recipe.read_text()
        + """
def slow():
    import time
    def wait(batch):
        time.sleep(0.05)
        return batch
    def data():
        for batch in Samples(rows(), batch=8, seed=1):
            yield wait(batch)
    return job(data=data, strategy=(), steps=5000, checkpoint=piper.Checkpoint(folder="checkpoints", every=5000))
"""
    )
    pid, terminal = os.forkpty()
    if pid == 0:
        words = ["-m", "piper", "train", f"{slow}:slow", "--out", str(tmp_path / "run"), "--on", "local"]
        os.execv(sys.executable, [sys.executable, *words])
    metrics = tmp_path / "run" / "metrics.jsonl"
    seen = b""
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    os.waitpid(pid, 0)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert saved.name == f"step-{steps[-1]:08}"
