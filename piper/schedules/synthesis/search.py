"""Search for a short schedule: greedy ones at a steady pace, justification, moves on the critical path.

Deterministic: the budget is a number of trials, each one simulated step, and the random numbers have a seed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from random import Random

from piper.schedules.synthesis.list_schedulers import F, Problem, Schedule, W, by_priority, in_sequence

CLOSE = 1e-9  # a relative difference of makespans that is rounding
PACES = (0.5, 1.0, 1.5, 2.0, 3.0)  # of greedy schedules, against one in which nothing waits
PATIENCE = 1.01  # a rank waits for about as long as what it could run instead takes
WARMTH = 0.0015  # of the annealing, as a share of the makespan
KEPT = 4  # of the shortest schedules


Found = tuple[Schedule, Sequence[float]]  # a schedule, and the times whose order gave it


@dataclass(slots=True, kw_only=True)
class Search:
    """A search under way: what it may still try, and what it has found."""

    problem: Problem
    bound: float
    trials: int  # that are left
    random: Random = field(default_factory=lambda: Random(0))
    found: list[Found] = field(default_factory=list)  # the shortest, in order

    @property
    def done(self) -> bool:
        """Return whether the budget is spent or the bound is reached."""
        return self.trials <= 0 or any(each.end <= self.bound * (1 + CLOSE) for each, _ in self.found[:1])

    def note(self, schedule: Schedule | None, times: Sequence[float] | None = None) -> Schedule | None:
        """Count one trial, and keep its schedule if it is one of the shortest."""
        self.trials -= 1
        if schedule is not None:
            found = schedule, schedule.start if times is None else times
            self.found = sorted([*self.found, found], key=lambda each: each[0].end)[:KEPT]
        return schedule


def search(problem: Problem, bound: float, trials: int, named: Iterable[Schedule] = ()) -> Schedule | None:
    """Return the shortest schedule found within a number of trials; None where none fits the memory."""
    state = Search(problem=problem, bound=bound, trials=trials)
    for schedule in named:
        state.note(schedule)
    for slowness, patience in product(PACES, (0.0, PATIENCE)):
        if not state.done:
            state.note(by_priority(problem, rhythm(problem, slowness), patience))
    for slowness in PACES:
        if not state.done:
            times = rhythm(problem, slowness)
            state.note(in_sequence(problem, times), times)
    for schedule, _ in state.found:
        justify(state, schedule)
    make_moves(state)
    return state.found[0][0] if state.found else None


def rhythm(problem: Problem, slowness: float) -> list[float]:
    """Let a microbatch enter at each beat of the busiest rank, and walk the stages at a steady pace."""
    costs = problem.costs
    stages = range(problem.stages)
    hops = [costs.hop_between(stage, stage + 1) for stage in stages[:-1]]
    down = list(accumulate((costs.forward[stage] + hops[stage] for stage in stages[:-1]), initial=0.0))
    turn = down[-1] + costs.forward[-1]
    up = list(accumulate((costs.inputs[s + 1] + hops[s] for s in reversed(stages[:-1])), initial=0.0))[::-1]
    period = beat(problem)

    def place(operation: int) -> float:
        kind, stage = problem.kind[operation], problem.stage[operation]
        way = down[stage] if kind == F else turn + up[stage]
        late = period * problem.stages * slowness if kind == W else 0.0
        return problem.microbatch[operation] * period + way * slowness + late

    return [place(operation) for operation in range(problem.size)]


def beat(problem: Problem) -> float:
    """Return the time that one microbatch takes on the busiest rank."""
    work = [0.0] * problem.ranks
    for operation, time in enumerate(problem.duration):
        work[problem.rank[operation]] += time
    return max(work) / problem.microbatches


def justify(state: Search, schedule: Schedule) -> None:
    """Schedule backwards in the order of finishing times, then forwards again, while that helps.

    So operations shift to the right and back to the left, which closes gaps.
    """
    problem = state.problem
    backwards = problem.backwards_in_time()
    while not state.done:
        late = by_priority(backwards, [-end for end in ends_of(problem, schedule.start)])
        state.trials -= 1
        if late is None:
            return
        early = state.note(by_priority(problem, [-end for end in ends_of(problem, late.start)]))
        if early is None or early.end >= schedule.end * (1 - CLOSE):
            return
        schedule = early


def ends_of(problem: Problem, start: Sequence[float]) -> list[float]:
    return [begin + time for begin, time in zip(start, problem.duration, strict=True)]


def make_moves(state: Search) -> None:
    """Anneal: change the order of F and BI a little, keep what is shorter and now and then what is longer."""
    problem, random = state.problem, state.random
    if not state.found:
        return
    current = state.found[0]
    while not state.done:
        times = move(problem, current, random)
        schedule = state.note(in_sequence(problem, times, random.choice((0.5, 0.5, 1.0, 0.01))), times)
        if schedule is None:
            continue
        end, before = schedule.end, current[0].end
        longer = end > before * (1 + CLOSE)  # which is seldom kept
        if not longer or random.random() < math.exp((before - end) / (WARMTH * before)):
            current = schedule, times


def move(problem: Problem, found: Found, random: Random) -> list[float]:
    """Return new times for F and BI, from which their order is taken."""
    if random.random() < 0.5 and (swaps := critical_swaps(problem, found[0], random)):
        times = list(found[0].start)
        for first, second in random.sample(swaps, min(len(swaps), random.choice((1, 1, 2, 3)))):
            times[first], times[second] = times[second], times[first]
        return times
    times = list(found[1])
    mean = sum(problem.duration) / problem.size
    if random.random() < 0.5:  # one pass of a stage, on all microbatches or some
        kind, stage = random.randrange(W), random.randrange(problem.stages)
        first, last = 0, problem.microbatches
        if random.random() < 0.5:
            first = random.randrange(problem.microbatches)
            last = min(last, first + random.randrange(1, 2 + problem.microbatches // 2))
        shift = random.gauss(0, 2 * mean)
        for microbatch in range(first, last):
            times[problem.number(kind, stage, microbatch)] += shift
    else:
        moved = [operation for operation, kind in enumerate(problem.kind) if kind != W]
        for _ in range(random.choice((1, 1, 2, 3, 6))):
            times[random.choice(moved)] += random.gauss(0, 2 * mean)
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
