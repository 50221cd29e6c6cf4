"""A synthesis problem in numbers, and list schedulers over it: by priority, and by a given order of F and BI.

Every pass of every stage and microbatch is one numbered operation. The search starts tens of thousands of
simulated steps. It works on flat tuples indexed by operation, and only its result becomes a grid of actions.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from piper.ir.chunk import Phase
from piper.schedules.grid import Action
from piper.schedules.timing import Memory, Placement, StageCosts, gives, needs

F, I, W = 0, 1, 2  # kinds of operations  # noqa: E741
PHASES: tuple[Phase, ...] = ("F", "BI", "BW")
TINY = 1e-12  # times closer than this, as a share of the mean operation, are one time
NEVER = float("inf")
Edges = tuple[tuple[tuple[int, float], ...], ...]  # of each operation: its neighbours, with the delay between


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operations with their ranks, times, memory and dependencies, indexed by operation number."""

    costs: StageCosts
    ranks: int
    stages: int
    microbatches: int
    limits: tuple[float, ...]  # bytes of each rank
    actions: tuple[Action, ...]  # that operations stand for
    kind: tuple[int, ...]
    stage: tuple[int, ...]
    microbatch: tuple[int, ...]
    rank: tuple[int, ...]
    duration: tuple[float, ...]
    takes: tuple[int, ...]  # bytes added when the operation starts
    frees: tuple[int, ...]  # bytes freed when it ends
    before: Edges  # the operations whose results it needs
    after: Edges  # the operations that need its result; BW is last among those of a BI

    @property
    def size(self) -> int:
        return len(self.kind)

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        return (stage * self.microbatches + microbatch) * 3 + kind

    def backwards_in_time(self) -> Self:
        """Return the same problem with time reversed: its schedules, read from their ends, solve this one."""
        last = self.microbatches - 1
        return replace(
            self,
            microbatch=tuple(last - microbatch for microbatch in self.microbatch),
            takes=self.frees,
            frees=self.takes,
            before=self.after,
            after=self.before,
        )


