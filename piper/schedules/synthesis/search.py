"""Search for a short schedule: greedy rules, building blocks, justification, moves on the critical path.

Deterministic: the budget is a number of trials, each one simulated step, and the random numbers have a seed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from random import Random

from piper.schedules.synthesis.blocks import (
    KNOWN,
    BuildingBlock,
    neighbour,
    priorities,
    random_block,
    times_of,
)
from piper.schedules.synthesis.list_schedulers import Problem, Schedule, W, by_priority, in_sequence

CLOSE = 1e-9  # a relative difference of makespans that is rounding
PATIENCE = 1.01  # a rank waits for about as long as what it could run instead takes
GAPS = (0.5, 1.0)
STALE_BLOCKS = 12  # steps without a shorter block before another start
STALE_MOVES = 300  # moves without a shorter schedule before another start
WARMTH = 0.0015  # of the annealing, as a share of the makespan
POOL = 8  # the schedules that moves start from


Found = tuple[Schedule, Sequence[float]]  # a schedule, and the times whose order gave it


@dataclass(slots=True, kw_only=True)
class Search:
    """A search under way: what it may still try, and what it has found."""

    problem: Problem
    bound: float
    trials: int  # that are left
    random: Random = field(default_factory=lambda: Random(0))
    found: list[Found] = field(default_factory=list)
    best: Schedule | None = None

    @property
    def done(self) -> bool:
        """Return whether the budget is spent or the bound is reached."""
        return self.trials <= 0 or (self.best is not None and self.best.end <= self.bound * (1 + CLOSE))

    def note(self, schedule: Schedule | None, times: Sequence[float] | None = None) -> Schedule | None:
        """Count one trial, and remember its schedule if there is one."""
        self.trials -= 1
        if schedule is not None:
            self.found.append((schedule, schedule.start if times is None else times))
            if self.best is None or schedule.end < self.best.end * (1 - CLOSE):
                self.best = schedule
        return schedule

    def shortest(self) -> list[Found]:
        """Return the shortest schedules found, and forget those that are much longer."""
        ordered = sorted(self.found, key=lambda found: found[0].end)
        self.found = ordered[: 4 * POOL]
        return ordered[:POOL]


def search(problem: Problem, bound: float, trials: int, named: Iterable[Schedule] = ()) -> Schedule | None:
    """Return the shortest schedule found within a number of trials; None where none fits the memory."""
    state = Search(problem=problem, bound=bound, trials=trials)
    for schedule in named:
        state.note(schedule)
    for priority, patience in product(priorities(problem), (0.0, PATIENCE)):  # every greedy rule
        if not state.done:
            state.note(by_priority(problem, priority, patience))
    try_blocks(state, state.trials // 2)
    for schedule, _ in state.shortest()[: POOL // 2]:
        justify(state, schedule)
    make_moves(state)
    return state.best


def try_blocks(state: Search, trials: int) -> None:
    """Climb from the known building blocks, and then from random ones, for a number of trials."""
    tried: dict[BuildingBlock, float] = {}
    starts = list(reversed(KNOWN))
    until = state.trials - trials

    def value(block: BuildingBlock) -> float:
        if block not in tried:
            times = times_of(state.problem, block)
            ends = [math.inf]
            for gap in GAPS:
                if schedule := state.note(in_sequence(state.problem, times, gap), times):
                    ends.append(schedule.end)
            tried[block] = min(ends)
        return tried[block]

    while not state.done and state.trials > until:
        block = starts.pop() if starts else random_block(state.random)
        end, stale = value(block), 0
        for _ in range(20 * STALE_BLOCKS):  # a small problem may have no untried neighbour left
            if stale >= STALE_BLOCKS or state.done or state.trials <= until:
                break
            other = neighbour(block, state.random)
            stale = 0 if value(other) < end else stale + 1
            if value(other) <= end:
                block, end = other, value(other)


def justify(state: Search, schedule: Schedule) -> Schedule:
    """Schedule backwards in the order of finishing times, then forwards again, while that helps.

    So operations shift to the right and back to the left, which closes gaps.
    """
    problem = state.problem
    backwards = problem.backwards_in_time()
    while not state.done:
        late = by_priority(backwards, [-end for end in ends_of(problem, schedule.start)])
        state.trials -= 1
        if late is None:
            return schedule
        early = state.note(by_priority(problem, [-end for end in ends_of(problem, late.start)]))
        if early is None or early.end >= schedule.end * (1 - CLOSE):
            return schedule
        schedule = early
    return schedule


def ends_of(problem: Problem, start: Sequence[float]) -> list[float]:
    """Return when each operation ends."""
    return [begin + time for begin, time in zip(start, problem.duration, strict=True)]


def make_moves(state: Search) -> None:
    """Anneal: change the order of F and BI a little, keep what is shorter and now and then what is longer."""
    problem, random = state.problem, state.random
    pool = state.shortest()
    if not pool:
        return
    current, stale = pool[0], 0
    while not state.done:
        best = state.best
        times = move(problem, current, random)
        if random.random() < 0.15:
            schedule = state.note(by_priority(problem, times, random.choice((0.0, 0.5, PATIENCE))))
            if schedule is not None and schedule.end <= current[0].end * 1.01:
                schedule = justify(state, schedule)
            times = list(schedule.start) if schedule is not None else times
        else:
            schedule = state.note(in_sequence(problem, times, random.choice((0.5, 0.5, 1.0, 0.01))), times)
        if schedule is None:
            continue
        end, before = schedule.end, current[0].end
        longer = end > before * (1 + CLOSE)  # which is seldom kept
        if not longer or random.random() < math.exp((before - end) / (WARMTH * before)):
            current = schedule, times
        stale = 0 if state.best is not best else stale + 1
        if stale > STALE_MOVES:
            current, stale = random.choice(state.shortest()), 0


def move(problem: Problem, found: Found, random: Random) -> list[float]:
    """Return new times for F and BI, from which their order is taken."""
    if random.random() < 0.5 and (swaps := critical_swaps(problem, found[0], random)):
        times = list(found[0].start)
        for first, second in random.sample(swaps, min(len(swaps), random.choice((1, 1, 2, 3)))):
            times[first], times[second] = times[second], times[first]
        return times
    return shifted(problem, list(found[1]), found[0].end, random)


def shifted(problem: Problem, times: list[float], end: float, random: Random) -> list[float]:
    """Return the times with one pass of a stage, a few operations, a window or everything moved at random."""
    mean = sum(problem.duration) / problem.size
    moved = [operation for operation, kind in enumerate(problem.kind) if kind != W]
    choice = random.random()
    if choice < 0.35:
        kind, stage = random.randrange(W), random.randrange(problem.stages)
        first, last = 0, problem.microbatches
        if random.random() < 0.5:
            first = random.randrange(problem.microbatches)
            last = min(last, first + random.randrange(1, 2 + problem.microbatches // 2))
        shift = random.gauss(0, 2 * mean)
        for microbatch in range(first, last):
            times[problem.number(kind, stage, microbatch)] += shift
    elif choice < 0.75:
        for _ in range(random.choice((1, 1, 2, 3, 6))):
            times[random.choice(moved)] += random.gauss(0, 2 * mean)
    else:
        whole = choice >= 0.9
        first_time = -math.inf if whole else random.random() * end
        last_time = math.inf if whole else first_time + random.random() * end / 4
        spread = mean * random.choice((0.3, 0.6, 1.0) if whole else (0.5, 1.0, 2.0))
        for operation in moved:
            if first_time <= times[operation] <= last_time:
                times[operation] += random.gauss(0, spread)
    return times


def critical_swaps(problem: Problem, schedule: Schedule, random: Random) -> list[tuple[int, int]]:
    """Walk back one longest path, and return the neighbours on it that their rank could run the other way.

    Only F and BI count, where the second does not need the first.
    """
    start, ends = schedule.start, ends_of(problem, schedule.start)
    close = CLOSE * schedule.end
    previous = {second: first for row in schedule.rows for first, second in pairwise(row)}
    operation = max(range(problem.size), key=ends.__getitem__)
    swaps: list[tuple[int, int]] = []
    while True:
        needed = {
            other: delay
            for other, delay in problem.before[operation]
            if abs(ends[other] + delay - start[operation]) < close
        }
        choices = list(needed)
        neighbour_before = previous.get(operation)
        if neighbour_before is not None and abs(ends[neighbour_before] - start[operation]) < close:
            choices.append(neighbour_before)
        if not choices:
            return swaps
        chosen = random.choice(choices)
        if chosen not in needed and W not in (problem.kind[operation], problem.kind[chosen]):
            swaps.append((chosen, operation))
        operation = chosen
