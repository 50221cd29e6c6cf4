"""Nodes that join a job of which nothing is missing: claimed as spares if the job wants them, and warm in time."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from piper.compiler import Program, compile
from piper.launchers import ray as launcher
from piper.launchers.inline import launch_inline
from piper.launchers.ray import RayStarter
from piper.recovery.recovering_run import recovering
from piper.recovery.run_events import Event
from piper.runtime.worker import Options
from tests.ray.test_recovery import PAIR, add_nodes, group_of, head_node, lose, protected, train_until_warm
from tests.runtime.grid import batches

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@dataclass
class Group:
    """A placement group of so many bundles, and where they are."""

    count: int
    target: str | None = None
    state: str = "CREATED"
    where: dict[int, str] = field(default_factory=dict)


@dataclass
class Scripted:
    """A cluster that does what a test says: its nodes, their free CPUs, and the groups that were asked for."""

    free: dict[str, float]
    groups: list[Group] = field(default_factory=list)
    removed: list[Group] = field(default_factory=list)
    now: float = 0.0

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": node, "NodeManagerAddress": node, "Alive": True} for node in self.free]

    def group(
        self, bundles: list[object], *, strategy: str, _soft_target_node_id: str | None = None
    ) -> Group:
        made = Group(count=len(bundles), target=_soft_target_node_id, state="PENDING")
        self.groups.append(made)
        return made

    def table(self, group: Group) -> Mapping[str, object]:
        return {"state": group.state, "bundles_to_node_id": group.where}

    def place(self, node: str | None = None) -> None:
        """Let Ray place the group that was asked for last."""
        last = self.groups[-1]
        last.state, last.where = "CREATED", {0: node or str(last.target)}

    @contextmanager
    def resources(self, bundles: int, bundle: object, *, apart: bool) -> Iterator[Group]:
        names = [*self.free]
        yield Group(count=bundles, where={n: names[n] for n in range(bundles)})


class Remote:
    """An actor whose calls are all answered."""

    def options(self, **given: object) -> "Remote":
        return self

    def remote(self, *given: object) -> "Remote":
        return self

    def __getattr__(self, name: str) -> "Remote":
        return self


@pytest.fixture(scope="module")
def copied() -> Program:
    return compile(protected())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    made = Scripted(free={"a": 1.0, "b": 1.0, "idle": 1.0})
    monkeypatch.setattr(ray, "nodes", made.nodes)
    monkeypatch.setattr(ray, "remote", lambda actor: Remote())
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "wait", lambda calls, **given: (calls, []))
    monkeypatch.setattr(ray, "get", lambda call, **given: None)
    for name, value in {
        "cluster": lambda devices: contextmanager(lambda: iter([None]))(),
        "resources": made.resources,
        "placement_group": made.group,
        "placement_group_table": made.table,
        "remove_placement_group": made.removed.append,
        "available_resources_per_node": lambda: {node: {"CPU": cpus} for node, cpus in made.free.items()},
        "PlacementGroupSchedulingStrategy": lambda group, **given: SimpleNamespace(group=group),
        "monotonic": lambda: made.now,
    }.items():
        monkeypatch.setattr(launcher, name, value)
    return made


def started(copied: Program, *, joining: bool = True) -> RayStarter:
    starter = RayStarter(copied, None, 0, joining=joining)
    starter._hire()
    starter._use([0, 1])
    return starter


def test_a_node_that_joins_is_claimed_once_it_has_room(copied: Program, scripted: Scripted) -> None:
    """Not one that was there when the job started: it was free to others then. And one of them is enough."""
    starter = started(copied)
    starter._hire()
    assert scripted.groups == []
    scripted.free |= {"busy": 0.0, "new": 1.0, "newer": 1.0}
    starter._hire()
    starter._hire()
    assert [group.target for group in scripted.groups] == ["new"] and 2 not in starter.agents
    scripted.place()
    starter._hire()
    assert starter.agents[2][0].node == "new" and starter._wanting() == 0
    starter._hire()
    assert len(scripted.groups) == 1 and scripted.removed == []
    starter._use([0, 2])
    del scripted.free["b"]  # Ray has not placed its bundle elsewhere: the next node is for that
    starter._hire()
    assert len(scripted.groups) == 1
    starter.close()
    assert scripted.removed == scripted.groups


def test_a_job_that_asks_for_no_spares_claims_nothing(copied: Program, scripted: Scripted) -> None:
    starter = started(copied, joining=False)
    scripted.free["new"] = 1.0
    starter._hire()
    assert scripted.groups == []


def test_a_claim_that_ray_does_not_place_or_places_elsewhere_is_given_up(
    copied: Program, scripted: Scripted
) -> None:
    starter = started(copied)
    scripted.free["new"] = 1.0
    starter._hire()
    scripted.now = launcher.CLAIM + 1.0
    starter._hire()
    assert len(scripted.removed) == 1 and len(scripted.groups) == 2, "it is asked for again"
    scripted.place("a")
    scripted.free["new"] = 0.0
    starter._hire()
    assert len(scripted.removed) == 2 and starter.claims == {} and 2 not in starter.agents


def test_a_claim_goes_with_its_node(copied: Program, scripted: Scripted) -> None:
    starter = started(copied)
    scripted.free["new"] = 1.0
    starter._hire()
    scripted.place()
    starter._hire()
    del scripted.free["new"]
    scripted.groups[0].state = "RESCHEDULING"
    starter._hire()
    assert scripted.removed == scripted.groups and 2 not in starter.agents and starter._wanting() == 1
    scripted.free["newer"] = 1.0
    starter._hire()
    assert [group.target for group in scripted.groups] == ["new", "newer"]


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    with head_node() as head:
        yield add_nodes(head, 2)


def test_a_node_that_joins_a_whole_job_is_a_warm_spare(copied: Program) -> None:
    """Two nodes have workers and nothing is missing. A third joins, and then one of the two is lost."""
    events, given = list[Event](), batches(PAIR, 6)
    with (
        two_nodes() as head,
        recovering(copied, "ray", Options(), retries=3, notify=events.append, joining=True) as run,
    ):
        got = [run.step(given[0])]
        head.add_node(num_cpus=1)
        train_until_warm(run, events, 1, given, got)
        lost = lose(head, run, 1)
        until = time.monotonic() + 120
        while not any(event.event == "recovery" for event in events):
            assert time.monotonic() < until
            got.append(run.step(given[len(got) % 6]))
        again = {location.node for location in group_of(run).locations.values()}
    assert len(again) == 2 and lost not in again
    (recovered,) = [event for event in events if event.event == "recovery"]
    assert recovered.source == "memory" and "warm" not in recovered.phases
    with launch_inline(copied) as whole:
        assert got == [whole.step(given[number % 6]) for number in range(len(got))]