def problem_of(
    costs: StageCosts, placement: Placement, microbatches: int, memory: Memory | None = None
) -> Problem:
    """Number the operations of a pipeline, and collect what each takes and needs."""
    actions = tuple(
        Action(stage=stage, phase=phase, microbatch=microbatch)
        for stage in range(costs.stages)
        for microbatch in range(microbatches)
        for phase in PHASES
    )
    maker = {gives(action): number for number, action in enumerate(actions)}
    before: list[list[tuple[int, float]]] = [[] for _ in actions]
    after: list[list[tuple[int, float]]] = [[] for _ in actions]
    for number, action in enumerate(actions):
        for value in needs(action, costs.stages - 1):
            same = placement.ranks[value[1]] == placement.ranks[action.stage]
            delay = 0.0 if same else float(costs.hop_between(value[1], action.stage))
            before[number].append((maker[value], delay))
            after[maker[value]].append((number, delay))
    changes = [memory.changes(action) if memory else (0, 0) for action in actions]
    return Problem(
        costs=costs,
        ranks=placement.count,
        stages=costs.stages,
        microbatches=microbatches,
        limits=tuple(memory.limit_of(rank) if memory else NEVER for rank in range(placement.count)),
        actions=actions,
        kind=tuple(PHASES.index(action.phase) for action in actions),
        stage=tuple(action.stage for action in actions),
        microbatch=tuple(action.microbatch for action in actions),
        rank=tuple(placement.ranks[action.stage] for action in actions),
        duration=tuple(costs.of(action.stage, action.phase) for action in actions),
        takes=tuple(taken for taken, _ in changes),
        frees=tuple(freed for _, freed in changes),
        before=tuple(map(tuple, before)),
        after=tuple(map(tuple, after)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When each operation starts, in which order each rank runs its own, and when the last one ends."""

    start: tuple[float, ...]
    rows: tuple[tuple[int, ...], ...]
    end: float


class _Clock:
    """The state of a simulated step: what has started, what can, and when each rank is free again."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tiny = TINY * sum(problem.duration) / problem.size
        self.start = [0.0] * problem.size
        self.missing = [len(needed) for needed in problem.before]  # of each operation: needs not started
        self.ready = [0.0] * problem.size  # when it can start, by those of its needs that have started
        self.known: list[list[int]] = [[] for _ in range(problem.ranks)]  # left, and nothing is missing
        for operation, count in enumerate(self.missing):
            if not count:
                self.known[problem.rank[operation]].append(operation)
        self.rows: list[list[int]] = [[] for _ in range(problem.ranks)]
        self.free_at = [0.0] * problem.ranks
        self.held = [0] * problem.ranks  # bytes
        self.events = [(0.0, rank) for rank in range(problem.ranks)]  # (time, rank that looks for work)

    def begin(self, operation: int, now: float, rank: int) -> None:
        """Start an operation, and let ranks look for work that have something to do by it."""
        problem = self.problem
        end = now + problem.duration[operation]
        self.start[operation], self.free_at[rank] = now, end
        # Nothing else starts on this rank before the end, so the bytes it frees can be taken off at once.
        self.held[rank] += problem.takes[operation] - problem.frees[operation]
        self.rows[rank].append(operation)
        self.known[rank].remove(operation)
        heapq.heappush(self.events, (end, rank))
        for reader, delay in problem.after[operation]:
            self.missing[reader] -= 1
            self.ready[reader] = max(self.ready[reader], end + delay)
            if not self.missing[reader]:
                other = problem.rank[reader]
                self.known[other].append(reader)
                if other != rank and self.free_at[other] <= now + self.tiny:
                    heapq.heappush(self.events, (now, other))  # a busy rank looks for work at its end anyway

    def result(self) -> Schedule | None:
        """Return the schedule, or None where operations are left that can never start."""
        if sum(map(len, self.rows)) < self.problem.size:
            return None
        return Schedule(start=tuple(self.start), rows=tuple(map(tuple, self.rows)), end=max(self.free_at))


class _Reserve:
    """Keeps room for the oldest microbatch of each rank, so that younger ones cannot fill the memory.

    All microbatches of a rank take the same bytes, so when the oldest one has been freed, the next one fits.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.missing = [[0] * problem.microbatches for _ in range(problem.ranks)]  # bytes not yet taken
        for operation, taken in enumerate(problem.takes):
            self.missing[problem.rank[operation]][problem.microbatch[operation]] += taken
        self.oldest = [0] * problem.ranks

    def fits(self, operation: int, rank: int, held: int) -> bool:
        """Return whether an operation may take its bytes now."""
        if not self.problem.takes[operation]:
            return True
        missing, oldest = self.missing[rank], self.oldest[rank]
        while oldest < len(missing) and not missing[oldest]:
            oldest += 1
        self.oldest[rank] = oldest
        kept = 0 if self.problem.microbatch[operation] == oldest else missing[oldest]
        return held + self.problem.takes[operation] + kept <= self.problem.limits[rank]

    def take(self, operation: int, rank: int) -> None:
        """Note that an operation has taken its bytes."""
        self.missing[rank][self.problem.microbatch[operation]] -= self.problem.takes[operation]


def by_priority(problem: Problem, priority: Sequence[float], patience: float = 0.0) -> Schedule | None:
    """Let each free rank run the operation with the smallest priority among those that are ready and fit.

    patience: a rank stays idle for an operation with a smaller priority that becomes ready within this share
    of the time of the best one it could run now. None is returned where the memory limit stops every rank.
    """
    clock, reserve = _Clock(problem), _Reserve(problem)
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free_at[rank] > now + clock.tiny:
            continue
        fitting = [each for each in clock.known[rank] if reserve.fits(each, rank, clock.held[rank])]
        if not fitting:
            continue
        began = now + clock.tiny
        best = min(fitting, key=lambda each: (clock.ready[each] > began, priority[each]))
        until = began + patience * problem.duration[best]
        soon = [each for each in fitting if began < clock.ready[each] < until]
        if clock.ready[best] > began:
            heapq.heappush(clock.events, (min(clock.ready[each] for each in fitting), rank))
        elif soon and priority[first := min(soon, key=priority.__getitem__)] < priority[best]:
            heapq.heappush(clock.events, (clock.ready[first], rank))
        else:
            reserve.take(best, rank)
            clock.begin(best, now, rank)
    return clock.result()


def in_sequence(problem: Problem, times: Sequence[float], gap: float = 0.5) -> Schedule | None:
    """Let each rank run F and BI in the order of `times`, and BW, oldest first, where it would be idle.

    gap: BW runs before an operation whose time of readiness is known only where the rank would be idle for
    this share of the BW. BW also runs where the next F does not fit. None is returned where the order cannot
    run, or an F does not fit and no BW is left that frees memory.
    """
    clock = _Clock(problem)
    sequences: list[deque[int]] = [deque() for _ in range(problem.ranks)]  # F and BI that are left
    moved = (operation for operation, kind in enumerate(problem.kind) if kind != W)
    for operation in sorted(moved, key=times.__getitem__):
        sequences[problem.rank[operation]].append(operation)
    owed: list[deque[int]] = [deque() for _ in range(problem.ranks)]  # the BW whose BI has run
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free_at[rank] > now + clock.tiny:
            continue
        operation = sequences[rank][0] if sequences[rank] else -1
        weights = owed[rank][0] if owed[rank] else -1
        wake = NEVER if operation < 0 or clock.missing[operation] else clock.ready[operation]
        if operation >= 0 and clock.held[rank] + problem.takes[operation] > problem.limits[rank]:
            if weights < 0:
                return None
            operation = weights
        elif wake > now + clock.tiny:
            if weights < 0 or wake - now < gap * problem.duration[weights] - clock.tiny:
                if wake < NEVER:
                    heapq.heappush(clock.events, (wake, rank))
                continue  # where the wake-up time is not known, the start of what it waits for wakes the rank
            operation = weights
        (owed if operation == weights else sequences)[rank].popleft()
        if problem.kind[operation] == I:
            owed[rank].append(problem.after[operation][-1][0])
        clock.begin(operation, now, rank)
    return clock.result()
