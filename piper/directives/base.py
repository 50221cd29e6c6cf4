"""What every directive shares: where the user wrote it, and the checks on what it selects."""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from piper.errors import ScheduleError
from piper.ir.devices import Devices
from piper.ir.graph import Graph
from piper.ir.node import Compute
from piper.ir.select import At

PACKAGE = str(Path(__file__).parents[1])


def source_line() -> str:
    """The file and line outside this package that is constructing a directive: `llama.py:41`."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename.startswith((PACKAGE, "<string>"))
        or frame.f_code.co_filename.endswith("dataclasses.py")
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """One rewrite of the graph that the user asked for."""

    source: str = field(default_factory=source_line, compare=False)

    @property
    def verb(self) -> str:
        """What the user calls it: `place`."""
        return type(self).__name__.lower()

    def title(self, number: int) -> str:
        """How messages name it: its number in the strategy, from 0, and where it was written."""
        return f"{self.verb} #{number} ({self.source})"

    def apply(self, graph: Graph, number: int) -> Graph:
        """The graph after this directive. Raises ScheduleError when it cannot be applied."""
        raise AssertionError(f"{self.verb} does not say what it does")


def selected(graph: Graph, at: At, by: str) -> list[Compute]:
    """The nodes that `at` selects: at least one, by tags that exist."""
    for tag, _ in at.tags:
        if tag not in graph.index.tags:
            known = sorted(graph.index.tags)
            close = difflib.get_close_matches(tag, known, n=1)
            raise ScheduleError(
                f"there is no tag {tag!r}",
                by=by,
                facts={"asked": str(at), "tags": ", ".join(known) or "none: the model has no annotations"},
                hint=f"did you mean {close[0]!r}?" if close else "annotate the model with it, or split along it first",
            )
    nodes = graph.select(at)
    if not nodes:
        raise ScheduleError(
            "the filter matches no node", by=by, facts={"asked": str(at), "known": extent(graph)},
            hint="use an index that exists; a backward is in halves (BI, BW) only where an order asks for them",
        )  # fmt: skip
    return nodes


def extent(graph: Graph) -> str:
    """The tags of a graph with their ranges: `MB=0..7, PP=0..3`."""
    ranges = []
    for tag in sorted(graph.index.tags):
        indices = {cell.tags[tag] for cell in graph.index.cells if tag in cell.tags}
        low, high = min(indices), max(indices)
        ranges.append(f"{tag}={low}" if low == high else f"{tag}={low}..{high}")
    return ", ".join(ranges) or "no tags"


def checked_devices(devices: Sequence[int], by: str) -> Devices:
    """The devices as a tuple: whole numbers from 0, at least one, none twice."""
    bad = [d for d in devices if not isinstance(d, int) or isinstance(d, bool) or d < 0]
    if bad or not devices:
        raise ScheduleError(
            f"{bad[0]!r} is not a device" if bad else "no devices are given",
            by=by,
            facts={"asked": f"devices={list(devices)}"},
            hint="devices are whole numbers from 0, at least one",
        )
    twice = sorted({d for d in devices if list(devices).count(d) > 1}) if len(set(devices)) < len(devices) else []
    if twice:
        raise ScheduleError(
            f"device {twice[0]} is given twice",
            by=by,
            facts={"asked": f"devices={list(devices)}"},
            hint="name each device once: the i-th takes the i-th slice of the samples",
        )
    return tuple(devices)


def touched(node: Compute, number: int) -> tuple[int, ...]:
    """A node's origin once directive `number` has touched it too."""
    return node.origin if number in node.origin else (*node.origin, number)
