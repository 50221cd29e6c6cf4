"""In a world that torchrun has started, `local` joins it: every rank works, and rank 0 runs the script."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from inspect import cleandoc
from pathlib import Path
from typing import cast

import pytest
from torch._C._distributed_c10d import HashStore

from piper.compiler import Program, compile
from piper.errors import ConfigError
from piper.recipe import load_recipe
from piper.run.launch import check_launcher, launch_inline
from piper.workers import rendezvous
from piper.workers.rank_environment import RankEnvironment, rank_environment
from piper.workers.rendezvous import apart, prefix
from tests.hosts.training import events
from tests.runtime.grid import batches, job
from tests.workers.family import family, free_port, wait_for
from tests.workers.ranks import CELL, forward

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ranks.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
BOUND = 250  # seconds; five processes import torch, which takes ten times as long on a busy machine
pytestmark = pytest.mark.timeout(300)

RECIPE = """
import os, signal
from dataclasses import replace
from pathlib import Path
from torch.optim.lr_scheduler import LambdaLR
from tests.workers.ranks import CELL, MANY
from tests.runtime.grid import batches, job

DRIVER = os.getpid()  # it tries the scheduler when it compiles

def once_killed(optimizer):
    def rate(step):
        if step == 3 and os.getpid() != DRIVER:
            try:
                Path("killed").touch(exist_ok=False)
            except FileExistsError:
                pass  # one worker was killed here
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return 1 / (step + 1)
    return LambdaLR(optimizer, rate)

def pair():
    return replace(job(CELL, data=lambda: batches(CELL, 5), steps=5), scheduler=once_killed)

def four():
    return job(MANY)
"""


IDLE = """
import os, pathlib, time
pathlib.Path("rank" + os.environ["RANK"]).touch()
time.sleep(300)
"""


def command(*words: str) -> list[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    return [sys.executable, *start, "--master-port", str(free_port()), *words]


def torchrun(
    *words: str, folder: Path, env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    with family() as ranks:
        process = ranks.start(command(*words), env=env, folder=folder)
        out, err = process.communicate(timeout=BOUND)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def seen(folder: Path, what: str, rank: int) -> dict[str, object]:
    text = (folder / f"{what}.rank{rank}.json").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script on two ranks that train and fail, then one dies; return where they write what they saw."""
    folder = tmp_path_factory.mktemp("scripts")
    run_scripts(folder, ENVIRONMENT)
    return folder


def run_scripts(folder: Path, env: Mapping[str, str]) -> None:
    """Run the script on two ranks, each the first of a machine.

    The ranks are started by hand, with the environment that torchrun gives them, which saves a process.
    `test_the_command_line_trains_once` goes through torchrun, with both on one machine.
    """
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with family() as ranks:
        processes = [
            ranks.start(
                [sys.executable, str(SCRIPT), str(folder), "refused", "all", "die"],
                env={**env, **world, "RANK": str(rank), "LOCAL_RANK": "0"},
            )
            for rank in range(2)
        ]
        ended = [(process.communicate(timeout=BOUND)[1], process.returncode) for process in processes]
    assert [code for _, code in ended] == [0, 0], ended


def test_ranks_that_are_started_again_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun stays, with the addresses of the ranks before."""
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert prefix() == "piper/0"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert prefix() == "piper/2"


def text(error: object) -> str:
    return re.sub(r"process \d+", "process N", str(error))


def test_a_script_runs_unchanged(scripts: Path) -> None:
    """It trains, saves, starts again from there, and fails, on rank 0."""
    first = seen(scripts, "all", 0)
    wanted = of_one_process(compile(job(CELL)))
    assert {name: first[name] for name in wanted} == wanted
    assert_refused(scripts)


def test_the_other_ranks_end_with_the_script_of_rank_0(scripts: Path) -> None:
    """They do not go on after their first launch, whatever rank 0 launches and however its runs end."""
    written = sorted(path.name for path in scripts.glob("*.json"))
    assert written == ["all.rank0.json", "die.rank0.json", "refused.rank0.json", "refused.rank1.json"]


def test_a_script_that_ends_with_an_error(tmp_path: Path) -> None:
    """Ranks on other machines end with one too: their torchrun sees no other rank."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with family() as ranks:
        processes = [
            ranks.start(
                [sys.executable, str(SCRIPT), str(tmp_path), "raise"],
                env={**ENVIRONMENT, **world, "RANK": str(rank), "LOCAL_RANK": "0"},
            )
            for rank in range(2)
        ]
        ended = [(process.communicate(timeout=BOUND)[1], process.returncode) for process in processes]
    assert [code for _, code in ended] == [1, 1], ended
    assert "ValueError: the script fails" in ended[0][0]


