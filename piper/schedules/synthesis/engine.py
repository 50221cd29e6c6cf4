"""Two list schedulers over a problem: one follows priorities, one follows a given order of F and BI."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from piper.schedules.synthesis.problem import I, W, Problem

TINY = 1e-12  # times closer than this, as a share of the mean operation, are one time
NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When each operation starts, in which order each rank runs its own, and when the last one ends."""

    start: tuple[float, ...]
    rows: tuple[tuple[int, ...], ...]
    end: float


@dataclass(slots=True, kw_only=True)
class _Clock:
    """The state of a simulated step: what has started, and when each rank is free again."""

    problem: Problem
    tiny: float = 0.0
    start: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)  # of each operation; -1: it has not started
    rows: list[list[int]] = field(default_factory=list)
    free_at: list[float] = field(default_factory=list)  # of each rank
    held: list[int] = field(default_factory=list)  # bytes, of each rank
    events: list[tuple[float, int]] = field(default_factory=list)  # (time, rank that looks for work)

    def __post_init__(self) -> None:
        problem, ranks = self.problem, self.problem.ranks
        self.tiny = TINY * sum(problem.duration) / problem.size
        self.start, self.finish = [0.0] * problem.size, [-1.0] * problem.size
        self.rows = [[] for _ in range(ranks)]
        self.free_at, self.held = [0.0] * ranks, [0] * ranks
        self.events = [(0.0, rank) for rank in range(ranks)]

    def begin(self, operation: int, now: float, rank: int) -> float:
        """Start an operation, and return when it ends."""
        problem = self.problem
        end = now + problem.duration[operation]
        self.start[operation], self.finish[operation], self.free_at[rank] = now, end, end
        # Nothing else starts on this rank before the end, so the bytes it frees can be taken off at once.
        self.held[rank] += problem.takes[operation] - problem.frees[operation]
        self.rows[rank].append(operation)
        heapq.heappush(self.events, (end, rank))
        return end

    def result(self) -> Schedule | None:
        """Return the schedule, or None where operations are left that can never start."""
        if sum(map(len, self.rows)) < self.problem.size:
            return None
        return Schedule(start=tuple(self.start), rows=tuple(map(tuple, self.rows)), end=max(self.free_at))


class _Reserve:
    """Keeps room for the oldest microbatch of each rank, so that younger ones cannot fill the memory for good.

    All microbatches of a rank take the same bytes, so when the oldest one has been freed, the next one fits.
    """

    def __init__(self, problem: Problem, limits: tuple[int, ...]) -> None:
        self.problem, self.limits = problem, limits
        self.missing = [[0] * problem.microbatches for _ in range(problem.ranks)]  # bytes not yet taken
        for operation, taken in enumerate(problem.takes):
            self.missing[problem.rank[operation]][problem.microbatch[operation]] += taken
        self.oldest = [0] * problem.ranks

    def fits(self, operation: int, rank: int, held: int) -> bool:
        """Return whether an operation may take its bytes now."""
        taken = self.problem.takes[operation]
        if not taken:
            return True
        missing, oldest = self.missing[rank], self.oldest[rank]
        while oldest < len(missing) and not missing[oldest]:
            oldest += 1
        self.oldest[rank] = oldest
        kept = 0 if self.problem.microbatch[operation] == oldest else missing[oldest]
        return held + taken + kept <= self.limits[rank]

    def take(self, operation: int, rank: int) -> None:
        """Note that an operation has taken its bytes."""
        self.missing[rank][self.problem.microbatch[operation]] -= self.problem.takes[operation]


def by_priority(problem: Problem, priority: Sequence[float], patience: float = 0.0) -> Schedule | None:
    """Let each free rank run the operation with the smallest priority among those that are ready and fit.

    patience: a rank stays idle for an operation with a smaller priority that becomes ready within this share
    of the time of the best one it could run now. None is returned where the memory limit stops every rank.
    """
    clock = _Clock(problem=problem)
    reserve = _Reserve(problem, problem.limits) if problem.limits is not None else None
    missing = [len(needed) for needed in problem.before]
    ready = [0.0] * problem.size
    known: list[list[int]] = [[] for _ in range(problem.ranks)]  # all that they need has started
    for operation, count in enumerate(missing):
        if not count:
            known[problem.rank[operation]].append(operation)
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free_at[rank] > now + clock.tiny:
            continue
        fitting = known[rank]
        if reserve:
            fitting = [operation for operation in fitting if reserve.fits(operation, rank, clock.held[rank])]
        chosen, wake = choose(problem, priority, patience, ready, fitting, now + clock.tiny)
        if chosen < 0:
            if wake < NEVER:
                heapq.heappush(clock.events, (wake, rank))
            continue
        known[rank].remove(chosen)
        if reserve:
            reserve.take(chosen, rank)
        end = clock.begin(chosen, now, rank)
        for reader, delay in problem.after[chosen]:
            missing[reader] -= 1
            ready[reader] = max(ready[reader], end + delay)
            if not missing[reader]:
                other = problem.rank[reader]
                known[other].append(reader)
                heapq.heappush(clock.events, (max(now, clock.free_at[other]), other))
    return clock.result()


