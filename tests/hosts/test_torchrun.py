"""torchrun over two hosts: the numbers of one device, and an end in bounded time when a host or its link is lost."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts.machines import Host, hosts
from tests.hosts.training import (
    ended,
    events,
    losses,
    on_one_device,
    steps,
    torchrun,
    wait_for_events,
    wait_for_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = on_one_device(tmp_path_factory.mktemp("alone") / "run")
    assert len(found) == 40
    return found


def started(made: list[Host], run: Path, *words: str) -> list[subprocess.Popen[str]]:
    return [torchrun(host, number, made[0], run, *words) for number, host in enumerate(made)]


def test_two_hosts_train_as_one_device_does(tmp_path: Path, wanted: list[float]) -> None:
    """Also when a link is down for a moment: what was sent meanwhile is sent again."""
    with hosts(2) as made:
        processes = started([*made], tmp_path / "run")
        wait_for_step(tmp_path / "run", 5, processes[0])
        made[1].unplug()
        time.sleep(2)
        made[1].plug()
        assert [ended(process)[0] for process in processes] == [0, 0]
    assert steps(tmp_path / "run") == [*range(1, 41)]
    assert losses(tmp_path / "run") == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("loss", ["unplug", "kill"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_run_and_resume_goes_on(
    tmp_path: Path, wanted: list[float], loss: str, lost: int
) -> None:
    run = tmp_path / "run"
    with hosts(2) as made:
        processes = started([*made], run)
        wait_for_step(run, 12, processes[0])
        getattr(made[lost], loss)()
        ends = {number: ended(processes[number]) for number in (0, 1) if number != lost or loss == "unplug"}
    assert all(code != 0 for code, _ in ends.values()), ends
    if 0 in ends:
        named = re.search(r"device 1 \(process \d+\): (.*)", ends[0][1])
        assert named is not None, ends
        assert named[1] in (
            "no sign of life for 8 s: its machine cannot be reached",
            "its agent is lost, and the process with it",
        )
    if lost == 0:
        assert "error: rank 1: rank 0 is gone, or cannot be reached any more\n" in ends[1][1], ends
    with hosts(2) as made:
        again = started([*made], run, "--resume")
        assert [ended(process)[0] for process in again] == [0, 0]
    assert steps(run) == [*range(1, 41)]
    assert losses(run) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("job", "loss"), [("copied", "kill"), ("copied", "unplug"), ("pair", "kill")])
def test_a_lost_host_is_replaced_by_a_spare(tmp_path: Path, wanted: list[float], job: str, loss: str) -> None:
    """From the copy in memory, else from the newest checkpoint. The ranks of the lost host are gone."""
    run = tmp_path / "run"
    with hosts(3) as made:
        processes = [
            torchrun(host, number, made[0], run, "--spares", "1", job=job, hosts=3)
            for number, host in enumerate(made)
        ]
        wait_for_step(run, 12, processes[0])
        getattr(made[1], loss)()
        wait_for_events(run, 2, processes[0])
        wait_for_step(run, 40, processes[0])
    assert steps(run) == [*range(1, 41)]
    assert losses(run) == pytest.approx(wanted, abs=1e-12)
    (failed, _), (recovered, source) = events(run)
    assert (failed, recovered) == ("failure", "recovery")
    assert source == "memory" if job == "copied" else "checkpoints" in str(source)
