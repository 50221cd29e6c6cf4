"""What stages cost, hold and where they run; from it the start of each group of a grid, and what is held."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

from piper.errors import ScheduleError
from piper.ir.chunk import Phase
from piper.ir.numbers import is_number
from piper.schedules.grid import Action, Grid, Group, group_text, need_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Say how long each stage's passes take on one microbatch, in any one unit of time.

    A whole backward takes `inputs + weights`. `hop` is the time from the end of a pass to the arrival of its
    result on another rank: one number, or one for each boundary between a stage and the next.
    """

    forward: Sequence[float]  # F of each stage
    inputs: Sequence[float]  # BI of each stage: gradients of its inputs
    weights: Sequence[float]  # BW of each stage: gradients of its parameters
    hop: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        stages = None  # as many as there are numbers of `forward`
        for name in ("forward", "inputs", "weights"):
            times = need_numbers(name, getattr(self, name), stages, by="StageCosts")
            object.__setattr__(self, name, times)
            stages = len(times)
        if isinstance(self.hop, int | float):
            need_numbers("hop", (self.hop,), 1, by="StageCosts")
        else:
            object.__setattr__(self, "hop", need_numbers("hop", self.hop, self.stages - 1, by="StageCosts"))
        if not any(map(sum, (self.forward, self.inputs, self.weights))):
            raise ScheduleError(
                "no pass of any stage takes time", by="StageCosts", hint="give at least one time above 0"
            )

    @classmethod
    def even(
        cls, stages: int, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, hop: float = 0.0
    ) -> Self:
        """Return the costs of stages that are all alike."""
        need_whole("StageCosts.even", stages=stages)
        return cls(forward=[forward] * stages, inputs=[inputs] * stages, weights=[weights] * stages, hop=hop)

    @property
    def stages(self) -> int:
        return len(self.forward)

    def of(self, stage: int, phase: Phase) -> float:
        """Return the time of one pass of a stage."""
        forward, inputs, weights = self.forward[stage], self.inputs[stage], self.weights[stage]
        return {"F": forward, "B": inputs + weights, "BI": inputs, "BW": weights}[phase]

    def hop_between(self, stage: int, other: int) -> float:
        """Return the transfer time between neighbouring stages on different ranks, in either direction."""
        return self.hop if isinstance(self.hop, int | float) else self.hop[min(stage, other)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Say which rank runs each stage: `Placement(ranks=(0, 1, 1, 0))` is a V over two ranks."""

    ranks: Sequence[int]  # one for each stage; every rank from 0 on has at least one stage

    def __post_init__(self) -> None:
        found = tuple(self.ranks)
        if not found or set(found) != set(range(len(set(found)))):
            raise ScheduleError(
                f"ranks={found}",
                by="Placement",
                hint="give the rank of each stage; ranks are 0, 1, ... and each has at least one stage",
            )
        object.__setattr__(self, "ranks", found)

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 2) -> Self:
        """Deal the stages round the ranks: rank r has stages r, r + ranks, r + 2 ranks, ..."""
        need_whole("Placement.loop", ranks=ranks, stages_per_rank=stages_per_rank)
        return cls(ranks=tuple(range(ranks)) * stages_per_rank)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> Self:
        """Let the stages go down the ranks and up again: rank 0 has stages 0, 2 ranks - 1, 2 ranks, ..."""
        need_whole("Placement.v", ranks=ranks, stages_per_rank=stages_per_rank)
        down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
        turns = (up if turn % 2 else down for turn in range(stages_per_rank))
        return cls(ranks=tuple(rank for turn in turns for rank in turn))

    @property
    def count(self) -> int:
        return len(set(self.ranks))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of one rank, in order."""
        return [stage for stage, found in enumerate(self.ranks) if found == rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Say what one microbatch of each stage holds on its rank, and how much each rank may hold.

    A whole backward frees `saved` at its end. A split one frees `saved` at the end of BI and holds `carried`
    from there to the end of BW.
    """

    saved: Sequence[int]  # bytes of each stage from the start of F to the end of BI
    carried: Sequence[int]  # bytes of each stage from the end of BI to the end of BW
    limit: int | Sequence[int]  # bytes: of every rank, or of each

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved", need_bytes("saved", self.saved, None))
        object.__setattr__(self, "carried", need_bytes("carried", self.carried, len(self.saved)))
        if isinstance(self.limit, int | float):
            object.__setattr__(self, "limit", *need_bytes("limit", (self.limit,), 1))
        else:
            object.__setattr__(self, "limit", need_bytes("limit", self.limit, None))

    def limit_of(self, rank: int) -> int:
        """Return the bytes that a rank may hold."""
        return self.limit if isinstance(self.limit, int) else self.limit[rank]

    def changes(self, action: Action) -> tuple[int, int]:
        """Return the bytes that an action adds when it starts, and those that it frees at its end."""
        saved, carried = self.saved[action.stage], self.carried[action.stage]
        halfway = max(0, carried - saved), max(0, saved - carried)
        return {"F": (saved, 0), "B": (0, saved), "BI": halfway, "BW": (0, carried)}[action.phase]


def need_numbers(name: str, given: object, count: int | None, *, by: str) -> tuple[float, ...]:
    """Return `count` numbers from 0, or at least one where `count` is None. Refuse anything else."""
    numbers = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else None
    if (
        numbers is None
        or (not numbers if count is None else len(numbers) != count)
        or not all(is_number(number) and 0 <= number < math.inf for number in numbers)
    ):
        raise ScheduleError(
            f"{name}={given!r}",
            by=by,
            facts={"needs": f"{'one or more' if count is None else count} numbers, each from 0 and finite"},
            hint="give one number for each stage, in order; for `hop` one for each boundary between stages",
        )
    return numbers


def need_bytes(name: str, given: object, count: int | None) -> tuple[int, ...]:
    """Return whole numbers of bytes, so that their sums are exact. Refuse a fraction."""
    numbers = need_numbers(name, given, count, by="Memory")
    for number in numbers:
        if int(number) != number:
            raise ScheduleError(
                f"{name} has {number!r} bytes", by="Memory", hint="bytes are whole numbers: round them up"
            )
    return tuple(map(int, numbers))


Costs = Mapping[Phase, float] | StageCosts  # of every stage alike, or of each
Value = tuple[Literal["activation", "gradient"], int, int]  # what is handed on, of which stage and microbatch
UNIT: Mapping[Phase, float] = MappingProxyType({"F": 1, "B": 2, "BI": 1, "BW": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """The start time of each group, per rank, and the end of the step."""

    starts: tuple[tuple[float, ...], ...]
    end: float


def makespan(grid: Grid, costs: Costs = UNIT) -> float:
    """Return the time from the first action of a valid grid to the end of its last."""
    return timeline(grid, costs).end


def timeline(grid: Grid, costs: Costs = UNIT, *, by: str = "schedule") -> ScheduleTimes:
    """Run a grid: each group starts when its rank is free and what all its members need is there.

    The members of a group run one after another. Transfers between ranks take the costs' `hop`, if they have
    one, and no time of any rank.
    """
    last = grid.stages - 1
    ranks = {(action.stage, action.microbatch): rank for rank, action in grid.actions()}
    starts: list[list[float]] = [[] for _ in grid.rows]
    free: list[float] = [0.0] * len(grid.rows)
    ready: dict[Value, float] = {}
    waiting: dict[Value, list[int]] = {}  # the ranks that wait for each value

    def delay(value: Value, rank: int) -> float:
        if not isinstance(costs, StageCosts) or ranks[value[1:]] == rank:
            return 0.0
        return costs.hop_between(value[1], value[1] + (1 if value[0] == "activation" else -1))

    todo = list(range(len(grid.rows)))
    while todo:
        rank = todo.pop()
        row = grid.rows[rank]
        for position in range(len(starts[rank]), len(row)):
            needed = group_needs(row[position], last)
            if missing := next((value for value in needed if value not in ready), None):
                waiting.setdefault(missing, []).append(rank)
                break
            clock = max([free[rank], *(ready[value] + delay(value, rank) for value in needed)])
            starts[rank].append(clock)
            for action in row[position]:
                clock += cost_of(costs, action)
                if value := gives(action):
                    ready[value] = clock
                    todo += waiting.pop(value, ())
            free[rank] = clock
    if waiting:
        raise deadlock(grid, waiting, [len(begun) for begun in starts], by)
    return ScheduleTimes(starts=tuple(map(tuple, starts)), end=max(free, default=0.0))


def cost_of(costs: Costs, action: Action) -> float:
    return costs.of(action.stage, action.phase) if isinstance(costs, StageCosts) else costs[action.phase]


def gives(action: Action) -> Value | None:
    """Return the value that other actions wait for. None: weight gradients have no reader in the pipeline."""
    if action.phase == "BW":
        return None
    return "activation" if action.phase == "F" else "gradient", action.stage, action.microbatch


def needs(action: Action, last: int) -> tuple[Value, ...]:
    """Return the values that an action waits for, where `last` is the last stage."""
    stage, microbatch = action.stage, action.microbatch
    match action.phase:
        case "F":
            return (("activation", stage - 1, microbatch),) if stage else ()
        case "B" | "BI":
            own: Value = "activation", stage, microbatch
            return (own, ("gradient", stage + 1, microbatch)) if stage < last else (own,)
        case "BW":
            return (("gradient", stage, microbatch),)


def group_needs(group: Group, last: int) -> tuple[Value, ...]:
    """Return the values that a group waits for before it starts, without those its first member computes."""
    first, *others = group
    given = gives(first)
    return needs(first, last) + tuple(
        value for action in others for value in needs(action, last) if value != given
    )


def deadlock(grid: Grid, waiting: Mapping[Value, list[int]], begun: Sequence[int], by: str) -> ScheduleError:
    """Return the error that shows the ranks that wait for each other in a cycle."""
    maker = {gives(action): (rank, action) for rank, action in grid.actions()}
    stopped = {rank: maker[value] for value, ranks in waiting.items() for rank in ranks}
    rank, seen = min(stopped), list[int]()
    while rank not in seen:
        seen.append(rank)
        rank, _ = stopped[rank]
    return ScheduleError(
        "this order can never run",
        by=by,
        facts={
            f"rank {rank}": f"{group_text(grid.rows[rank][begun[rank]])} waits for {action} on rank {other}"
            for rank in seen[seen.index(rank) :]
            for other, action in [stopped[rank]]
        },
        hint="each rank runs its row in order: move what is waited for before what waits",
    )


def peak_bytes(grid: Grid, memory: Memory) -> tuple[int, ...]:
    """Return the most bytes that each rank holds at once."""
    held, peaks = [0] * len(grid.rows), [0] * len(grid.rows)
    for rank, action in grid.actions():
        taken, freed = memory.changes(action)
        peaks[rank] = max(peaks[rank], held[rank] + taken)
        held[rank] += taken - freed
    return tuple(peaks)
