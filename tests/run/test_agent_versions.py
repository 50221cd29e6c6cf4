"""Versions that agents hold: found on any of them, and brought along when a device changes its agent."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from piper.compiler import Program, compile
from piper.directives import protect
from piper.errors import LaunchError
from piper.ir.select import at
from piper.run.driver_checkpoints import write_version
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from piper.workers.agent import Agent
from piper.workers.agent_versions import AgentVersions
from piper.workers.driver import AgentWorkerGroup
from piper.workers.group import Starter
from piper.workers.rank_agent import AgentLostError, RankAgent
from piper.workers.rank_environment import RankEnvironment
from piper.workers.torchrun import RankCalls, RemoteAgent
from tests.runtime.grid import Cell, batches, compiled, job, strategy

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
WORLD = RankEnvironment(rank=0, size=3, local=0, nearby=3, address="127.0.0.1", port=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hired:
    """Three agents of this machine, and the memory of a run on two devices."""

    versions: AgentVersions
    agents: list[Agent]


@pytest.fixture
def hired() -> Iterator[Hired]:
    machines = [RankAgent(b"") for _ in range(3)]
    agents = [
        Agent(actor=RemoteAgent(one.answer, one.close), node="here", address="127.0.0.1") for one in machines
    ]
    versions = AgentVersions(compiled(PAIR).plans, RankCalls(WORLD))
    yield Hired(versions=versions, agents=agents)
    for agent in agents:
        agent.actor.close()
    versions.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_device_that_changes_its_agent_brings_its_versions(hired: Hired, lost: bool) -> None:
    """Of one whose agent still answers. The versions of one that is lost are lost with it."""
    versions, (first, second, third) = hired.versions, hired.agents
    versions.place({0: first, 1: second})
    assert versions.newest() is None
    run = launch_inline(compiled(PAIR), Options(), versions.files_of(0))
    run.session.protect()
    given = batches(PAIR, 4)
    for batch in given[:3]:
        run.step(batch)
    unread = dict(run.session.unread)
    run.close()
    assert versions.newest() == 3
    if lost:
        versions.lost.add(1)
    versions.place({0: first, 1: third})
    assert versions.files_of(0)[1] == versions.files_of(1)[1]
    assert versions.newest() == (None if lost else 3)
    if not lost:
        again = launch_inline(compiled(PAIR), Options(blank=True), versions.files_of(0))
        again.session.restore(3, unread)
        result = again.step(given[3])
        again.close()
        with launch_inline(compiled(PAIR)) as whole:
            assert [whole.step(batch) for batch in given][3] == result


@pytest.mark.parametrize("when", ["keep", "take"])
def test_an_agent_that_is_lost_while_another_device_changes_its_agent(hired: Hired, when: str) -> None:
    """The versions that were to be moved stay where they are, and are moved with the next start."""
    versions, (first, second, third) = hired.versions, hired.agents
    versions.place({0: first, 1: second})
    run = launch_inline(compiled(PAIR), Options(), versions.files_of(0))
    run.session.protect()
    run.step(batches(PAIR, 1)[0])
    run.close()
    assert versions.newest() == 1
    lost = Losing(third.actor, when)
    with pytest.raises(AgentLostError):
        versions.place({0: first, 1: Agent(actor=lost, node="here", address="127.0.0.1")})
    assert lost.lost and versions.newest() == 1
    versions.place({0: first, 1: third})
    assert versions.newest() == 1


@dataclass
class Losing:
    """An agent that is lost when one of its methods is called with something to hold."""

    actor: RemoteAgent
    when: str
    lost: bool = False

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=self._lose) if name == self.when else method

    def _lose(self, *arguments: object) -> "Future[object]":
        self.lost, call = True, Future[object]()
        call.set_exception(AgentLostError("the machine is lost"))
        return call


def test_what_an_agent_held_in_an_earlier_time_is_not_taken(hired: Hired) -> None:
    """It could not be reached when the job went back to a checkpoint, and comes back with the same steps."""
    versions, (first, second, third) = hired.versions, hired.agents
    versions.place({0: first, 1: second})
    for given in batches(PAIR, 2)[:1], batches(PAIR, 2)[1:]:
        run = launch_inline(compiled(PAIR), Options(), versions.files_of(0))
        run.session.protect()
        run.step(given[0])
        run.close()
        assert versions.newest() == 1
        if versions.agents[1] is second:
            versions.lost.add(1)
            versions.place({0: first, 1: third})
            versions.forget(lambda step: True)
    versions.lost.add(1)
    versions.place({0: first, 1: second})
    assert versions.newest() is None


def on_two_machines() -> Program:
    """Two stages of two devices each. The copies of a machine's devices are on the other one."""
    cell = Cell(case="mlp", schedule="1f1b", dp=2, zero=1)
    asked = protect(at(), copies=1, devices_per_machine=2)
    return compile(job(cell, strategy=[*strategy(cell), asked], data=lambda: batches(cell, 4)))


