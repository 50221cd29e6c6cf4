"""One instruction of a plan: what to run, on which stream, from which slots into which."""

from dataclasses import dataclass
from typing import Literal

Op = Literal[
    "load",  # a field of the batch into a slot
    "compute",  # one phase of a chunk
    "send",
    "recv",
    "copy",  # a value under another name, where a transfer begins and ends on one device
    "concat",  # pieces of a value, joined along the samples
    "add",
    "counts",  # how many rows go where; the host waits for it
    "exchange",  # an all-to-all of rows
    "gather",  # a bucket's shards into the whole
    "accumulate",
    "all_reduce",
    "reduce_scatter",
    "norm",
    "total",
    "update",
    "broadcast",
]
COMMUNICATION: frozenset[Op] = frozenset(
    ("send", "recv", "counts", "exchange", "gather", "all_reduce", "reduce_scatter", "total", "broadcast")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instr:
    """One step of a plan. The plan decides; whoever runs it obeys.

    `arg` says what the op needs beyond its slots: `PHASE chunk` for compute, `out chunk` or `back chunk` for
    an exchange, the field for a load, `start:stop/of` for a send of some of the rows, the bucket for a gather
    or a reduction.
    """

    op: Op
    node: str  # where it comes from in the graph
    stream: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()  # events of other streams, before it starts
    signals: int | None = None  # its own event, when another stream waits for it
    comm: str | None = None
    arg: str = ""
    part: tuple[tuple[str, int], ...] = ()
    devices: tuple[int, ...] = ()  # a load: the set of devices that share the samples
    nbytes: int = 0  # what it moves
    workspace: int = 0  # memory only it uses while it runs, less what it frees before it makes its results

    @property
    def again(self) -> bool:
        """Whether a forward runs a second time, for what its region's backwards read."""
        return self.op == "compute" and self.node.startswith("R[")
