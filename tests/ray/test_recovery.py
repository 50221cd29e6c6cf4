"""Actors that are lost are replaced: from memory on one machine, on a spare where a node is lost."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from piper.compiler import Program, compile
from piper.errors import LaunchError
from piper.launchers import ray as launcher
from piper.launchers.base import StepResult
from piper.launchers.inline import launch_inline
from piper.launchers.ray import RayStarter
from piper.recovery.recovering_run import RecoveringRun, recovering
from piper.recovery.run_events import Event
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
PAIR = Cell(case="mlp", schedule="1f1b", dp=1)


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(job(PAIR))


@pytest.fixture(scope="module")
def wanted(program: Program) -> list[StepResult]:
    with launch_inline(program) as run:
        return [run.step(batch) for batch in batches(PAIR, 6)]


def pids_of(run: RecoveringRun) -> list[int]:
    assert isinstance(run.starter, RayStarter) and run.starter.group is not None
    return [location.process for location in run.starter.group.locations.values()]


def test_a_killed_actor(program: Program, wanted: list[StepResult]) -> None:
    events: list[Event] = []
    with recovering(program, "ray", Options(), retries=3, notify=events.append) as run:
        got = []
        for number, batch in enumerate(batches(PAIR, 6)):
            if number == 3:
                os.kill(pids_of(run)[1], signal.SIGKILL)
            got.append(run.step(batch))
    assert got == wanted
    assert [(e.event, e.source) for e in events] == [("failure", None), ("recovery", "memory")]


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """Three raylets on this machine. The head has no room for workers, the others for two each."""
    with launcher.loopback():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=2)
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        made.wait_for_nodes(timeout=120)
    yield made
    ray.shutdown()
    made.shutdown()  # type: ignore[no-untyped-call]


def test_a_lost_node_is_replaced_by_a_spare(
    program: Program, wanted: list[StepResult], nodes: Cluster
) -> None:
    events: list[Event] = []
    with recovering(program, "ray", Options(), retries=3, notify=events.append, spares=2) as run:
        got = []
        for number, batch in enumerate(batches(PAIR, 6)):
            if number == 3:
                assert isinstance(run.starter, RayStarter) and run.starter.group is not None
                used = {location.node for location in run.starter.group.locations.values()}
                assert len(used) == 1, "the spares are on the other node"
                (lost,) = [node for node in nodes.worker_nodes if node.node_id in used]
                nodes.remove_node(lost, allow_graceful=False)
            got.append(run.step(batch))
        assert isinstance(run.starter, RayStarter) and run.starter.group is not None
        again = {location.node for location in run.starter.group.locations.values()}
    assert got == wanted
    assert again.isdisjoint(used)
    assert [e.event for e in events] == ["failure", "recovery"]


def test_spares_that_are_not_there_are_missed_before_training(
    program: Program, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GROUP", 2.0)
    began = time.monotonic()
    with (
        pytest.raises(
            LaunchError, match=r"^launch: the cluster has no room for all workers\n  needs: 7 CPU\n"
        ),
        recovering(program, "ray", Options(), retries=3, spares=5),
    ):
        pass
    assert time.monotonic() - began < 60
    assert not list(Path("/dev/shm").glob("piper*"))
