"""An elastic job on two hosts: one is lost and comes back, and the numbers are those of one device throughout."""

import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.hosts.machines import hosts
from tests.hosts.test_ray import join, train
from tests.hosts.training import BOUND, losses, on_one_device, steps, wait_for_step, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def resizes(run: Path) -> list[object]:
    """Return how the number of devices has changed."""
    return [event["what"] for event in written(run, "events.jsonl") if event["event"] == "resize"]


def test_four_devices_of_two_hosts_are_two_until_the_lost_host_is_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hosts(2) as made:
        for host in made:
            join(host, made[0], workers=2)
        driver = train(made[0], "elastic", run)
        wait_for_step(run, 12, driver)
        made[1].kill()
        wait_for_step(run, 20, driver)
        assert resizes(run) == ["going on with 2 devices instead of 4: there is room for 2"]
        made[1].restart()
        join(made[1], made[0], workers=2)
        until = time.monotonic() + BOUND
        while len(resizes(run)) < 2:
            assert driver.poll() is None, driver.communicate(timeout=BOUND)
            assert time.monotonic() < until, written(run, "events.jsonl")
            time.sleep(0.2)
        wait_for_step(run, steps(run)[-1] + 5, driver)
    happened = written(run, "events.jsonl")
    assert resizes(run)[1] == "going on with 4 devices instead of 2: lost ones are tried"
    sources = [event["source"] for event in happened if event["event"] == "recovery"]
    assert sources == ["memory", "memory"], happened
    found = losses(run)
    assert steps(run) == [*range(1, len(found) + 1)]
    assert found == pytest.approx(on_one_device(tmp_path / "alone", "long")[: len(found)], rel=0, abs=1e-9)
