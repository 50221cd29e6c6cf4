"""The start time of each group of a grid, from the costs of the phases, and the activations held."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from piper.errors import ScheduleError
from piper.ir.chunk import Phase
from piper.schedules.action import Action, Group, group_text
from piper.schedules.grid import Grid
from piper.schedules.stages import Memory, StageCosts

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
    ranks = {
        (action.stage, action.microbatch): rank
        for rank, row in enumerate(grid.rows)
        for group in row
        for action in group
    }
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
    """Return the time of one action."""
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
    maker = {
        value: (rank, action)
        for rank, row in enumerate(grid.rows)
        for group in row
        for action in group
        if (value := gives(action))
    }
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
    peaks = []
    for row in grid.rows:
        held = peak = 0
        for action in (action for group in row for action in group):
            held += memory.taken_by(action)
            peak = max(peak, held)
            held -= memory.freed_by(action)
        peaks.append(peak)
    return tuple(peaks)
