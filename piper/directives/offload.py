"""`offload`: keep activations, or the optimizer's state, in memory of the host."""

from dataclasses import dataclass, replace
from typing import ClassVar

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
from piper.directives.remat import saving_chunks
from piper.errors import ScheduleError
from piper.ir.chunk_options import HostCopies
from piper.ir.graph import Graph
from piper.ir.select import At

STREAM = "host"
KINDS = ("activations", "optimizer")


@registered(9)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Offload(Directive):
    """Copy what the selected chunks save to the host, and bring it back before their backwards read it.

    With what="optimizer", the state of the optimizer for their parameters goes through the device in updates.

    F[PP=0 MB=0] --480 MB----------------------------------------------> B[PP=0 MB=0]
    -->
    F[PP=0 MB=0] --480 MB--> offload      (on the host)      fetch --480 MB--> B[PP=0 MB=0]
    """

    places: ClassVar[bool] = False

    at: At
    what: str = spelt("what", '"activations" or "optimizer"', default="activations")
    to: str = spelt("to", '"host"', default="host")
    stream: str | None = None
    least_mb: float = spelt("least_mb", "a number from 0", default=1.0)
    ahead: int = spelt("ahead", "a whole number from 1", default=1)

    def apply(self, graph: Graph, number: int) -> Graph:
        by = self.title(number)
        self._check(by)
        nodes = selected(graph, self.at, by)
        check_whole(graph, nodes, by)
        names = saving_chunks(graph, nodes, self.at, by)
        copies = HostCopies(
            stream=self.stream or STREAM, least=int(self.least_mb * 2**20), ahead=self.ahead, by=number
        )
        graph = graph.with_options(
            names,
            lambda _, options: (
                replace(options, offload=copies)
                if self.what == "activations"
                else replace(options, offload_state=copies)
            ),
        )
        return graph.update(replace(node, origin=touched(node, number)) for node in nodes)

    def _check(self, by: str) -> None:
        """Refuse what cannot be offloaded, or not to there, and numbers that mean nothing."""
        if self.what not in KINDS:
            known = " or ".join(f'"{kind}"' for kind in KINDS)
            raise ScheduleError(f"what={self.what!r} cannot be offloaded", by=by, hint=f"what is {known}")
        if self.to != "host":
            raise ScheduleError(
                f"to={self.to!r} is no memory to offload to", by=by, hint='to is "host": its memory'
            )
        least = self.least_mb
        sized = isinstance(least, int | float) and not isinstance(least, bool) and 0 <= least < float("inf")
        if not sized or not (is_whole(self.ahead) and self.ahead >= 1):
            name = "ahead" if sized else "least_mb"
            raise ScheduleError(
                f"{name}={getattr(self, name)!r} offloads nothing",
                by=by,
                hint="least_mb is a size in MiB from 0, ahead a whole number of compute nodes from 1",
            )


def offload(
    at: At,
    what: str = "activations",
    to: str = "host",
    stream: str | None = None,
    least_mb: float = 1.0,
    ahead: int = 1,
) -> Offload:
    """Keep activations, or the optimizer's state, of the selected regions in memory of the host.

    what: "activations", until their backward reads them; "optimizer", until the next update of each bucket.
    stream: copies out run on `stream`.out, copies back on `stream`.in. least_mb: values of fewer MiB stay.
    ahead: how many compute nodes of a device each copy may take; a value that is read again before both
    copies could be over stays.
    """
    return Offload(
        at=given_filter("offload", at),
        what=what,
        to=to,
        stream=given_stream("offload", "stream", stream),
        least_mb=least_mb,
        ahead=ahead,
    )
