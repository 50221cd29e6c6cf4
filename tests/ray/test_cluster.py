"""Ray itself: several nodes, actors that are lost, and nothing left behind."""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

from piper.compiler import Program, compile
from piper.errors import LaunchError, WorkerError
from piper.run.launch import launch_inline
from piper.run.launch import launcher as launch_on
from piper.run.run import Run
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers import ray as launcher
from piper.workers.driver import AgentWorkerGroup
from tests.ray.test_own import exposed, listening
from tests.runtime.grid import Cell, batches, job
from tests.workers import sabotage
from tests.workers.bounds import set_timeouts
from tests.workers.family import family
from tests.workers.sabotage import Sabotaged

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
CELL = Cell(case="mlp", schedule="1f1b", dp=2, zero=2)
PAIR = Cell(case="mlp", schedule="1f1b", dp=1)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """Two raylets on this machine, each with room for two workers."""
    before = listening()
    with launcher.loopback():
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        ray.init(address=nodes.address, logging_level=logging.ERROR, log_to_driver=False)
        nodes.wait_for_nodes(timeout=120)
    assert not exposed(before)
    yield
    ray.shutdown()
    nodes.shutdown()  # type: ignore[no-untyped-call]


def group_of(run: Run) -> AgentWorkerGroup:
    assert isinstance(run.session.group, AgentWorkerGroup)
    return run.session.group


def pids_of(run: Run) -> list[int]:
    return [*group_of(run).processes.values()]


def gone(pids: list[int]) -> bool:
    """Whether processes have ended, or do so within a few seconds."""
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_two_nodes_give_the_bits_of_threads(two_nodes: None) -> None:
    program = compile(job(CELL))
    with launch_inline(program) as run:
        wanted = [run.step(batch) for batch in batches(CELL, 2)]
        state = run.state_dict()
    with launch_on(program, "ray", Options()) as run:
        assert len({agent.node for agent in group_of(run).agents.values()}) == 2
        assert [run.step(batch) for batch in batches(CELL, 2)] == wanted
        assert all(torch.equal(value, state[name]) for name, value in run.state_dict().items())
        pids = pids_of(run)
    assert gone(pids)
    assert ray.is_initialized(), "a Ray that was there stays"


def failing(program: ProgramLike, options: Options) -> str:
    with launch_on(program, "ray", options) as run:
        pids = pids_of(run)
        with pytest.raises(WorkerError) as caught:
            for batch in batches(PAIR, 2):
                run.step(batch)
    assert gone(pids)
    return re.sub(r"process \d+", "process N", str(caught.value))


@pytest.fixture(scope="module")
def pair() -> Program:
    return compile(job(PAIR))


def test_a_killed_actor(two_nodes: None, pair: Program) -> None:
    text = failing(Sabotaged(program=pair, arg="F PP=1", act=sabotage.die), Options())
    assert text.startswith("device 1 (process N): the process was killed by SIGKILL\n")
    assert ", compute on stream compute: F[PP=1 MB=1]\n" in text


def test_a_stopped_actor(two_nodes: None, pair: Program) -> None:
    began = time.monotonic()
    text = failing(Sabotaged(program=pair, arg="F PP=1", act=sabotage.stop), Options(timeout=150))
    assert time.monotonic() - began < 100, "nobody waits for the timeout"
    assert text.startswith("device 1 (process N): the process is stopped by a signal\n")
    assert ", compute on stream compute: F[PP=1 MB=1]\n" in text


def test_a_stuck_actor(two_nodes: None, pair: Program) -> None:
    text = failing(Sabotaged(program=pair, arg="F PP=1", act=sabotage.sleep), Options(timeout=5))
    assert text.startswith("device 1 (process N): F[PP=1 MB=1] has not ended, and others waited 5 s for it\n")


def test_an_actor_that_is_killed_between_steps(two_nodes: None, pair: Program) -> None:
    with launch_on(pair, "ray", Options()) as run:
        run.step(batches(PAIR, 1)[0])
        pids = pids_of(run)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(
            WorkerError, match=r"^device 0 \(process \d+\): the process was killed by SIGKILL"
        ):
            run.step(batches(PAIR, 1)[0])
    assert gone(pids)


DRIVER = """
import sys, time
import ray
from piper.compiler import compile
from piper.run.launch import launcher as launch_on
from piper.workers.ray import loopback
from piper.runtime.worker import Options
from tests.ray.test_cluster import PAIR
from tests.runtime.grid import batches, job
with loopback():
    ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
with launch_on(compile(job(PAIR)), "ray", Options()) as run:
    run.step(batches(PAIR, 1)[0])
    print(*run.session.group.processes.values(), flush=True)
    time.sleep(300)
"""


def test_a_driver_that_is_killed_leaves_nothing_in_a_cluster(two_nodes: None) -> None:
    """Neither actors nor placement groups, though the cluster goes on."""
    root = Path(__file__).parents[2]
    with family() as drivers:
        address = ray.get_runtime_context().gcs_address
        driver = drivers.start(
            [sys.executable, "-c", DRIVER, address], env={**os.environ, "PYTHONPATH": str(root)}, fresh=True
        )
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2, driver.communicate(timeout=30)[1]
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(driver.pid, signal.SIGKILL)
        assert gone(pids)
        until = time.monotonic() + 30
        while time.monotonic() < until and any(map(held, ray.util.placement_group_table().values())):
            time.sleep(0.2)
        assert not any(map(held, ray.util.placement_group_table().values()))
        assert not [actor for actor in actors().values() if actor["State"] != "DEAD"]


def held(group: dict[str, str]) -> bool:
    return group["state"] != "REMOVED"


def test_no_room(two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, "ray", machines_come=1.0)
    big = Cell(case="mlp", schedule="none", dp=4, rows=1)
    with pytest.raises(LaunchError) as caught, launch_on(compile(job(big)), "ray", Options()):
        pass
    assert str(caught.value) == cleandoc("""
        launch: the cluster has no room for all workers
          needs: 8 CPU
          has:   4 CPU
          hint:  wait until other jobs have ended, add nodes, or place the job on fewer devices
    """)
