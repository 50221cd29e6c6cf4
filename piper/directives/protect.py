"""`protect`: keep copies of the state in memory that outlives workers."""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

from piper.directives.base import (
    Directive,
    check_whole,
    given_filter,
    given_stream,
    is_whole,
    registered,
    selected,
    spelt,
    touched,
)
from piper.errors import ScheduleError
from piper.ir.chunk_options import StateCopies
from piper.ir.graph import Graph
from piper.ir.protection import APART, Apart, Protection
from piper.ir.select import At

STREAM = "protect"


@registered(8)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Protect(Directive):
    """Copy the state of the selected chunks after a step, while the next step runs.

    F[PP=0]  B[PP=0]  update
    -->
    protect[PP=0/0], F[PP=0]  B[PP=0]  update      (the copy is over before the update overwrites it)
    """

    places: ClassVar[bool] = False

    at: At
    copies: int = spelt("copies", "0 or 1", default=0)
    apart: str = spelt("apart", '"machine" or "device"', default="machine")
    every: int = spelt("every", "a whole number from 1", default=1)
    devices_per_machine: int | None = None
    stream: str | None = None

    def apply(self, graph: Graph, number: int) -> Graph:
        by = self.title(number)
        self._check(by)
        nodes = selected(graph, self.at, by)
        check_whole(graph, nodes, by)
        asked = Protection(
            copies=self.copies,
            apart=cast(Apart, self.apart),
            every=self.every,
            devices_per_machine=self.devices_per_machine,
        )
        names = dict.fromkeys(node.chunk for node in nodes)
        known = graph.chosen(lambda options: options.protect)
        other = next((copies for name, copies in known.items() if name not in names), None)
        if other is not None and other.protection != asked:
            raise ScheduleError(
                "two directives protect parts of one state in different ways",
                by=by,
                facts={
                    "before": f"{shown(other.protection)}, by {graph.directives[other.by]}",
                    "here": shown(asked),
                },
                hint="a version is of one step: give both the same copies, apart, every, devices_per_machine",
            )
        copies = StateCopies(protection=asked, stream=self.stream or STREAM, by=number)
        graph = graph.with_options(names, lambda _, options: replace(options, protect=copies))
        return graph.update(replace(node, origin=touched(node, number)) for node in nodes)

    def _check(self, by: str) -> None:
        """Refuse numbers that mean nothing, and copies on other machines where machines are not known."""
        given = {"copies": self.copies, "every": self.every, "devices_per_machine": self.devices_per_machine}
        least = {"copies": 0, "every": 1, "devices_per_machine": 1}
        bad = next(
            (k for k, v in given.items() if v is not None and not (is_whole(v) and v >= least[k])), None
        )
        if bad is not None or self.copies > 1 or self.apart not in APART:
            name = bad or ("copies" if self.copies > 1 else "apart")
            raise ScheduleError(
                f"{name}={getattr(self, name)!r} protects nothing",
                by=by,
                hint='copies is 0 or 1, apart is "machine" or "device", every and devices_per_machine are '
                "whole numbers from 1",
            )
        if self.copies and self.apart == "machine" and self.devices_per_machine is None:
            raise ScheduleError(
                "it is not known which devices share a machine",
                by=by,
                facts={"asked": f'copies={self.copies}, apart="machine"'},
                hint='say how many devices a machine has, as devices_per_machine=8, or apart="device"',
            )


def shown(asked: Protection) -> str:
    """Return how a state is protected, in words."""
    per = asked.devices_per_machine
    more = "" if per is None else f", devices_per_machine={per}"
    return f'copies={asked.copies}, apart="{asked.apart}", every={asked.every}{more}'


def protect(
    at: At,
    copies: int = 0,
    apart: str = "machine",
    every: int = 1,
    devices_per_machine: int | None = None,
    stream: str | None = None,
) -> Protect:
    """Keep copies of the state after every `every` steps in memory that outlives workers.

    copies: how many more are sent elsewhere, 0 or 1. apart: a copy lies on another "machine" or another
    "device". devices_per_machine: how many neighbouring devices share a machine; None: all devices do.
    """
    return Protect(
        at=given_filter("protect", at),
        copies=copies,
        apart=apart,
        every=every,
        devices_per_machine=devices_per_machine,
        stream=given_stream("protect", "stream", stream),
    )
