"""`average`: groups of devices that train apart, and average their parameters now and then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper.directives.base import FRACTION, ChunkDirective, argument, checked_devices, registered, whole
from piper.errors import ScheduleError
from piper.ir.averaging import Averaging, OuterStep
from piper.ir.devices import Devices, interned, show
from piper.ir.graph import Graph
from piper.ir.node import Compute

STREAM = "average"
KEEP = 0.5  # as Streaming DiLoCo
OUTER: Mapping[str, float] = {"lr": 1.0, "momentum": 0.0, "nesterov": False}  # settings, and their defaults


def given_settings(key: str, given: object) -> object:
    """Return the settings that a directive is given, as pairs. None: none are given."""
    if given is not None and not isinstance(given, Mapping | tuple):
        hint = 'give settings of SGD: outer={"lr": 0.7}'
        raise ScheduleError(f"{key}={given!r} is not a dict", hint=hint)
    return tuple(given.items()) if isinstance(given, Mapping) else given


@registered(10)
@dataclass(frozen=True, slots=True, repr=False)
class Average(ChunkDirective):
    """Let groups of devices train apart, and average their parameters after every `every` steps.

    across: one device of each group, those that hold the same part of the model. The devices of a region are
    cut into as many groups, in their order. Within a group everything is as the other directives say.
    outer: settings of SGD, lr, momentum and nesterov, that moves the last common parameters by the mean of
    what the groups changed (DiLoCo). None: the new parameters are the average.
    fragments: as many parts of the parameters are averaged in different steps.
    overlap: an average travels during so many steps that follow, an equal part in each, and is then merged.
    keep: of its own parameters a group then keeps this share. None: a half.

    B @0,1 --> reduce over 0,1 --> update
    -->
    B @0 --> update --> average over 0,1 (every so many steps)      B @1 --> update --> average
    """

    across: Sequence[int]
    every: int = argument(whole(1), default=1, hint="groups average once in so many steps")
    outer: Mapping[str, float] | None = argument(default=None, given=given_settings)
    stream: str | None = None
    fragments: int = argument(whole(1), default=1, hint="so many parts of the parameters average in turn")
    overlap: int = argument(whole(0), default=0, hint="an average travels during so many steps")
    keep: float | None = argument(
        FRACTION, default=None, hint="the share of its own parameters that a group keeps as it merges"
    )

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        across = checked_devices(self.across)
        if len(across) < 2:
            raise ScheduleError(
                "there is nothing to average with a single group",
                facts={"asked": f"across={list(across)}"},
                hint="name one device of each group: across=[0, 4] for the groups of devices 0 and 4",
            )
        if len(nodes) < len(graph.nodes):
            names = {node.name for node in nodes}
            raise ScheduleError(
                "groups train apart with the whole model",
                facts={"left out": next(name for name in graph.nodes if name not in names)},
                hint="select everything: average(at(), ...)",
            )
        if self.fragments > self.every or self.every <= self.overlap:
            raise ScheduleError(
                f"{self.every} steps are too few from one average to the next",
                facts={"asked": f"fragments={self.fragments}, overlap={self.overlap}, every={self.every}"},
                hint="at most one fragment for each of these steps, and an overlap of fewer steps",
            )
        if self.keep is not None and not self.overlap:
            raise ScheduleError(
                "a group keeps nothing of its own where the average is merged at once",
                facts={"asked": f"keep={self.keep}, overlap=0"},
                hint="leave keep out, or let the average travel during some steps: overlap=1",
            )
        # Which devices each group has is known when all directives have placed their nodes.
        asked = Averaging(
            groups=tuple((device,) for device in across),
            every=self.every,
            stream=self.stream or STREAM,
            outer=self._outer_step(),
            fragments=self.fragments,
            overlap=self.overlap,
            keep=(KEEP if self.keep is None else self.keep) if self.overlap else 0.0,
        )
        return replace(graph, averaging=asked)

    def _outer_step(self) -> OuterStep:
        """Return the outer optimizer. Refuse settings that SGD does not have."""
        given = dict(self.outer or {})
        lr, momentum, nesterov = (given.get(key, default) for key, default in OUTER.items())
        numbers = all(isinstance(value, bool | int | float) for value in given.values())
        known = numbers and given.keys() <= OUTER.keys()
        if known and lr > 0 and 0 <= momentum < 1 and (momentum or not nesterov):
            return OuterStep(lr=lr, momentum=momentum, nesterov=bool(nesterov))
        raise ScheduleError(
            "the outer optimizer is no SGD",
            facts={"asked": f"outer={given}"},
            hint='give lr above 0, momentum from 0 to 1, and nesterov only with momentum: outer={"lr": 0.7}',
        )


average = Average


def first_group(graph: Graph) -> Graph:
    """Return the graph of the first of the groups that train apart: the others are copies of it.

    B[PP=0]@0-3, across=[0, 2]
    -->
    B[PP=0]@0,1, groups 0,1 and 2,3
    """
    averaging = graph.averaging
    if averaging is None:
        return graph
    across, counterparts = tuple(group[0] for group in averaging.groups), dict[Devices, None]()
    first: dict[Devices, Devices] = {}
    for node in graph.nodes.values():
        if node.devices and node.devices not in first:
            size = len(node.devices) // len(across)
            first[node.devices] = interned(node.devices[:size])
            check_groups(graph, node, len(across))
            counterparts |= dict.fromkeys(node.devices[place::size] for place in range(size))
    if across not in counterparts:
        groups = "; ".join(map(show, list(counterparts)[:4]))
        raise ScheduleError(
            f"{show(across)} do not hold the same part of the model",
            facts={"asked": f"across={list(across)}", "hold the same": groups or "nothing is placed"},
            hint="groups are neighbours in the order that devices are listed in: name one device of each",
        )
    if len({d for peers in counterparts for d in peers}) < len(counterparts) * len(across):
        raise ScheduleError(
            "a device would be in two groups",
            facts={"hold the same": "; ".join(map(show, counterparts))},
            hint="list the devices of every region group by group, in the same order of groups",
        )
    graph = graph.update(replace(node, devices=first.get(node.devices, ())) for node in graph.nodes.values())
    copies = tuple(zip(*counterparts, strict=True))
    return replace(graph, averaging=replace(averaging, groups=copies))


def check_groups(graph: Graph, node: Compute, groups: int) -> None:
    """Refuse a region whose devices do not make up equal groups."""
    policy, count = graph.policy(node.chunk), len(node.devices)
    together = policy.inner
    if count % groups or count // groups % together:
        sharded = {"sharded": f"over {together} devices"} if together > 1 else {}
        raise ScheduleError(
            f"{count} devices do not make up {groups} equal groups",
            facts={"region": node.chunk, "devices": show(node.devices), **sharded},
            hint="place every region on as many devices in each group, and shard it within a group",
        )