def choose(
    problem: Problem,
    priority: Sequence[float],
    patience: float,
    ready: Sequence[float],
    operations: Sequence[int],
    now: float,
) -> tuple[int, float]:
    """Return the operation to run now, or -1 and when to look again."""
    best = soon = -1
    wake = NEVER
    for operation in operations:
        if ready[operation] <= now:
            if best < 0 or priority[operation] < priority[best]:
                best = operation
        else:
            wake = min(wake, ready[operation])
            if soon < 0 or priority[operation] < priority[soon]:
                soon = operation
    if (
        best >= 0
        and soon >= 0
        and priority[soon] < priority[best]
        and ready[soon] - now < patience * problem.duration[best]
    ):
        return -1, ready[soon]
    return best, wake


def in_sequence(problem: Problem, times: Sequence[float], gap: float = 0.5) -> Schedule | None:
    """Let each rank run F and BI in the order of `times`, and BW, oldest first, where it would be idle.

    gap: BW runs before an operation whose time of readiness is known only where the rank would be idle for
    this share of the BW. BW also runs where the next F does not fit. None is returned where the order cannot
    run, or an F does not fit and no BW is left that frees memory.
    """
    clock = _Clock(problem=problem)
    sequences = sequences_of(problem, times)
    position = [0] * problem.ranks
    owed: list[list[int]] = [[] for _ in range(problem.ranks)]  # weight gradients that can run
    paid = [0] * problem.ranks
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free_at[rank] > now + clock.tiny:
            continue
        weights = owed[rank][paid[rank]] if paid[rank] < len(owed[rank]) else -1
        operation, wake = -1, NEVER
        if position[rank] < len(sequences[rank]):
            operation = sequences[rank][position[rank]]
            wake = ready_at(problem, clock.finish, operation)
        if operation >= 0 and not fits(problem, operation, rank, clock.held[rank]):
            if weights < 0:
                return None
            operation = weights
        elif wake > now + clock.tiny:
            if weights >= 0 and wake - now >= gap * problem.duration[weights] - clock.tiny:
                operation = weights
            elif wake < NEVER:
                heapq.heappush(clock.events, (wake, rank))
                continue
            else:
                continue  # the operation it waits for wakes this rank when it starts
        if problem.kind[operation] == W:
            paid[rank] += 1
        else:
            position[rank] += 1
            if problem.kind[operation] == I:
                owed[rank].append(problem.after[operation][-1][0])
        clock.begin(operation, now, rank)
        for reader, _ in problem.after[operation]:
            other = problem.rank[reader]
            if other != rank and clock.free_at[other] <= now + clock.tiny:
                heapq.heappush(clock.events, (now, other))
    return clock.result()


def in_order(problem: Problem, rows: Sequence[Sequence[int]]) -> Schedule | None:
    """Let each rank run exactly its row. None is returned where a rank would exceed its limit."""
    clock = _Clock(problem=problem)
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        position = len(clock.rows[rank])
        if clock.free_at[rank] > now + clock.tiny or position == len(rows[rank]):
            continue
        operation = rows[rank][position]
        if not fits(problem, operation, rank, clock.held[rank]):
            return None
        wake = ready_at(problem, clock.finish, operation)
        if wake > now + clock.tiny:
            if wake < NEVER:
                heapq.heappush(clock.events, (wake, rank))
            continue  # else the operation it waits for wakes this rank when it starts
        clock.begin(operation, now, rank)
        for reader, _ in problem.after[operation]:
            other = problem.rank[reader]
            if other != rank and clock.free_at[other] <= now + clock.tiny:
                heapq.heappush(clock.events, (now, other))
    return clock.result()


def ready_at(problem: Problem, finish: Sequence[float], operation: int) -> float:
    """Return when all that an operation needs is there; infinity where something has not started."""
    ready = 0.0
    for needed, delay in problem.before[operation]:
        if finish[needed] < 0:
            return NEVER
        ready = max(ready, finish[needed] + delay)
    return ready


def fits(problem: Problem, operation: int, rank: int, held: int) -> bool:
    """Return whether a rank that holds `held` bytes has room for an operation."""
    return problem.limits is None or held + problem.takes[operation] <= problem.limits[rank]


def sequences_of(problem: Problem, times: Sequence[float]) -> list[list[int]]:
    """Return the F and BI of each rank in the order of `times`."""
    rows: list[list[tuple[float, int]]] = [[] for _ in range(problem.ranks)]
    for operation, kind in enumerate(problem.kind):
        if kind != W:
            rows[problem.rank[operation]].append((times[operation], operation))
    return [[operation for _, operation in sorted(row)] for row in rows]
