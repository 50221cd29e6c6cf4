"""`protect`: keep copies of the state in memory that outlives workers."""

from dataclasses import dataclass, fields, replace

from piper.directives.base import ChunkDirective, argument, one_of, registered, whole
from piper.errors import ScheduleError
from piper.ir.chunk_options import APART, Protection, StateCopies
from piper.ir.graph import Graph
from piper.ir.node import Compute

STREAM = "protect"


@registered(8)
@dataclass(frozen=True, slots=True, repr=False)
class Protect(ChunkDirective):
    """Keep copies of the state after every `every` steps in memory that outlives workers.

    copies: how many more are sent elsewhere, 0 or 1. apart: a copy lies on another "machine" or another
    "device". devices_per_machine: how many neighbouring devices share a machine; None: all devices do.

    F[PP=0]  B[PP=0]  update
    -->
    protect[PP=0/0], F[PP=0]  B[PP=0]  update      (the copy is over before the update overwrites it)
    """

    copies: int = argument(one_of(0, 1), default=0, hint="1 sends a copy to another machine or device")
    apart: str = argument(one_of(*APART), default="machine", hint="what a copy must survive the loss of")
    every: int = argument(whole(1), default=1, hint="the state is copied once in so many steps")
    devices_per_machine: int | None = argument(
        whole(1), default=None, hint="so many neighbouring devices share a machine; leave it out if all do"
    )
    stream: str | None = None

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        if self.copies and self.apart == "machine" and self.devices_per_machine is None:
            raise ScheduleError(
                "it is not known which devices share a machine",
                facts={"asked": f'copies={self.copies}, apart="machine"'},
                hint='say how many devices a machine has, as devices_per_machine=8, or apart="device"',
            )
        asked = Protection(**{one.name: getattr(self, one.name) for one in fields(Protection)})
        names = dict.fromkeys(node.chunk for node in nodes)
        known = graph.chosen(lambda options: options.protect)
        other = next((copies for name, copies in known.items() if name not in names), None)
        if other is not None and other.protection != asked:
            raise ScheduleError(
                "two directives protect parts of one state in different ways",
                facts={
                    "before": f"{shown(other.protection)}, by {graph.directives[other.by]}",
                    "here": shown(asked),
                },
                hint="a version is of one step: give both the same copies, apart, every, devices_per_machine",
            )
        copies = StateCopies(protection=asked, stream=self.stream or STREAM, by=number)
        return graph.with_options(names, lambda _, options: replace(options, protect=copies))


def shown(asked: Protection) -> str:
    """Return how a state is protected, in words."""
    per = asked.devices_per_machine
    more = "" if per is None else f", devices_per_machine={per}"
    return f'copies={asked.copies}, apart="{asked.apart}", every={asked.every}{more}'


protect = Protect