def test_machines_of_two_devices_keep_copies_for_each_other() -> None:
    """One is lost, both devices go to a third machine, and what they take comes from the other one alone."""
    program, cell = on_two_machines(), Cell(case="mlp", schedule="1f1b", dp=2, zero=1)
    given = batches(cell, 4)
    made = [RankAgent(b"") for _ in range(6)]
    agents = [
        Agent(actor=RemoteAgent(one.answer, one.close), node=f"node {n // 2}", address=f"10.0.0.{n // 2}")
        for n, one in enumerate(made)
    ]
    versions = AgentVersions(program.plans, RankCalls(WORLD))
    versions.place(dict(enumerate(agents[:4])))
    run = launch_inline(program, Options(), {d: versions.files_of(d)[d] for d in range(4)})
    run.session.protect()
    for batch in given[:3]:
        run.step(batch)
    unread = dict(run.session.unread)
    run.close()
    assert versions.newest() == 2, "the step that is under way makes the version"
    for agent in agents[2:4]:
        agent.actor.close()
    versions.lost |= {2, 3}
    assert versions.newest() == 2
    versions.place({0: agents[0], 1: agents[1], 2: agents[4], 3: agents[5]})
    assert versions.newest() == 2 and versions.whole
    with launch_inline(program) as whole:
        wanted = [whole.step(batch) for batch in given]
    for device in (0, 2):  # what the workers of each machine see
        versions.share(2)
        again = launch_inline(program, Options(blank=True), versions.files_of(device))
        again.session.restore(2, unread)
        with again:
            assert [again.step(batch) for batch in given[2:]] == wanted[2:]
        versions.shrink()
        for lead in agents[0], agents[4]:
            lead.actor.look.remote().result(20)  # calls are answered one after the other
        assert all(os.fstat(f).st_size == 0 for d in (2, 3) for f in made[0].memory[d])
        versions.forget(lambda step: step > 2)
    for agent in agents:
        agent.actor.close()
    versions.close()


def test_an_agent_that_is_lost_after_a_version_was_chosen(hired: Hired, tmp_path: Path) -> None:
    """What it held is looked for again: a failure as any other, which is not the same as the one before it.

    A checkpoint of that version is not begun.
    """
    versions, (first, second, _) = hired.versions, hired.agents
    versions.place({0: first, 1: second})
    run = launch_inline(compiled(PAIR), Options(), versions.files_of(0))
    run.session.protect()
    run.close()
    assert versions.newest() == 0
    starter = Starter(compiled(PAIR), versions)
    group = AgentWorkerGroup(starter, Options(), {0: first, 1: second}, versions.calls)
    second.actor.close()

    def write() -> None:
        write_version(compiled(PAIR), versions, 0, tmp_path / "step-00000000", unread={}, data=None)

    for act in (lambda: versions.share(0), lambda: versions.saved(0, 0), group.sharing(0).__enter__, write):
        with pytest.raises(LaunchError) as caught:
            act()
        assert caught.value.what == "the state after step 0 is lost with a machine that held it"
    assert versions.newest() is None
    assert not [*tmp_path.iterdir()]