def test_ranks_know_how_a_script_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a verb of the command line has said how, before the process of rank 0 ends."""
    for begun, error, wanted in ((None, None, b"0"), (None, ValueError(), b"1"), ("2", ValueError(), b"2")):
        store = HashStore()
        monkeypatch.setattr(rendezvous, "store_of", lambda _, store=store: store)
        monkeypatch.delattr(sys, "last_value", raising=False)
        if error is not None:
            monkeypatch.setattr(sys, "last_value", error, raising=False)
        if begun is not None:
            store.set(rendezvous.END, begun)
        rendezvous.end_script(replace(WORLD, rank=0, size=1))
        assert store.get(rendezvous.END) == wanted


def of_one_process(program: Program) -> dict[str, object]:
    """Return what the script sees where devices are threads of one process."""
    with launch_inline(program) as run:
        results = [[r.loss, r.grad_norm] for r in map(run.step, batches(CELL, 2))]
        smaller = {name: value[:3] for name, value in batches(CELL, 1)[0].items()}
        return {
            "results": results,
            "uneven": run.step(smaller).loss,
            "trained": [result.loss for result in run.train(1)],
            "evaluated": run.evaluate(batches(CELL, 2)).loss,
            "predicted": run.predict(batches(CELL, 1)[0], forward).tolist(),
            "rates": [group["lr"] for group in run.optimizer],
            "state": {name: value.tolist() for name, value in run.state_dict().items()},
            "resumed": [run.step(batches(CELL, 1)[0]).loss],
        }


def assert_refused(scripts: Path) -> None:
    """Check how the script's launches on too few ranks, and of a program that fails, ended."""
    for rank in range(2):
        assert seen(scripts, "refused", rank)["size"] == "ConfigError: " + cleandoc("""
            launch: there is not one process for each device
              processes: WORLD_SIZE=2
              devices:   4 in the plan
              hint:      start 4 processes, or unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and piper starts them
        """)
    broken = text(seen(scripts, "all", 0)["broken"])
    assert broken.startswith("WorkerError: device 1 (process N): BrokenError: the glass is broken\n  at: ")
    assert ", compute on stream compute: F[PP=1 MB=1]\n" in broken
    assert re.search(r"\n  waiting: device 0 in transfer\[PP=1.din0\[MB=\d\] @1 -> @0\]\n", broken)


def test_a_worker_that_dies(scripts: Path) -> None:
    """Its rank lives."""
    assert_died(scripts)


def assert_died(scripts: Path) -> None:
    """Check how the script's launch ended whose worker is killed."""
    error = text(seen(scripts, "die", 0)["dead"])
    assert error.startswith("WorkerError: device 1 (process N): the process was killed by SIGKILL\n  at: ")
    assert ", compute on stream compute: F[PP=1 MB=1]\n" in error
    assert error.endswith(
        "hint:    look for what ended it: the system's log names a process killed for want of memory"
    )


@pytest.mark.slow
def test_a_worker_that_is_stopped(tmp_path: Path) -> None:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with family() as ranks:
        first, _ = [
            ranks.start(
                [sys.executable, str(SCRIPT), str(tmp_path), "stop"],
                env={**ENVIRONMENT, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        assert first.wait(BOUND) == 0, first.communicate(timeout=10)[1]
    error = text(seen(tmp_path, "stop", 0)["lost"])
    assert error.startswith("WorkerError: device 1 (process N): the process is stopped by a signal\n  at: ")
    took = cast(float, seen(tmp_path, "stop", 0)["took"])
    assert took < 60, "nothing waits for the timeout of 90 s"


def test_ranks_end_with_a_torchrun_that_takes_too_long(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text(IDLE, encoding="utf-8")
    with pytest.raises(subprocess.TimeoutExpired), family() as ranks:
        process = ranks.start(command(str(script)), env=ENVIRONMENT, folder=tmp_path)
        wait_for([tmp_path / "rank0", tmp_path / "rank1"], BOUND)
        assert len(ranks.members()) == 3
        process.communicate(timeout=0.1)
    assert ranks.members() == []


def test_the_command_line_trains_once(tmp_path: Path) -> None:
    """A worker is killed in the middle of a step. Its rank forks it again, and no number changes."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    done = torchrun("-m", "piper", "train", f"{recipe}:pair", "--out", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Compiling") == 1, "rank 0 alone prints"
    assert (tmp_path / "killed").exists()
    assert events(tmp_path / "run") == [("failure", None), ("recovery", "memory")]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]
    with launch_inline(compile(load_recipe(f"{recipe}:pair"))) as run:
        assert found == [(n, r.loss, r.grad_norm) for n, r in enumerate(run.train(), start=1)], "to the bit"


@pytest.mark.slow
def test_the_command_line_checks_and_refuses_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    done = torchrun("-m", "piper", "check", f"{recipe}:pair", "--on", "local", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    done = torchrun("-m", "piper", "check", f"{recipe}:four", "--on", "local", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: launch: there is not one process for each device") == 1


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment() is None
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert rank_environment() is None, "it says too little"
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rank_environment() == RankEnvironment(
        rank=3, size=8, local=1, nearby=2, address="here", port=29500
    )
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError) as caught:
        rank_environment()
    assert str(caught.value) == cleandoc("""
        launch: RANK=first is not a number
          hint: start with torchrun, or unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    """)


def test_a_process_that_torchrun_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as caught:
        check_launcher("torchrun")
    assert str(caught.value) == cleandoc("""
        launch: torchrun has not started this process
          missing: LOCAL_RANK, MASTER_PORT
          hint:    start it with torchrun --nproc-per-node N, or let piper start processes: on='local'
    """)


WORLD = RankEnvironment(rank=1, size=2, local=1, nearby=2, address="here", port=29500)


def test_ranks_that_do_not_meet() -> None:
    assert str(apart(WORLD, "timed out\nat length")) == cleandoc("""
        rank 1: the processes of this world do not find each other
          at:   here:29500
          why:  timed out
          hint: start every rank of WORLD_SIZE, with a MASTER_ADDR and MASTER_PORT that all can reach
    """)
