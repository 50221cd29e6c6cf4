"""Machines that join a running job: their agents are warm before one of them is needed."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from piper.errors import LaunchError
from piper.workers.agent import Agent
from piper.workers.agent_starter import AgentStarter
from piper.workers.rank_agent import AgentLostError
from piper.workers.rank_environment import RankEnvironment
from piper.workers.torchrun import RankCalls
from tests.runtime.grid import Cell, compiled
from tests.workers.bounds import set_timeouts

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
WORLD = RankEnvironment(rank=0, size=3, local=0, nearby=3, address="127.0.0.1", port=1)
BOUND = 20.0  # seconds that a thread may take to do what it is about to do


class Actor:
    """An agent that becomes warm when the test says so, and answers until it is lost."""

    def __init__(self) -> None:
        self.importing: Future[None] = Future()
        self.alive = True

    @property
    def warm(self) -> "Method":
        return Method(lambda: self.importing)

    @property
    def look(self) -> "Method":
        return Method(self._look)

    def _look(self) -> "Future[None]":
        seen: Future[None] = Future()
        if self.alive:
            seen.set_result(None)
        else:
            seen.set_exception(AgentLostError("the machine is lost"))
        return seen


class Method:
    def __init__(self, begin: "Callable[[], Future[None]]") -> None:
        self.begin = begin

    def remote(self) -> "Future[None]":
        return self.begin()


class Cluster(AgentStarter):
    """Agents of machines that a test adds and takes away."""

    def __init__(self) -> None:
        super().__init__(compiled(PAIR), RankCalls(WORLD), False)
        self.there: dict[int, Agent] = {}  # by bundle

    def join(self, bundle: int, *, warm: bool = False, node: int | None = None) -> Actor:
        actor, machine = Actor(), bundle if node is None else node
        if warm:
            actor.importing.set_result(None)
        self.there[bundle] = Agent(actor=actor, node=f"node {machine}", address=f"10.0.0.{machine}")
        return actor

    def _hire(self) -> None:
        self.bundles = {b: one for b, one in self.bundles.items() if one.agents == (self.there.get(b),)}
        for bundle in self.there.keys() - self.bundles.keys():
            self._take(bundle, (self.there[bundle],))

    def _lacking(self) -> Exception:
        return LaunchError("too few", by="test", hint="none")

    def chosen(self) -> list[str]:
        """Return where the devices would start now."""
        return [agent.address for _, agent in sorted(self._agents().items())]


def reported(cluster: Cluster) -> list[str]:
    return [cluster.warmed.popleft()[0] for _ in range(len(cluster.warmed))]


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_agent_of_a_machine_that_joins_is_reported_once_it_is_warm() -> None:
    cluster = Cluster()
    cluster.join(0, warm=True)
    cluster.join(1, warm=True)
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.1"]
    assert not cluster._notice() and reported(cluster) == [], "those that have workers are no spares"
    joined = cluster.join(2)
    assert cluster._notice(), "it imports torch"
    assert reported(cluster) == []
    joined.importing.set_result(None)
    assert not cluster._notice()
    address, seconds = cluster.warmed.popleft()
    assert address == "10.0.0.2" and seconds > 0
    assert not cluster._notice() and reported(cluster) == []


def test_an_agent_that_was_waited_for_and_not_used_is_a_spare_that_is_reported() -> None:
    cluster = Cluster()
    cluster.join(0, warm=True)
    slow, quick = cluster.join(1), cluster.join(2)
    slow._look = Future  # type: ignore[method-assign]  # it does not answer for now
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(cluster.chosen)
        wait_until(lambda: 1 in cluster.bundles)
        for actor in (quick, slow):
            actor.importing.set_result(None)
        assert starting.result(BOUND) == ["10.0.0.0", "10.0.0.2"]
    cluster._notice()
    assert reported(cluster) == ["10.0.0.1"]


def test_an_agent_that_is_lost_before_it_is_warm_is_not_reported() -> None:
    cluster = Cluster()
    lost, gone = cluster.join(0), cluster.join(1)
    assert cluster._notice()
    lost.importing.set_exception(AgentLostError("the machine is lost"))
    del cluster.there[1]
    assert not cluster._notice() and reported(cluster) == []
    assert not gone.importing.done()


def test_a_loss_uses_the_warm_agent_of_a_machine_that_joined() -> None:
    """Also where another one, which still imports torch, is in the bundle of the machine that was lost."""
    cluster = Cluster()
    for bundle in range(3):
        cluster.join(bundle, warm=True)
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.1"]
    cluster.join(1)  # its machine is lost, and another one is there instead
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.2"]
    assert cluster.waited == 0.0


def test_a_machine_keeps_its_bundle_when_another_one_is_lost() -> None:
    cluster = Cluster()
    for bundle in range(3):
        cluster.join(bundle, warm=True)
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.1"]
    cluster.there.pop(0)
    assert cluster.chosen() == ["10.0.0.2", "10.0.0.1"]
    cluster.join(0, warm=True)
    assert cluster.chosen() == ["10.0.0.2", "10.0.0.1"], "it is a spare now"


def test_a_start_waits_for_an_agent_that_is_not_warm_and_says_how_long() -> None:
    cluster = Cluster()
    cluster.join(0, warm=True)
    late = cluster.join(1)
    timer = threading.Timer(0.2, late.importing.set_result, (None,))
    timer.start()
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.1"]
    assert late.importing.done() and cluster.waited > 0
    timer.join()
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.1"] and cluster.waited == 0.0


def test_an_agent_that_is_lost_while_it_is_waited_for_gives_way_to_another() -> None:
    cluster = Cluster()
    cluster.join(0, warm=True)
    late = cluster.join(1)

    def lose() -> None:
        cluster.join(2, warm=True)
        del cluster.there[1]
        late.importing.set_exception(AgentLostError("the machine is lost"))

    timer = threading.Timer(0.2, lose)
    timer.start()
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.2"]
    timer.join()


def test_agents_that_never_become_warm_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they raise when they are to start a worker says more than that they are late."""
    set_timeouts(monkeypatch, "agent_starter", machines_come=0.1)
    cluster = Cluster()
    cluster.join(0)
    cluster.join(1)
    assert cluster.chosen() == ["10.0.0.0", "10.0.0.1"]
    del cluster.there[1]
    set_timeouts(monkeypatch, "agent_starter", agent_poll=0.05)
    with pytest.raises(LaunchError, match="too few"):
        cluster.chosen()


def test_a_cluster_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.join(0, warm=True)
    hire, silent = cluster._hire, [True]

    def ask() -> None:
        if silent.pop():
            raise TimeoutError
        hire()

    monkeypatch.setattr(cluster, "_hire", ask)
    assert cluster._notice() and reported(cluster) == []
    silent.append(False)
    assert not cluster._notice() and reported(cluster) == ["10.0.0.0"]


def test_machines_are_looked_for_between_steps_and_not_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, "agent_starter", agent_poll=1.0, warm_poll=0.25)
    cluster, looks, clock = Cluster(), list[float](), [0.0]
    monkeypatch.setattr("piper.workers.agent_starter.monotonic", lambda: clock[0])
    hire = cluster._hire

    def look() -> None:
        looks.append(clock[0])
        hire()

    def steps(*times: float) -> None:
        for clock[0] in times:
            cluster.notice()

    monkeypatch.setattr(cluster, "_hire", look)
    joined = cluster.join(7)
    steps(100.0, 100.125, 100.25)
    joined.importing.set_result(None)
    steps(100.5, 101.0, 101.5, 102.5)
    assert looks == [100.0, 100.25, 100.5, 101.5, 102.5], "more often while agents start"
    assert reported(cluster) == ["10.0.0.7"]
