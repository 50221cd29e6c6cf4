"""A synthesis problem in numbers, and list schedulers over it: by priority, and by a given order of F and BI.

Every pass of every stage and microbatch is one numbered operation. The search starts tens of thousands of
simulated steps. It works on flat tuples indexed by operation, and only its result becomes a grid of actions.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from piper.ir.chunk import Phase
from piper.schedules.grid import Action
from piper.schedules.timing import Memory, Placement, StageCosts, gives, needs

F, I, W = 0, 1, 2  # kinds of operations  # noqa: E741
PHASES: tuple[Phase, ...] = ("F", "BI", "BW")
Edges = tuple[tuple[tuple[int, float], ...], ...]  # of each operation: its neighbours, with the delay between


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operations with their ranks, times, memory and dependencies, indexed by operation number."""

    costs: StageCosts
    ranks: int
    stages: int
    microbatches: int
    limits: tuple[int, ...] | None  # bytes of each rank; None: no limit
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
        """Return the number of operations."""
        return len(self.kind)

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of an operation."""
        return (stage * self.microbatches + microbatch) * 3 + kind

    def action(self, operation: int) -> Action:
        """Return the action that an operation stands for."""
        return Action(
            stage=self.stage[operation],
            phase=PHASES[self.kind[operation]],
            microbatch=self.microbatch[operation],
        )

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
    actions = [
        Action(stage=stage, phase=phase, microbatch=microbatch)
        for stage in range(costs.stages)
        for microbatch in range(microbatches)
        for phase in PHASES
    ]
    before, after = dependencies(costs, placement, actions)
    return Problem(
        costs=costs,
        ranks=placement.count,
        stages=costs.stages,
        microbatches=microbatches,
        limits=tuple(memory.limit_of(rank) for rank in range(placement.count)) if memory else None,
        kind=tuple(PHASES.index(action.phase) for action in actions),
        stage=tuple(action.stage for action in actions),
        microbatch=tuple(action.microbatch for action in actions),
        rank=tuple(placement.ranks[action.stage] for action in actions),
        duration=tuple(costs.of(action.stage, action.phase) for action in actions),
        takes=tuple(memory.taken_by(action) if memory else 0 for action in actions),
        frees=tuple(memory.freed_by(action) if memory else 0 for action in actions),
        before=before,
        after=after,
    )


def dependencies(costs: StageCosts, placement: Placement, actions: Sequence[Action]) -> tuple[Edges, Edges]:
    """Return what each operation needs, and what needs it, with the transfer time between ranks."""
    maker = {gives(action): number for number, action in enumerate(actions)}
    before: list[tuple[tuple[int, float], ...]] = []
    after: list[list[tuple[int, float]]] = [[] for _ in actions]
    for number, action in enumerate(actions):
        needed = []
        for value in needs(action, costs.stages - 1):
            same = placement.ranks[value[1]] == placement.ranks[action.stage]
            delay = 0.0 if same else float(costs.hop_between(value[1], action.stage))
            needed.append((maker[value], delay))
            after[maker[value]].append((number, delay))
        before.append(tuple(needed))
    return tuple(before), tuple(map(tuple, after))


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

    def wake_readers(self, operation: int, now: float, rank: int) -> None:
        """Let idle ranks that need an operation's result look for work: they now know when it ends."""
        for reader, _ in self.problem.after[operation]:
            other = self.problem.rank[reader]
            if other != rank and self.free_at[other] <= now + self.tiny:
                heapq.heappush(self.events, (now, other))

    def result(self) -> Schedule | None:
        """Return the schedule, or None where operations are left that can never start."""
        if sum(map(len, self.rows)) < self.problem.size:
            return None
        return Schedule(start=tuple(self.start), rows=tuple(map(tuple, self.rows)), end=max(self.free_at))


