"""A Ray cluster of three hosts: a host that is lost is replaced by a spare, with the bits of one that never was."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.hosts.machines import Host, hosts
from tests.hosts.training import (
    ENVIRONMENT,
    RECIPE,
    ROOT,
    ended,
    losses,
    on_one_device,
    steps,
    wait_for_step,
    written,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
PORT = "6379"
RAY = {**ENVIRONMENT, "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return on_one_device(tmp_path_factory.mktemp("alone") / "run")


def join(host: Host, head: Host) -> None:
    """Start Ray on a host, as docs/multi-node.md says, with room for one worker."""
    words = ["--address", f"{head.address}:{PORT}"]
    if host is head:
        words = ["--head", "--port", PORT, "--include-dashboard=false", "--disable-usage-stats"]
    host.run(
        *("ray", "start", *words, "--node-ip-address", host.address, "--num-cpus", "1"),
        *("--temp-dir", f"/mnt/{host.name}", "--object-store-memory", "80000000"),
        env=RAY,
        folder=ROOT,
        bound=120,
    )


@pytest.fixture
def cluster() -> Iterator[Sequence[Host]]:
    with hosts(3) as made:
        for host in made:
            join(host, made[0])
        yield made


def train(head: Host, job: str, run: Path, *words: str) -> subprocess.Popen[str]:
    """Train on the cluster, with one spare; the driver is on the first host."""
    return head.start(
        *("piper", "train", f"{RECIPE}:{job}", "--on", "ray", "--out", str(run), *words),
        env={**RAY, "RAY_ADDRESS": f"{head.address}:{PORT}"},
        folder=ROOT,
    )


def test_one(tmp_path: Path, cluster: Sequence[Host], wanted: list[float]) -> None:
    driver = train(cluster[0], "copied", tmp_path / "run", "--spares", "1")
    wait_for_step(tmp_path / "run", 12, driver)
    cluster[1].kill()
    code, out = ended(driver)
    print(out)
    for line in written(tmp_path / "run", "events.jsonl"):
        print(line)
    assert code == 0, out
    assert steps(tmp_path / "run") == [*range(1, 41)]
    assert losses(tmp_path / "run") == pytest.approx(wanted, abs=1e-12)
