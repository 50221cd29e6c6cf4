"""Actors that are lost are replaced: from memory on one machine, on a spare where a node is lost."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import cleandoc
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster
from torch import Tensor

from piper.compiler import Program, compile
from piper.directives import Directive, protect, replicate
from piper.errors import ConfigError, LaunchError, WorkerError
from piper.ir.select import at
from piper.job import Job
from piper.run.elastic import MOVED, ElasticRecovery
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run import Run
from piper.run.run_events import Event
from piper.runtime.worker import Options
from piper.train.train_options import sizes_of
from piper.workers import ray as launcher
from piper.workers.driver import AgentWorkerGroup
from piper.workers.processes import gone
from piper.workers.ray import RayStarter
from piper.workers.results import StepResult
from tests.run import test_elastic as elastic
from tests.run.recoveries import disk_with, elastic_of
from tests.runtime.grid import Cell, batches, job, strategy
from tests.workers.bounds import set_timeouts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
PAIR = Cell(case="mlp", schedule="1f1b", dp=1)


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(job(PAIR))


@pytest.fixture(scope="module")
def wanted(program: Program) -> list[StepResult]:
    with launch_inline(program) as run:
        return [run.step(batch) for batch in batches(PAIR, 6)]


def pids_of(run: Run) -> list[int]:
    assert isinstance(run.sessions.starter, RayStarter) and run.sessions.starter.group is not None
    return [*run.sessions.starter.group.processes.values()]


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
def head_node() -> Iterator[Cluster]:
    """Start a cluster whose head has no room for workers."""
    with launcher.loopback():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()  # type: ignore[no-untyped-call]


def add_nodes(head: Cluster, count: int = 3) -> Cluster:
    """Give a cluster so many raylets with room for one worker each. Those that were lost are started again."""
    with launcher.loopback():
        while len(head.worker_nodes) > count:
            head.remove_node(max(head.worker_nodes, key=lambda node: node.node_id))
        for _ in range(count - len(head.worker_nodes)):
            head.add_node(num_cpus=1)
        head.wait_for_nodes(timeout=120)
    return head


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """Start four raylets on this machine: a head, and three with room for one worker each."""
    with head_node() as head:
        yield add_nodes(head)


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    with head_node() as made:
        yield made


@pytest.fixture
def nodes(head: Cluster) -> Cluster:
    return add_nodes(head)


def protected() -> Job:
    """Both stages on machines of their own, and the state of each on the other one too."""
    asked = protect(at(), copies=1, devices_per_machine=1)
    return job(PAIR, strategy=[*strategy(PAIR), asked])


@pytest.fixture(scope="module")
def copied() -> Program:
    return compile(protected())


def group_of(run: Run) -> AgentWorkerGroup:
    assert isinstance(run.sessions.starter, RayStarter) and run.sessions.starter.group is not None
    return run.sessions.starter.group


def lose(nodes: Cluster, run: Run, device: int) -> str:
    """Kill the node of a device, and wait until its worker has ended with it. Return its name."""
    group, until = group_of(run), time.monotonic() + 60
    where = group.agents[device].node
    (lost,) = [node for node in nodes.worker_nodes if node.node_id == where]
    nodes.remove_node(lost, allow_graceful=False)
    while not gone(group.processes[device]):
        assert time.monotonic() < until
        time.sleep(0.01)
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
                assert len({agent.node for agent in group_of(run).agents.values()}) == 2
                lost = lose(nodes, run, 1)
            got.append(run.step(batch))
        again = {agent.node for agent in group_of(run).agents.values()}
    assert got == wanted
    assert len(again) == 2 and lost not in again
    assert [(e.event, e.device, e.source) for e in events if e.event != "warm"] == [
        ("failure", 1, None),
        ("recovery", None, "memory"),
    ]


def test_a_node_that_joins_is_warm_before_it_is_needed(copied: Program, nodes: Cluster) -> None:
    """The second loss is of a node whose place the one takes that has joined since, without waiting for torch."""
    events: list[Event] = []
    given = batches(PAIR, 6)
    with recovering(copied, "ray", Options(), retries=3, notify=events.append, spares=1) as run:
        got = [run.step(given[0])]
        train_until_warm(run, events, 1, given, got)
        for loss in (1, 2):
            lose(nodes, run, 1)
            while sum(e.event == "recovery" for e in events) < loss:
                got.append(run.step(given[len(got) % 6]))
            if loss == 1:
                nodes.add_node(num_cpus=1)
                train_until_warm(run, events, 2, given, got)
    recoveries = [e for e in events if e.event == "recovery"]
    assert [(e.source, "warm" in e.phases) for e in recoveries] == 2 * [("memory", False)], events
    with launch_inline(copied) as whole:
        assert got == [whole.step(given[number % 6]) for number in range(len(got))]


def train_until_warm(
    run: Run,
    events: Sequence[Event],
    count: int,
    given: Sequence[Mapping[str, Tensor]],
    got: list[StepResult],
) -> None:
    """Train until so many spares have become warm."""
    until = time.monotonic() + 120
    while sum(e.event == "warm" for e in events) < count:
        assert time.monotonic() < until, events
        got.append(run.step(given[len(got) % len(given)]))


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
    set_timeouts(monkeypatch, "ray", machines_come=2.0)
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
    monkeypatch.setattr(
        "piper.workers.agent_versions.version_bytes", lambda holders: dict.fromkeys(holders.devices, 2**60)
    )
    with (
        pytest.raises(ConfigError, match="there is too little shared memory to keep versions") as refused,
        recovering(copied, "ray", Options(), retries=3),
    ):
        pass
    assert refused.value.by.startswith("--retries, on /dev/shm of ")
    left = [path for path in Path("/dev/shm").glob("piper*") if not path.name.startswith(MOVED)]
    assert not left, "but for the states of elastic runs, which other tests may have"


def elastic_job(copies: bool) -> Job:
    """One stage on one device, or replicas on two that are on machines of their own."""

    def replicas(devices: Sequence[int]) -> list[Directive]:
        asked = protect(at(), copies=1, devices_per_machine=1)
        return [replicate(at(), devices, zero=1), *([asked] if copies and len(devices) > 1 else [])]

    return elastic.job(strategy=replicas, elastic=(1, 2))


@pytest.mark.parametrize("copies", [True, False])
def test_a_lost_node_without_a_spare_leaves_fewer_devices_until_one_comes(
    copies: bool, head: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state moves through a folder that all machines see, from the copy in memory or from a checkpoint."""
    monkeypatch.setattr("piper.run.elastic.REFILL", 4)
    monkeypatch.setattr(RayStarter, "near", False)
    set_timeouts(monkeypatch, "agent_starter", agents_settle=1.0)
    given, events, saved = elastic.batches(200), list[Event](), tmp_path / "step-3"
    disk = disk_with(
        folder=tmp_path, past=lambda last: [saved], batches=lambda found: iter(given[found.step :])
    )
    program = compile(elastic_job(copies))
    make = partial(ElasticRecovery, sizes=sizes_of(program, 1, 2))
    losses: list[float] = []
    nodes = add_nodes(head, 2)
    with recovering(program, "ray", Options(), retries=3, notify=events.append, disk=disk, make=make) as run:
        for batch in given:
            if len(losses) == 3:
                run.save(saved)
                lose(nodes, run, 1)
            losses.append(run.step(batch).loss)
            time.sleep(0.5 if len(losses) > 4 else 0)  # until a node has joined and its agent is warm
            if len(elastic_of(run).places) == 1 and len(nodes.worker_nodes) == 1:
                nodes.add_node(num_cpus=1)
            if len(elastic_of(run).places) == 2 and len(nodes.worker_nodes) == 2 and len(losses) > 4:
                break
        elastic.assert_plain(losses, run.state_dict())
    assert [event.what for event in events if event.event == "resize"] == [
        "going on with 1 device instead of 2: there is room for 1",
        "going on with 2 devices instead of 1: lost ones are tried",
    ]
    sources = [event.source for event in events if event.event == "recovery"]
    assert sources == (["memory", "memory"] if copies else [str(saved), "memory"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