class _Reserve:
    """Keeps room for the oldest microbatch of each rank, so that younger ones cannot fill the memory.

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


class _Known:
    """The operations of each rank whose needs have all started, so that it is known when they can start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.missing = [len(needed) for needed in problem.before]
        self.ready = [0.0] * problem.size
        self.of_rank: list[list[int]] = [[] for _ in range(problem.ranks)]
        for operation, count in enumerate(self.missing):
            if not count:
                self.of_rank[problem.rank[operation]].append(operation)

    def update(self, operation: int, end: float) -> list[int]:
        """Note when an operation ends, and return the ranks that have got something to do by it."""
        self.of_rank[self.problem.rank[operation]].remove(operation)
        ranks = []
        for reader, delay in self.problem.after[operation]:
            self.missing[reader] -= 1
            self.ready[reader] = max(self.ready[reader], end + delay)
            if not self.missing[reader]:
                self.of_rank[self.problem.rank[reader]].append(reader)
                ranks.append(self.problem.rank[reader])
        return ranks


def by_priority(problem: Problem, priority: Sequence[float], patience: float = 0.0) -> Schedule | None:
    """Let each free rank run the operation with the smallest priority among those that are ready and fit.

    patience: a rank stays idle for an operation with a smaller priority that becomes ready within this share
    of the time of the best one it could run now. None is returned where the memory limit stops every rank.
    """
    clock = _Clock(problem=problem)
    reserve = _Reserve(problem, problem.limits) if problem.limits is not None else None
    known, takes = _Known(problem), problem.takes
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free_at[rank] > now + clock.tiny:
            continue
        fitting = known.of_rank[rank]
        if reserve:
            held = clock.held[rank]
            fitting = [each for each in fitting if not takes[each] or reserve.fits(each, rank, held)]
        chosen, wake = choose(problem, priority, patience, known.ready, fitting, now + clock.tiny)
        if chosen >= 0:
            if reserve:
                reserve.take(chosen, rank)
            for other in known.update(chosen, clock.begin(chosen, now, rank)):
                heapq.heappush(clock.events, (max(now, clock.free_at[other]), other))
        elif wake < NEVER:
            heapq.heappush(clock.events, (wake, rank))
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


class _Queues:
    """What each rank runs next: F and BI in a given order, and the BW whose BI has run, oldest first."""

    def __init__(self, problem: Problem, times: Sequence[float]) -> None:
        self.problem = problem
        self.sequences = [deque(row) for row in sequences_of(problem, times)]
        self.owed: list[deque[int]] = [deque() for _ in range(problem.ranks)]

    def first(self, rank: int) -> tuple[int, int]:
        """Return the next F or BI of a rank, and the oldest BW that it could run; -1: there is none."""
        sequence, owed = self.sequences[rank], self.owed[rank]
        return sequence[0] if sequence else -1, owed[0] if owed else -1

    def take(self, operation: int, rank: int) -> None:
        """Note that a rank has started an operation."""
        waiting = self.owed if self.problem.kind[operation] == W else self.sequences
        waiting[rank].popleft()
        if self.problem.kind[operation] == I:
            self.owed[rank].append(self.problem.after[operation][-1][0])


def in_sequence(problem: Problem, times: Sequence[float], gap: float = 0.5) -> Schedule | None:
    """Let each rank run F and BI in the order of `times`, and BW, oldest first, where it would be idle.

    gap: BW runs before an operation whose time of readiness is known only where the rank would be idle for
    this share of the BW. BW also runs where the next F does not fit. None is returned where the order cannot
    run, or an F does not fit and no BW is left that frees memory.
    """
    clock = _Clock(problem=problem)
    queues = _Queues(problem, times)
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free_at[rank] > now + clock.tiny:
            continue
        operation, weights = queues.first(rank)
        wake = ready_at(problem, clock.finish, operation) if operation >= 0 else NEVER
        if operation >= 0 and not fits(problem, operation, rank, clock.held[rank]):
            if weights < 0:
                return None
            operation = weights
        elif wake > now + clock.tiny:
            if weights < 0 or wake - now < gap * problem.duration[weights] - clock.tiny:
                if wake < NEVER:
                    heapq.heappush(clock.events, (wake, rank))
                continue  # where the wake-up time is not known, the start of what it waits for wakes the rank
            operation = weights
        queues.take(operation, rank)
        clock.begin(operation, now, rank)
        clock.wake_readers(operation, now, rank)
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
