"""In a world that torchrun has started, `local` joins it: every rank works, and all see the same."""

import json
import os
import re
import socket
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.api import compile
from piper.errors import ConfigError
from piper.launchers.inline import launch_inline
from piper.launchers.world import World, world_here
from tests.launchers.ranks import CELL
from tests.runtime.grid import batches, job

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ranks.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
BOUND = 100  # seconds; torch alone takes ten of them on a busy machine
pytestmark = pytest.mark.timeout(120)

RECIPE = """
from tests.launchers.ranks import CELL, MANY
from tests.runtime.grid import batches, job

def pair():
    return job(CELL, data=lambda: batches(CELL, 3), steps=3)

def four():
    return job(MANY)
"""


def torchrun(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    return subprocess.run(
        [sys.executable, *start, "--master-port", str(free_port()), *words],
        env=ENVIRONMENT,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def seen(folder: Path, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
    return found


def text(error: object) -> str:
    return re.sub(r"process \d+", "process N", str(error))


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    """It trains, saves, starts again from there, and fails, on every rank alike."""
    done = torchrun(str(SCRIPT), str(tmp_path), "all", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first = seen(tmp_path, 0)
    assert first == seen(tmp_path, 1)
    with launch_inline(compile(job(CELL))) as run:
        assert first["results"] == [[r.loss, r.grad_norm] for r in map(run.step, batches(CELL, 2))]
        assert first["trained"] == [result.loss for result in run.train(1)]
        assert first["state"] == {name: value.tolist() for name, value in run.state_dict().items()}
        assert first["resumed"] == [run.step(batches(CELL, 1)[0]).loss]
    assert first["size"] == "ConfigError: " + cleandoc("""
        launch: there is not one process for each device
          processes: WORLD_SIZE=2
          devices:   4 in the plan
          hint:      start 4 processes, or unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and piper starts them
    """)
    broken = text(first["broken"])
    assert broken.startswith("WorkerError: device 1 (process N): BrokenError: the glass is broken\n  at: ")
    assert ", compute on stream compute: F[PP=1 MB=1]\n" in broken
    assert re.search(r"\n  waiting: device 0 in transfer\[PP=1.din0\[MB=\d\] @1 -> @0\]\n", broken)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """Started by hand, because torchrun itself ends every rank when one dies."""
    port = str(free_port())
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), "die"],
            env={**ENVIRONMENT, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(BOUND) for process in ranks] == [0, -9]
    finally:
        for process in ranks:
            process.kill()
    error = text(seen(tmp_path, 0)["dead"])
    assert error.startswith("WorkerError: device 1 (process N): the process has ended\n  at: ")
    assert ", compute on stream compute: F[PP=1 MB=1]\n" in error
    assert error.endswith(
        "hint:    look for what ended it: the system's log names a process killed for want of memory"
    )


def test_the_command_line_trains_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    done = torchrun("-m", "piper", "train", f"{recipe}:pair", "--out", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    with launch_inline(compile(job(CELL))) as run:
        assert [json.loads(line)["loss"] for line in lines] == [run.step(b).loss for b in batches(CELL, 3)]
    assert done.stdout.count("Compiling") == 1, "rank 0 alone prints"


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
    assert world_here() is None
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert world_here() is None, "it says too little"
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert world_here() == World(rank=3, size=8, local=1, nearby=2, address="here", port=29500)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError) as caught:
        world_here()
    assert str(caught.value) == cleandoc("""
        launch: RANK=first is not a number
          hint: start with torchrun, or unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    """)
