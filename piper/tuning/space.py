"""The space of candidates: every combination that the model, the batch and the devices allow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from piper.errors import ScheduleError
from piper.schedules.grid import NAMES, Grid, grid_for
from piper.tuning.choice import SYNTHESISED, Neighbours, Recompute, Shape, StrategyChoice

Sizes = npt.NDArray[np.int64]  # a row for each division into stages
ROWS_LIMIT = 16  # samples of a microbatch at most
V_SHAPED = ("zbv", "v-half", "v-min", "dualpipe-v")
NAMED = ("1f1b", "interleaved-1f1b", "zero-bubble", "interleaved-zero-bubble", "zbv", "v-half", "dualpipe-v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from. None: whatever fits the model and the devices."""

    ranks: Sequence[int] | None = None
    rows: Sequence[int] | None = None  # samples of a microbatch
    stages_per_rank: Sequence[int] = (1, 2)
    schedules: Sequence[str] = (*NAMED, SYNTHESISED)
    zeros: Sequence[int] = (0, 1, 2, 3)
    mixed: bool = True  # also a level for each rank: the lowest that fits
    recompute: Sequence[Recompute] = (Recompute(), Recompute(budget=0.5), Recompute(across=True))
    neighbours: Sequence[Neighbours] = ("replicas", "ranks")
    tensor: Sequence[int] | None = None
    between: Sequence[bool] = (False, True)
    context: Sequence[int] | None = None
    experts: Sequence[int] | None = None
    boundaries: Sequence[str] = ("even", "balanced", "late")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The numbers of a model and its devices that limit the space."""

    devices: int
    samples: int
    layers: int
    experts: int  # 0: the model has none
    tensor: bool  # tensor parallelism is possible
    context: bool


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def meshes(space: Space, shapes: Shapes) -> Iterator[StrategyChoice]:
    """Yield a candidate for each way to arrange the devices and to cut the batch, with stages left open."""
    ranks = [rank for rank in divisors(shapes.devices) if rank <= shapes.layers]
    for rank in ranks if space.ranks is None else [rank for rank in ranks if rank in space.ranks]:
        width = shapes.devices // rank
        for tensor in allowed(space.tensor, width, possible=shapes.tensor):
            for context in allowed(space.context, width // tensor, possible=shapes.context):
                replicas = width // tensor // context
                for rows in rows_of(space, shapes.samples, replicas):
                    for experts in expert_degrees(space, shapes, replicas, tensor * context):
                        yield StrategyChoice(
                            ranks=rank,
                            replicas=replicas,
                            tensor=tensor,
                            context=context,
                            experts=experts,
                            rows=rows,
                            microbatches=shapes.samples // (replicas * rows),
                            sizes=(shapes.layers,),
                            zeros=(0,) * rank,
                        )


def allowed(given: Sequence[int] | None, width: int, *, possible: bool) -> list[int]:
    """Return the degrees of an axis: divisors of the devices of a rank, up to the eight of a node."""
    if not possible:
        return [1]
    return [one for one in divisors(width) if (one in given if given is not None else one <= 8)]


def rows_of(space: Space, samples: int, replicas: int) -> list[int]:
    """Return the microbatch sizes that divide the samples of a replica."""
    if samples % replicas:
        return []
    sizes = divisors(samples // replicas)
    return [size for size in sizes if (size <= ROWS_LIMIT if space.rows is None else size in space.rows)]


def expert_degrees(space: Space, shapes: Shapes, replicas: int, group: int) -> list[int]:
    """Return how many devices may divide the experts: divisors of both; 1 where axes divide the model."""
    if not shapes.experts or group > 1:
        return [1]
    degrees = [degree for degree in divisors(replicas) if shapes.experts % degree == 0]
    return [degree for degree in degrees if space.experts is None or degree in space.experts]


def schedules_of(space: Space, ranks: int) -> Iterator[tuple[str, int, Shape]]:
    """Yield each schedule, with its stages for each rank and how they are dealt."""
    if ranks == 1:
        yield "", 1, "loop"
        return
    for name in space.schedules:
        if name == SYNTHESISED:
            for count in space.stages_per_rank:
                yield name, count, "loop"
                if count > 1:
                    yield name, count, "v"
            continue
        entry = NAMES[name]
        counts = [entry.stages_per_rank] if entry.instead else [c for c in space.stages_per_rank if c > 1]
        for count in counts:
            yield name, count, "v" if name in V_SHAPED else "loop"


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Return stages of as many layers each, the earlier ones with one more where that does not divide."""
    return tuple(layers // stages + (number < layers % stages) for number in range(stages))


def balanced(sizes: tuple[int, ...], loads: Callable[[Sizes], Sizes]) -> tuple[int, ...]:
    """Move layers between stages until no single move makes the busiest ranks less busy.

    Where loads are equal, stages are as even as possible, and then the later ones have more layers: they hold
    what a forward saves for a shorter time. loads: of each rank and of each stage, the heaviest first, for
    each row of sizes.
    """

    def shape(sizes: Sequence[int]) -> tuple[int, Sequence[int]]:
        return sum(size * size for size in sizes), sizes

    def first_better(now: list[int], best: list[int], source: int, target: int) -> int:
        """Move a layer from a stage to the first from `target` on that is better. Return the next one."""
        moves = np.array(now) + np.eye(len(now), dtype=np.int64)[target:]
        moves[:, source] -= 1
        loaded = loads(moves)
        for row in np.flatnonzero(loaded[:, 0] <= best[0]):
            moved, new = moves[row].tolist(), loaded[row].tolist()
            if new < best or (new == best and shape(moved) < shape(now)):
                now[:], best[:] = moved, new
                return target + int(row) + 1
        return len(now)

    best: list[int] = loads(np.array([sizes]))[0].tolist()
    now = list(sizes)
    before: list[int] = []
    while now != before:
        before = list(now)
        for source in range(len(now)):
            target = 0
            while target < len(now) and now[source] > 1:
                target = first_better(now, best, source, target)
    return tuple(now)


def late(sizes: tuple[int, ...], ranks: Sequence[int], loads: Callable[[Sizes], Sizes]) -> tuple[int, ...]:
    """Move layers to later stages of the same rank, while no rank and no stage becomes the busiest by it.

    A later stage holds what a forward saves for a shorter time, and microbatches reach the last rank sooner.
    """
    now, least = list(sizes), loads(np.array([sizes]))[0].tolist()
    for source, target in combinations(range(len(sizes)), 2):
        while ranks[source] == ranks[target] and now[source] > 1:
            moved = [size - (n == source) + (n == target) for n, size in enumerate(now)]
            if loads(np.array([moved]))[0].tolist() > least:
                break
            now = moved
    return tuple(now)


def grid_of(choice: StrategyChoice) -> Grid | None:
    """Return the order of a candidate with a named schedule. None: it has no order of its own."""
    if choice.schedule in ("", SYNTHESISED):
        return None
    return grid_for(choice.schedule, choice.ranks, choice.microbatches, choice.stages_per_rank)


@cache
def exists(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> bool:
    """Return whether a named schedule exists for so many ranks and microbatches."""
    try:
        grid_for(name, ranks, microbatches, stages_per_rank)
    except ScheduleError:
        return False
    return True
