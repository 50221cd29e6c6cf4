"""Machines that are short of shared memory: passed over while there is another one, and the end where not."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import cleandoc

import pytest

from piper.errors import ConfigError, LaunchError
from piper.ir.format import size
from piper.run import launch
from piper.runtime.worker import Options
from piper.workers import agent_starter
from piper.workers.agent import Agent
from piper.workers.agent_starter import AgentStarter
from piper.workers.agent_versions import ShortMachine
from piper.workers.driver import AgentWorkerGroup
from piper.workers.processes import ProcessStatus
from piper.workers.rank_agent import RankAgent
from piper.workers.rank_environment import RankEnvironment
from piper.workers.torchrun import RankCalls, RemoteAgent
from tests.runtime.grid import Cell, compiled
from tests.workers.bounds import set_timeouts

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
WORLD = RankEnvironment(rank=0, size=4, local=0, nearby=4, address="127.0.0.1", port=1)
PLENTY, LITTLE = 2**40, 2**10  # bytes


class Machine(RankAgent):
    """An agent without a fork server, on a machine with as much memory as the test says."""

    def __init__(self, free: int | None) -> None:
        super().__init__(b"")
        self.free = free

    def warm(self) -> None:
        pass

    def look(self) -> ProcessStatus:
        return ProcessStatus(process=0)

    def room(self) -> int | None:
        return self.free


@dataclass
class Machines:
    """A machine for each amount of memory. Agents of some of them may be on one node."""

    free: list[int | None]
    nodes: list[int] | None = None
    made: list[Machine] = field(default_factory=list)

    def agents(self) -> dict[int, Agent]:
        self.made = [Machine(free) for free in self.free]
        nodes = self.nodes or [*range(len(self.free))]
        return {
            n: Agent(
                actor=RemoteAgent(one.answer, one.close),
                node=f"node {nodes[n]}",
                address=f"10.0.0.{nodes[n]}",
            )
            for n, one in enumerate(self.made)
        }


class Cluster(AgentStarter):
    """All machines of a test, each with a bundle for one device."""

    def __init__(self, machines: Machines) -> None:
        program = compiled(PAIR)
        super().__init__(program, RankCalls(WORLD), True)
        self.there = machines.agents()

    def _hire(self) -> None:
        for bundle in self.there.keys() - self.bundles.keys():
            self._take(bundle, (self.there[bundle],))

    def _lacking(self) -> Exception:
        raise AssertionError("what is lacking is memory")

    def close(self) -> None:
        assert self.versions is not None
        for agent in self.there.values():
            agent.actor.close()
        self.versions.close()

    def placed(self) -> list[str]:
        """Return where the devices start, as `start` has it, without a worker."""
        agents = self._agents()
        self._place(agents)
        self.group = AgentWorkerGroup(self, Options(), agents, self.calls)
        return [agent.address for _, agent in sorted(agents.items())]

    def lose(self, bundle: int) -> None:
        self.there.pop(bundle).actor.close()


Make = Callable[[Machines], Cluster]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    set_timeouts(monkeypatch, "agent_starter", machines_come=0.3, agent_poll=0.05, agents_settle=0.2)
    made: list[Cluster] = []

    def make(machines: Machines) -> Cluster:
        made.append(Cluster(machines))
        return made[-1]

    yield make
    for one in made:
        one.close()


def passed(cluster: Cluster) -> list[str]:
    return [cluster.passed_over.popleft().address for _ in range(len(cluster.passed_over))]


def test_a_spare_that_is_short_of_memory_is_passed_over_for_another(cluster: Make) -> None:
    made = cluster(Machines([PLENTY, PLENTY, LITTLE, None]))
    assert made.placed() == ["10.0.0.0", "10.0.0.1"] and passed(made) == []
    made.lose(1)
    assert made.placed() == ["10.0.0.0", "10.0.0.3"], "one whose memory has no bound of its own"
    assert made.versions is not None
    seen = made.passed_over.popleft()
    assert seen == ShortMachine(address="10.0.0.2", needs=made.versions.needs[1], has=LITTLE)
    assert not made.passed_over


def test_a_machine_is_passed_over_before_training_starts_too(cluster: Make) -> None:
    made = cluster(Machines([LITTLE, PLENTY, PLENTY]))
    assert made.placed() == ["10.0.0.1", "10.0.0.2"] and passed(made) == ["10.0.0.0"]


def test_where_no_other_spare_is_left_one_message_says_so(cluster: Make) -> None:
    machines = Machines([PLENTY, PLENTY, LITTLE, 2 * LITTLE])
    made = cluster(machines)
    made.placed()
    made.lose(1)
    with pytest.raises(ConfigError) as caught:
        made.placed()
    assert passed(made) == ["10.0.0.2", "10.0.0.3"], "each once"
    assert str(caught.value) == cleandoc("""
        --retries, on /dev/shm of 10.0.0.3: there is too little shared memory to keep versions of the state in
          needs: 2.0 MiB: two versions of what each device owns
          has:   2.0 KiB
          hint:  enlarge it (mount -o remount,size=... /dev/shm), or train without: --retries 0
    """)
    machines.made[2].free = PLENTY
    assert made.placed() == ["10.0.0.0", "10.0.0.2"], "it is asked again"
    made.lose(3)
    made.room()
    assert not any(bundle.short for bundle in made.bundles.values()), (
        "one that is lost is not what is lacking"
    )


def test_a_job_that_never_ran_is_refused_at_once(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_starter, "sleep", lambda seconds: pytest.fail("it waits for machines"))
    made = cluster(Machines([PLENTY, LITTLE]))
    with pytest.raises(ConfigError, match="too little shared memory"):
        made.placed()


def test_there_is_no_room_on_a_machine_that_is_short_of_memory(cluster: Make) -> None:
    """An elastic job goes on with fewer devices then, and with all of them once there is memory."""
    machines = Machines([PLENTY, PLENTY, LITTLE])
    made = cluster(machines)
    assert made.room() == 3, "as many as would do"
    made.placed()
    made.lose(0)
    assert made.room() == 1 and passed(made) == ["10.0.0.2"]
    assert made.room(warm=True) == 1
    machines.made[2].free = PLENTY
    assert made.room(warm=True) == 2


def test_a_machine_may_have_memory_for_some_of_its_devices(cluster: Make) -> None:
    made = cluster(Machines([0, 0, PLENTY], nodes=[0, 0, 1]))
    assert made.versions is not None
    for one in made.there.values():
        one.actor.ask.__self__.free = made.versions.needs[0] if one.node == "node 0" else PLENTY
    assert made.placed() == ["10.0.0.0", "10.0.0.1"] and passed(made) == ["10.0.0.0"]


def test_what_agents_hold_for_another_layout_counts_as_free(cluster: Make) -> None:
    """They give it back when they take the memory of the next one, and at once if they have no device."""
    machines = Machines([PLENTY, PLENTY, PLENTY], nodes=[0, 0, 0])
    made = cluster(machines)
    made.placed()
    before, plans = made.versions, compiled(PAIR).plans
    assert before is not None
    for device, bundle in made.used.items():
        os.posix_fallocate(machines.made[bundle].memory[device][0], 0, sum(before.needs.values()))
    machines.made[0].free = 0
    made.use(compiled(PAIR), before.of(plans), ())
    assert made.placed() == 2 * ["10.0.0.0"] and passed(made) == []
    assert all(one.held("another") < before.needs[0] for one in machines.made)
    made.used = {0: 1, 1: 2}
    assert made.placed() == 2 * ["10.0.0.0"] and set(made.used.values()) == {1, 2}
    made.there[0].actor.look.remote().result(20)  # calls are answered one after the other
    assert machines.made[0].memory == {}
    before.close()


def test_an_agent_that_is_lost_meanwhile_is_not_short(cluster: Make) -> None:
    made = cluster(Machines([PLENTY, PLENTY]))
    assert made.versions is not None
    agents = {0: made.there[0], 1: made.there[1]}
    agents[1].actor.close()
    assert made.versions.short(agents) == {}


@pytest.mark.parametrize("on", ["inline", "local"])
@pytest.mark.parametrize("protects", [False, True])
def test_a_job_that_is_too_large_for_the_machine_is_refused(
    on: str, protects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(PAIR)
    needs = sum(slot.nbytes for plan in program.plans for slot in plan.residents.values())
    assert len(program.plans.devices) == len([*program.plans]) == 2
    monkeypatch.setattr(launch, "machine_memory", lambda: needs)
    launch.starter_of(program, on, protects=protects)
    monkeypatch.setattr(launch, "machine_memory", lambda: needs - 1)
    with pytest.raises(LaunchError) as caught:
        launch.starter_of(program, on, protects=protects)
    assert str(caught.value) == cleandoc(f"""
        launch: the job is too large for this machine
          needs: {size(needs)}: parameters and optimizer state of 2 devices
          has:   {size(needs - 1)}
          hint:  shard more (zero=3), train a smaller model, or take more machines: --on ray, or torchrun
    """)
