"""A Ray cluster of three hosts: a lost host is replaced by the third, and the numbers are those of one device."""

import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.hosts.machines import Host, hosts
from tests.hosts.training import (
    BOUND,
    ENVIRONMENT,
    RECIPE,
    ROOT,
    ended,
    events,
    losses,
    on_one_device,
    steps,
    wait_for_events,
    wait_for_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PORT = "6379"
RAY = {  # a token of this cluster's own: Ray may ask for one, and this user may have another
    **ENVIRONMENT,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = on_one_device(tmp_path_factory.mktemp("alone") / "run")
    assert len(found) == 40
    return found


def join(host: Host, head: Host, workers: int = 1) -> None:
    """Start Ray on a host, as docs/multi-node.md says, with room for some workers."""
    words = ["--address", f"{head.address}:{PORT}"]
    if host is head:
        words = ["--head", "--port", PORT, "--include-dashboard=false", "--disable-usage-stats"]
    host.run(
        *("ray", "start", *words, "--node-ip-address", host.address, "--num-cpus", str(workers)),
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


def train(head: Host, job: str, run: Path, *words: str, driver: Host | None = None) -> subprocess.Popen[str]:
    """Train on the cluster; the driver is on the first host if no other one is given."""
    return (driver or head).start(
        *("piper", "train", f"{RECIPE}:{job}", "--on", "ray", "--out", str(run), *words),
        env={**RAY, "RAY_ADDRESS": f"{head.address}:{PORT}"},
        folder=ROOT,
    )


def working(host: Host) -> bool:
    """Return whether a host has a worker, which is forked from another process. A spare has only the latter."""
    return int(host.run("sh", "-c", "grep -l 'remote_[w]orker' /proc/[0-9]*/cmdline | wc -l")) == 2


def other_working(cluster: Sequence[Host]) -> Host:
    """Return a host that has a worker and not the driver: Ray chooses two of the three for workers."""
    return next(host for host in cluster[1:] if working(host))


def check(run: Path, driver: subprocess.Popen[str], wanted: list[float]) -> str:
    """Check that a run has ended well, with each step once and the numbers of one device."""
    code, said = ended(driver)
    assert code == 0, said
    assert steps(run) == [*range(1, 41)]
    assert losses(run) == pytest.approx(wanted, abs=1e-12)
    return said


@pytest.mark.parametrize("loss", ["kill", "unplug"])
def test_a_lost_host_is_replaced_by_a_spare_from_memory(
    tmp_path: Path, cluster: Sequence[Host], wanted: list[float], loss: str
) -> None:
    run = tmp_path / "run"
    driver = train(cluster[0], "copied", run, "--spares", "1")
    wait_for_step(run, 12, driver)
    getattr(other_working(cluster), loss)()
    said = check(run, driver, wanted)
    assert events(run) == [("failure", None), ("recovery", "memory")], said
    assert "in memory, " in said


def test_a_lost_host_without_copies_costs_the_steps_since_the_checkpoint(
    tmp_path: Path, cluster: Sequence[Host], wanted: list[float]
) -> None:
    run = tmp_path / "run"
    driver = train(cluster[0], "pair", run, "--spares", "1")
    wait_for_step(run, 12, driver)
    other_working(cluster).kill()
    said = check(run, driver, wanted)
    assert [event[0] for event in events(run)] == ["failure", "recovery"], said
    source = str(events(run)[1][1])
    assert "checkpoints" in source and source in "".join(said.split("\n")), said


def test_a_link_that_comes_back(tmp_path: Path, cluster: Sequence[Host], wanted: list[float]) -> None:
    """After two seconds nothing was lost. After longer the host is a spare, which can take over again."""
    run = tmp_path / "run"
    driver = train(cluster[0], "slowly", run, "--spares", "1")
    wait_for_step(run, 4, driver)
    first = other_working(cluster)
    first.unplug()
    time.sleep(2)
    first.plug()
    wait_for_step(run, 8, driver)
    assert events(run) == []
    first.unplug()
    wait_for_events(run, 2, driver)
    first.plug()
    until = time.monotonic() + BOUND
    while working(first):  # it ends its worker when it hears that it should
        assert time.monotonic() < until
    other_working(cluster).kill()
    said = check(run, driver, wanted)
    assert events(run) == 2 * [("failure", None), ("recovery", "memory")], said
