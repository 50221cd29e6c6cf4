"""Actors that are lost are replaced: from memory on one machine, on a spare where a node is lost."""

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from piper.compiler import Program, compile
from piper.directives import protect
from piper.errors import ConfigError, LaunchError, WorkerError
from piper.ir.select import at
from piper.job import Job
from piper.launchers import ray as launcher
from piper.launchers.agent_workers import AgentWorkerGroup
from piper.launchers.base import StepResult
from piper.launchers.inline import launch_inline
from piper.launchers.ray import RayStarter
from piper.recovery.recovering_run import RecoveringRun, recovering
from piper.recovery.run_events import Event
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job, strategy

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


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """Start four raylets on this machine. The head has no room for workers, the others for one each."""
    with launcher.loopback():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(3):
            made.add_node(num_cpus=1)
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        made.wait_for_nodes(timeout=120)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with three_nodes() as made:
        yield made


def protected() -> Job:
    """Both stages on machines of their own, and the state of each on the other one too."""
    asked = protect(at(), copies=1, devices_per_machine=1)
    return job(PAIR, strategy=[*strategy(PAIR), asked])


@pytest.fixture(scope="module")
def copied() -> Program:
    return compile(protected())


def group_of(run: RecoveringRun) -> AgentWorkerGroup:
    assert isinstance(run.starter, RayStarter) and run.starter.group is not None
    return run.starter.group


def lose(nodes: Cluster, run: RecoveringRun, device: int) -> str:
    """Kill the node of a device. Return its name."""
    where = group_of(run).locations[device].node
    (lost,) = [node for node in nodes.worker_nodes if node.node_id == where]
    nodes.remove_node(lost, allow_graceful=False)
    return where


def test_a_lost_node_is_replaced_by_a_spare(
    copied: Program, wanted: list[StepResult], nodes: Cluster
) -> None:
    """The other node holds the copy of what was lost."""
    events: list[Event] = []
    with recovering(copied, "ray", Options(), retries=3, notify=events.append, spares=1) as run:
        got = []
        for number, batch in enumerate(batches(PAIR, 6)):
            if number == 3:
                assert len({location.node for location in group_of(run).locations.values()}) == 2
                lost = lose(nodes, run, 1)
            got.append(run.step(batch))
        again = {location.node for location in group_of(run).locations.values()}
    assert got == wanted
    assert len(again) == 2 and lost not in again
    assert [(e.event, e.device, e.source) for e in events] == [
        ("failure", 1, None),
        ("recovery", None, "memory"),
    ]


def test_a_lost_node_without_copies_is_said(program: Program, nodes: Cluster) -> None:
    with (
        pytest.raises(WorkerError) as caught,
        recovering(program, "ray", Options(), retries=3, spares=1) as run,
    ):
        run.step(batches(PAIR, 1)[0])
        lose(nodes, run, 1)
        for _ in range(100_000):  # its processes end some moments after it
            run.step(batches(PAIR, 1)[0])
    assert re.sub(r"step \d+", "step N", str(caught.value)) == cleandoc("""
        recovery, after step N: no version of the state is complete in memory
          hint: --resume goes on from the newest checkpoint
    """)


def test_machines_that_are_not_there_are_missed_before_training(
    program: Program, copied: Program, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spares, and machines for copies that are apart."""
    monkeypatch.setattr(launcher, "GROUP", 2.0)
    for asked, spares, text in (
        (
            program,
            5,
            """
            launch: the cluster has no room for all workers
              needs: 7 CPU
              has:   3 CPU
              hint:  wait until other jobs have ended, add nodes, or place the job on fewer devices
            """,
        ),
        (
            copied,
            2,
            """
            launch: the cluster has too few machines to keep copies of the state apart
              needs: 4 machines, spares included, with 1 CPU each
              has:   3 with that room
              hint:  add machines, or keep copies on other devices: protect(at(), copies=1, apart="device")
            """,
        ),
    ):
        with (
            pytest.raises(LaunchError) as caught,
            recovering(asked, "ray", Options(), retries=3, spares=spares),
        ):
            pass
        assert str(caught.value) == cleandoc(text)
    monkeypatch.setattr("piper.launchers.agent_versions.version_bytes", lambda plans, device: 2**60)
    with (
        pytest.raises(ConfigError, match="there is too little shared memory to keep versions") as refused,
        recovering(copied, "ray", Options(), retries=3),
    ):
        pass
    assert refused.value.by.startswith("--retries, on /dev/shm of ")
    assert not list(Path("/dev/shm").glob("piper*"))
