"""Versions that agents hold: found on any of them, and brought along when a device changes its agent."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from piper.errors import LaunchError
from piper.launchers.agent_calls import Agent
from piper.launchers.agent_versions import AgentVersions
from piper.launchers.agent_workers import AgentWorkerGroup
from piper.launchers.inline import InlineRun, launch_inline
from piper.launchers.processes import RankEnvironment
from piper.launchers.torchrun_agents import RankAgent, RankCalls, RemoteAgent
from piper.recovery.flushing import write_version
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, compiled

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
    """As that of a straggler, whose agent still answers. The versions of one that is lost are lost with it."""
    versions, (first, second, third) = hired.versions, hired.agents
    versions.place({0: first, 1: second})
    assert versions.newest() is None
    run = InlineRun(compiled(PAIR), Options(), versions.files_of(0))
    run.protect()
    given = batches(PAIR, 4)
    for batch in given[:3]:
        run.step(batch)
    unread = dict(run.unread)
    run.close()
    assert versions.newest() == 3
    if lost:
        versions.lost.add(1)
    versions.place({0: first, 1: third})
    assert versions.files_of(0)[1] == versions.files_of(1)[1]
    assert versions.newest() == (None if lost else 3)
    if not lost:
        again = InlineRun(compiled(PAIR), Options(blank=True), versions.files_of(0))
        again.restore(3, unread)
        result = again.step(given[3])
        again.close()
        with launch_inline(compiled(PAIR)) as whole:
            assert [whole.step(batch) for batch in given][3] == result


def test_an_agent_that_is_lost_after_a_version_was_chosen(hired: Hired, tmp_path: Path) -> None:
    """What it held is looked for again: a failure as any other, which is not the same as the one before it.

    A checkpoint of that version is not begun.
    """
    versions, (first, second, _) = hired.versions, hired.agents
    versions.place({0: first, 1: second})
    run = InlineRun(compiled(PAIR), Options(), versions.files_of(0))
    run.protect()
    run.close()
    assert versions.newest() == 0
    group = AgentWorkerGroup(compiled(PAIR), Options(), {0: first, 1: second}, versions.calls, versions)
    second.actor.close()

    def write() -> None:
        write_version(compiled(PAIR), versions, 0, tmp_path / "step-00000000", unread={}, data=None)

    for act in (lambda: versions.share(0), lambda: versions.parts(0), group.sharing(0).__enter__, write):
        with pytest.raises(LaunchError) as caught:
            act()
        assert caught.value.what == "the state after step 0 is lost with a machine that held it"
    assert versions.newest() is None
    assert not [*tmp_path.iterdir()]
