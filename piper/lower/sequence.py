"""Finds runs of neighbouring nodes in the sequence of all nodes of a step."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.ir.devices import Devices
from piper.ir.ids import Pass, Tags
from piper.ir.node import Compute, Node

PATIENCE = 1  # compute nodes of a set while it waits for another one to join a communication


def computes_by_set(sequence: Sequence[Node], sets: Iterable[Devices]) -> dict[Devices, list[int]]:
    """Return, for each set of devices, the places of the compute nodes that run on any of them."""
    computes: dict[Devices, list[int]] = {devices: [] for devices in sets}
    overlapping: dict[Devices, list[list[int]]] = {}
    for place, node in enumerate(sequence):
        if not isinstance(node, Compute):
            continue
        if node.devices not in overlapping:
            mine = set(node.devices)
            overlapping[node.devices] = [
                places for devices, places in computes.items() if not mine.isdisjoint(devices)
            ]
        for places in overlapping[node.devices]:
            places.append(place)
    return computes


def pass_at(sequence: Sequence[Node], place: int) -> Pass:
    """Return the pass of the compute node at a place."""
    node = sequence[place]
    assert isinstance(node, Compute), f"{node.name} computes nothing"
    return node.run


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRun:
    """Compute nodes of a set of devices that use a bucket without a new gather or reduction between them."""

    devices: Devices
    computes: Sequence[int]  # the places of all compute nodes of these devices
    users: Sequence[int]  # the numbers among them of the nodes of the run

    @property
    def first(self) -> int:
        return self.users[0]

    @property
    def last(self) -> int:
        return self.users[-1]

    @property
    def places(self) -> Sequence[int]:
        """Return the places of the nodes of the run."""
        return [self.computes[number] for number in self.users]


def use_runs(
    users: Iterable[int],
    sequence: Sequence[Node],
    computes: Mapping[Devices, list[int]],
    regions: Mapping[str, Tags],
    *,
    whole_step: bool = False,
) -> Iterator[UseRun]:
    """Yield the runs of neighbouring compute nodes, on the same devices in any order, that use a bucket.

    users: the places of the nodes that use it. whole_step: all uses of a set of devices are one run.
    regions: of chunks. Where collectives cut a region into pieces, one pass is one run.
    """

    def one_pass(place: int) -> tuple[object, ...]:
        """Return what pieces of one pass of a region over a microbatch have in common."""
        node = sequence[place]
        assert isinstance(node, Compute), "buckets are used by compute nodes"
        return node.phase, node.again, node.part, regions[node.chunk]

    devices_of = {place: sequence[place].devices for place in users}
    same_members: dict[tuple[int, ...], list[Devices]] = {}
    for devices in dict.fromkeys(devices_of.values()):
        same_members.setdefault(tuple(sorted(devices)), []).append(devices)
    for sets in same_members.values():
        places = computes[sets[0]]
        run: list[int] = []
        for number, place in enumerate(places):
            if devices_of.get(place) not in sets:
                continue
            apart = run and one_pass(places[run[-1]]) != one_pass(place)
            if apart and number > run[-1] + 1 and not whole_step:
                yield UseRun(devices=sets[0], computes=places, users=run)
                run = []
            run.append(number)
        if run:
            yield UseRun(devices=sets[0], computes=places, users=run)


def joint_runs(runs: Iterable[UseRun], by: Callable[[UseRun], int]) -> Iterator[list[UseRun]]:
    """Yield the runs that one communication over all their devices serves: one of each set, in order.

    Where microbatches run on several sets of devices, all hold the same bucket and must take part. A run
    joins the runs of other sets that come shortly before it; then each set gives and gets something. Else the
    sets that have no run add nothing to the communication, so that no set holds a whole bucket for long.
    """
    current: list[UseRun] = []
    for run in sorted(runs, key=by):
        for other in current:
            places = (other.computes, run.computes)
            between = (bisect_left(each, by(run)) - bisect_right(each, by(other)) for each in places)
            if run.devices == other.devices or max(between) > PATIENCE:
                yield current
                current = []
                break
        current.append(run)
    if current:
        yield current
