"""A Ray of our own: it listens on this machine only and ends with the run."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

from piper.api import compile
from piper.launchers.start import launch
from tests.runtime.grid import Cell, batches, job

CELL = Cell(case="mlp", schedule="1f1b", dp=1)
LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:")  # 127.0.0.1, in both families


def listening() -> set[str]:
    """The addresses that something on this machine listens on, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            if line.split()[3] == "0A":
                found.add(line.split()[1])
    return found


def exposed(before: set[str]) -> list[str]:
    """What listens now and did not before, and can be reached from other machines."""
    return [address for address in listening() - before if not address.startswith(LOOPBACK)]


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_ray_of_our_own_is_on_loopback_and_ends() -> None:
    assert not ray.is_initialized()
    before = listening()
    with launch(compile(job(CELL)), "ray") as run:
        assert run.step(batches(CELL, 1)[0]).loss > 0
        assert not exposed(before)
        folder = Path(ray.get_runtime_context().get_temp_dir())
    assert not ray.is_initialized()
    assert not folder.exists()
