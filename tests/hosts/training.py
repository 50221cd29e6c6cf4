"""Training on the hosts of a test: the commands that docs/multi-node.md gives, and what a run has written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.hosts.machines import Host

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("recipe.py")
BIN = Path(sys.executable).parent
BOUND = 240.0  # seconds; on a busy machine torch alone takes tens of them
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PIPER_KEY": "0123456789abcdef0123456789abcdef",  # of hosts that nothing else reaches
}


def written(folder: Path, name: str) -> list[dict[str, object]]:
    """Return the complete lines of a file of a run. Empty: it is not there yet."""
    path = folder / name
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps(folder: Path) -> list[int]:
    """Return the steps that a run has reported."""
    return [int(str(line["step"])) for line in written(folder, "metrics.jsonl")]


def events(run: Path) -> list[tuple[object, ...]]:
    """Return what happened to a run: each event, and where its state came from. Not which spares are warm."""
    return [(e["event"], e.get("source")) for e in written(run, "events.jsonl") if e["event"] != "warm"]


def wait_for_events(run: Path, count: int, driver: subprocess.Popen[str]) -> None:
    until = time.monotonic() + BOUND
    while len(events(run)) < count:
        assert driver.poll() is None, driver.communicate(timeout=BOUND)
        assert time.monotonic() < until, f"{events(run)} of {count} events"
        time.sleep(0.1)


def losses(folder: Path) -> list[float]:
    return [float(str(line["loss"])) for line in written(folder, "metrics.jsonl")]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has reported a step; `process`: its driver."""
    until = time.monotonic() + BOUND
    while (steps(folder) or [0])[-1] < step:
        assert process.poll() is None, process.communicate(timeout=BOUND)
        assert time.monotonic() < until, f"step {step} does not come"
        time.sleep(0.05)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a process. Return its exit code, and what it has printed."""
    out, err = process.communicate(timeout=BOUND)
    return process.returncode, out + err


def on_one_device(folder: Path, job: str = "alone") -> list[float]:
    """Return the losses of a job of the recipe on one device, without any host."""
    words = [
        sys.executable,
        "-m",
        "piper",
        "train",
        f"{RECIPE}:{job}",
        "--on",
        "inline",
        "--out",
        str(folder),
    ]
    done = subprocess.run(
        words, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert done.returncode == 0, done.stderr
    return losses(folder)


def torchrun(
    host: Host,
    number: int,
    head: Host,
    run: Path,
    *words: str,
    job: str = "pair",
    hosts: int = 2,
    each: int = 1,
) -> subprocess.Popen[str]:
    """Start torchrun on one of several hosts, as docs/multi-node.md says. each: the ranks of a host."""
    return host.start(
        *("torchrun", "--nnodes", str(hosts), "--node-rank", str(number), "--nproc-per-node", str(each)),
        *("--master-addr", head.address, "--master-port", "29500"),
        *("-m", "piper", "train", f"{RECIPE}:{job}", "--out", str(run), *words),
        env=ENVIRONMENT,
        folder=ROOT,
    )
