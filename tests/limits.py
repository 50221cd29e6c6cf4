"""What does not compose, and why: the only refusals that the matrix accepts. docs/limits.md is written from this table.

Each has a job that is refused, which a test compiles. A cell of the matrix that `meets` one must be refused so; any
other cell must have the numbers of one device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper.directives import Directive, shard
from piper.ir.select import at
from piper.job import Job
from tests.runtime import divided, grid, packed
from tests.runtime.grid import Cell

HEADER = """# What does not compose, and why

`make matrix` brings together every two choices of a model, schedule, degree of data parallelism, kind of ZeRO, mesh, optimizer,
mask, experts and clipping, and compares the numbers with one device. It accepts the refusals below and no others. Each is an error of
`compile` that says what to do; none gives a wrong number. [Errors](errors.md) has every message, those about wrong arguments too.

`tests/limits.py` holds this table, and a test compiles an example of each row.

| what does not compose | why | instead |
| --- | --- | --- |
"""
FOOTER = """
`varlen_attn` on a ring is refused because it is not built. Under fp8 weights of keys and values of which several devices have the same heads
compute in the job's precision, and so do gradients of the weights of experts. No cell of the matrix has these choices.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Choices that do not compose."""

    what: str
    why: str
    instead: str
    message: str  # what the error says
    job: Callable[[], Job]  # that is refused
    meets: Callable[[Cell], bool] = lambda cell: False  # of the cells of the matrix


class FeedForward(nn.Module):
    """Two products, and between them something that gets a sharded value."""

    def __init__(self, inner: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.BatchNorm1d(6)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        result: Tensor = self.down(self.norm(hidden) if self.inner is None else self.inner(hidden))
        return result


def _between(inner: Callable[[Tensor], Tensor] | None) -> Job:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = model(batch["x"]).square().mean()
        return result

    return Job(
        model=lambda: FeedForward(inner),
        loss=loss,
        data=lambda: [{"x": torch.ones(4, 6, 8)}],
        strategy=[shard(at(), [0, 1], axis="TP", weights={"up": 0, "down": 1})],
        precision="fp64",
    )


def _sequence_outside() -> Job:
    devices, weights = [0, 1, 2, 3], divided.MODELS["decoder"]().weights
    strategy: list[Directive] = [
        shard(at(), devices, 2, axis="CP", batch=divided.FIELDS),
        shard(at(), devices, 2, axis="TP", weights=weights, between=1),
    ]
    return divided.job_of("decoder", 1, lambda _: strategy)


def _capped_ring() -> Job:
    fields = packed.batch(packed.PACKINGS["several"])
    return Job(
        model=lambda: packed.Packed("softcap"),
        loss=packed.loss,
        data=lambda: [fields],
        strategy=[shard(at(), [0, 1], axis="CP", batch=packed.FIELDS, attention="ring")],
        precision="fp64",
    )


def _three_ways() -> Job:
    weights = divided.MODELS["decoder"]().weights
    return divided.job_of("decoder", 1, lambda _: [shard(at(), [0, 1, 2], axis="TP", weights=weights)])


def _groups(**choices: object) -> Callable[[], Job]:
    cell = Cell(schedule="none", zero=3, within=2, **choices)  # type: ignore[arg-type]
    return lambda: grid.job(cell)


LIMITS = (
    Limit(
        what="`within=` smaller than a group of experts",
        why="the devices of such a group hold different experts, and those of `within=` shards of the same ones",
        instead="`within=` a multiple of the groups, or experts over fewer devices",
        message="would cut groups of 4 devices apart",
        job=_groups(case="moe", dp=8, ways=4),
        meets=lambda cell: cell.within is not None and cell.within < cell.ways < cell.dp,
    ),
    Limit(
        what="sequence parallelism (`between=`) along an axis outside one that shards the sequence (`batch=`)",
        why="slices lie in the order of the axes: what the outer one cut would be other tokens than the inner one holds",
        instead="the shard with `between=` before the one with `batch=`",
        message="a sequence that is sharded already cannot be sharded again",
        job=_sequence_outside,
    ),
    Limit(
        what="ring attention with scores that a function, a learned bias or dropout changes",
        why="the ring keeps no scores: its backward computes them again from queries and keys alone, block by block",
        instead='`attention="gather"` or `"heads"`, which hold all keys of a head',
        message="a ring does not change scores",
        job=_capped_ring,
    ),
    Limit(
        what="an operation along the sharded dimension that needs all of it in order (sort, cumsum, quantile)",
        why="no device has the elements that it compares; to gather them in silence would cost what the shard saves",
        instead="shard another dimension, or leave the region out",
        message="it works along the sharded dimension",
        job=lambda: _between(lambda x: x.sort(-1).values),
    ),
    Limit(
        what="random numbers whose draw depends on sharded values (bernoulli of a tensor, multinomial)",
        why="one device draws in the order of all values, of which each device here has a part",
        instead="dropout, `rand_like` or `randn_like`, which all devices draw alike",
        message="draws random numbers for a sharded value",
        job=lambda: _between(lambda x: x * torch.bernoulli(x.sigmoid())),
    ),
    Limit(
        what="batch norm of a sharded value",
        why="its statistics are of all samples and are written while it runs, on each device from another part",
        instead="`nn.GroupNorm` or `nn.LayerNorm`, or leave the region out",
        message="batch_norm.default has no rule",
        job=lambda: _between(None),
    ),
    Limit(
        what="heads of attention that neither divide by the degree nor are divided by it",
        why="devices would hold different numbers of heads, and every shard has one size",
        instead="a degree that divides the heads; fewer heads of keys are copied where the degree is a multiple of them",
        message=r"do(es)? not divide by 3|cannot be sharded along dimension 0\n.*\n.*ways=3",
        job=_three_ways,
    ),
)


def limit_of(cell: Cell) -> Limit | None:
    """Return the limit that a cell of the matrix meets, if any."""
    return next((limit for limit in LIMITS if limit.meets(cell)), None)


def page() -> str:
    """Return the text of docs/limits.md."""
    rows = (f"| {limit.what} | {limit.why} | {limit.instead} |\n" for limit in LIMITS)
    return "".join([HEADER, *rows, FOOTER])
