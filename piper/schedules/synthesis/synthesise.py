"""Schedule synthesis: from what stages cost and hold to the shortest `order` directives, and a bound."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from piper.directives.order import Order
from piper.errors import ScheduleError
from piper.schedules.grid import NAMES, SYNTHESISED, Action, Grid, Group, Row, grid_for, need_whole, orders
from piper.schedules.synthesis.list_schedulers import F, I, Problem, Schedule, W, problem_of
from piper.schedules.synthesis.search import CLOSE, search
from piper.schedules.timing import Memory, Placement, StageCosts, makespan, peak_bytes, timeline

TRIALS = 400
ROUNDING = 1e-9  # of a share of memory: 0.1 of 30 forwards are 3


class Synthesised(list[Order]):
    """The `order` directives of a synthesised schedule, one for each rank, with its makespan and bound."""

    def __init__(
        self, directives: Iterable[Order], grid: Grid, costs: StageCosts, makespan: float, bound: float
    ) -> None:
        super().__init__(directives)
        self.grid, self.costs, self.makespan = grid, costs, makespan
        self.bound = bound  # no schedule of these stages is shorter


def synthesise(
    costs: StageCosts,
    placement: Placement,
    microbatches: int,
    memory: Memory | None = None,
    *,
    trials: int = TRIALS,
    stage: str = "PP",
    part: str = "MB",
) -> Synthesised:
    """Search for a short schedule of stages that may differ, within a memory limit.

    The result is never longer than a named schedule with the same placement that fits the memory. The same
    arguments give the same result: the budget is a number of `trials`, each one simulated step, and the
    search stops before it is spent where it reaches the bound.

    costs: how long each stage's passes and the transfers between ranks take.
    placement: which rank runs each stage: `Placement.v(ranks)`, `Placement.loop(ranks)`, or any other.
    memory: what a microbatch of each stage holds, and how much each rank may hold. None: no limit.
    """
    need_whole("synthesise", microbatches=microbatches, trials=trials)
    check_inputs(costs, placement, memory, "synthesise")
    problem = problem_of(costs, placement, microbatches, memory)
    least = bound(costs, placement, microbatches, memory)
    named = list(named_grids(placement, microbatches))
    stages = (placement.stages_of(rank) for rank in range(placement.count))
    least_memory = Grid(rows=tuple(one_by_one(mine, microbatches) for mine in stages))
    candidates = [grid for grid in (*named, least_memory) if within(grid, memory)]
    seeds = (schedule_of(problem, grid, memory) for grid in named)
    found = search(problem, least, trials, [seed for seed in seeds if seed is not None])
    if found is not None:
        candidates.insert(0, grid_of(problem, found))
    grid = min(candidates, key=lambda grid: makespan(grid, costs))
    end = makespan(grid, costs)
    assert least <= end * (1 + CLOSE), f"a schedule of {end} beats the bound of {least}"
    return Synthesised(orders(grid, stage=stage, part=part), grid, costs, end, min(least, end))


def check_inputs(costs: StageCosts, placement: Placement, memory: Memory | None, by: str) -> None:
    """Refuse inputs of other types, of different sizes, and a limit that not even one microbatch fits."""
    for name, given, wanted in (
        ("costs", costs, StageCosts),
        ("placement", placement, Placement),
        ("memory", memory, Memory),
    ):
        if not isinstance(given, wanted) and not (name == "memory" and given is None):
            raise ScheduleError(
                f"{name} is a {type(given).__name__}",
                by=by,
                hint=f"give a piper.schedules.{wanted.__name__}",
            )
    sizes = {"costs": costs.stages, "placement": len(placement.ranks)}
    if memory is not None:
        sizes["memory"] = len(memory.saved)
    if len(set(sizes.values())) > 1:
        raise ScheduleError(
            "the inputs differ in their number of stages",
            by=by,
            facts={name: f"{size} stages" for name, size in sizes.items()},
            hint="give costs, placement and memory of the same stages",
        )
    if memory is None:
        return
    if not isinstance(memory.limit, int) and len(memory.limit) != placement.count:
        raise ScheduleError(
            f"{len(memory.limit)} limits for {placement.count} ranks",
            by=by,
            hint="give one limit for all ranks, or one for each",
        )
    for rank in range(placement.count):
        needed = sum(memory.saved[stage] for stage in placement.stages_of(rank))
        if needed > memory.limit_of(rank):
            raise ScheduleError(
                f"rank {rank} cannot hold one microbatch",
                by=by,
                facts={"needs": f"{needed} bytes", "limit": f"{memory.limit_of(rank)} bytes"},
                hint="raise the limit, use smaller microbatches, or put fewer stages on the rank",
            )


def named_grids(placement: Placement, microbatches: int) -> Iterator[Grid]:
    """Yield the named schedules that put the same stages on the same ranks, the members of pairs in turn."""
    ranks, stages = placement.count, len(placement.ranks)
    if stages % ranks:
        return
    for name in NAMES:
        try:
            grid = grid_for(name, ranks, microbatches, stages // ranks)
        except ScheduleError:
            continue  # this schedule does not exist with so many stages, or so few microbatches
        if all(placement.ranks[action.stage] == rank for rank, action in grid.actions()):
            rows = (tuple((action,) for group in row for action in group) for row in grid.rows)
            yield Grid(rows=tuple(rows))


def one_by_one(stages: Sequence[int], microbatches: int) -> Row:
    """Return the row of a rank that finishes each microbatch before the next."""
    row: list[Group] = []
    for microbatch in range(microbatches):
        row += [(Action(stage=stage, phase="F", microbatch=microbatch),) for stage in stages]
        row += [(Action(stage=stage, phase="B", microbatch=microbatch),) for stage in reversed(stages)]
    return tuple(row)


def within(grid: Grid, memory: Memory | None) -> bool:
    """Return whether every rank stays within its limit."""
    return memory is None or all(
        peak <= memory.limit_of(rank) for rank, peak in enumerate(peak_bytes(grid, memory))
    )


def schedule_of(problem: Problem, grid: Grid, memory: Memory | None) -> Schedule | None:
    """Return a grid without pairs as a schedule, each backward in its two halves. None: it does not fit."""
    split = Grid(rows=tuple(tuple(half for group in row for half in halves(*group)) for row in grid.rows))
    if not within(split, memory):
        return None
    number = {action: operation for operation, action in enumerate(problem.actions)}
    rows = tuple(tuple(number[action] for (action,) in row) for row in split.rows)
    times = timeline(split, problem.costs)
    begins = zip(chain(*rows), chain(*times.starts), strict=True)  # of each operation
    return Schedule(start=tuple(begin for _, begin in sorted(begins)), rows=rows, end=times.end)


def halves(action: Action) -> tuple[Group, ...]:
    """Return a whole backward as BI and BW, and another action as it is."""
    if action.phase != "B":
        return ((action,),)
    return (replace(action, phase="BI"),), (replace(action, phase="BW"),)


def grid_of(problem: Problem, schedule: Schedule) -> Grid:
    """Return a schedule as a grid, with whole backwards where a split one gains nothing.

    A BI and the BW right after it become one B where nothing that waits for the gradient starts before the BW
    ends.
    """
    start = schedule.start
    close = CLOSE * schedule.end
    rows: list[Row] = []
    for operations in schedule.rows:
        row: list[Group] = []
        for operation, following in zip(operations, (*operations[1:], -1), strict=True):
            action = problem.actions[operation]
            weights = problem.after[operation][-1][0] if action.phase == "BI" else -1
            if row and row[-1] == (replace(action, phase="B"),):
                continue  # the second half of a backward that is whole
            if weights >= 0 and following == weights:
                end = start[weights] + problem.duration[weights]
                readers = [(reader, delay) for reader, delay in problem.after[operation] if reader != weights]
                if all(start[reader] >= end + delay - close for reader, delay in readers):
                    action = replace(action, phase="B")
            row.append((action,))
        rows.append(tuple(row))
    return Grid(rows=tuple(rows))


def synthesised(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 2,
    *,
    memory: float = 1.0,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    last: float = 1.0,
) -> tuple[Synthesised, str]:
    """Synthesise a schedule of stages that are alike but for the last, from numbers of the command line.

    Return the shorter of one over a V and one over a loop, of equal ones the V, and a line that says how long
    it takes, what no schedule can beat, and what it holds.

    memory: a share of the activations that 1F1B's first rank holds. costs: of F, BI and BW. last: how much
    slower the last stage is.
    """
    need_whole(SYNTHESISED, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    for name, number in [*(("costs", cost) for cost in costs), ("last", last), ("memory", memory)]:
        if not 0 < number < float("inf"):  # NaN is not either
            raise ScheduleError(
                f"{name}={number:g}",
                by=SYNTHESISED,
                hint=f"{name} takes numbers above 0, none infinite or NaN",
            )
    most = stages_per_rank * min(ranks, microbatches)  # forwards that 1F1B's first rank would hold
    limit = int(memory * most + ROUNDING)  # of a rank
    if limit < stages_per_rank:
        least = 1 / min(ranks, microbatches)
        raise ScheduleError(
            f"memory={memory:g} holds no whole microbatch",
            by=SYNTHESISED,
            facts={"needs": f"at least {least:.3g} of 1F1B's {most} forwards"},
            hint="raise the memory, or use more ranks",
        )
    stages = ranks * stages_per_rank
    forward, inputs, weights = ([cost] * (stages - 1) + [cost * last] for cost in costs)
    times = StageCosts(forward=forward, inputs=inputs, weights=weights)
    held = Memory(saved=[1] * stages, carried=[1] * stages, limit=limit)
    found = synthesise(times, Placement.v(ranks, stages_per_rank), microbatches, held)
    loop = Placement.loop(ranks, stages_per_rank)
    if bound(times, loop, microbatches, held) < found.makespan:
        found = min(found, synthesise(times, loop, microbatches, held), key=lambda one: one.makespan)
    peak = max(peak_bytes(found.grid, held))
    where = "the bound: none is shorter" if found.makespan == found.bound else f"the bound is {found.bound:g}"
    return found, (
        f"makespan {found.makespan:g}, {where}; a rank holds at most {peak} forwards,"
        f" {peak / most:.2f} of 1F1B's {most}"
    )


def bound(costs: StageCosts, placement: Placement, microbatches: int, memory: Memory | None = None) -> float:
    """Return a time that no schedule of these stages can beat, whatever its order: proven by relaxation.

    Two relaxations, each of which only removes constraints:
    - One rank at a time, as if every other rank were free whenever it is needed. Each pass has a head (the
      shortest time before it can start) and a tail (the shortest time that must follow it). The rank may
      interrupt a pass and resume it later; running the pass with the longest tail first is then optimal.
    - Bytes times seconds: a microbatch holds a stage's bytes at least as long as its way from there to the
      loss and back, and a rank never holds more than its limit.
    """
    need_whole("bound", microbatches=microbatches)
    check_inputs(costs, placement, memory, "bound")
    problem = problem_of(costs, placement, 1)
    heads, tails = paths_of(problem)
    found = 0.0
    for rank in range(placement.count):
        mine = placement.stages_of(rank)
        passes = [problem.number(kind, stage, 0) for stage in mine for kind in (F, I, W)]
        # Microbatches are alike, so each pass is one job for all of them.
        jobs = [(heads[each], tails[each], microbatches * problem.duration[each]) for each in passes]
        found = max(found, one_rank(sorted(jobs)))
        if memory is not None and (limit := memory.limit_of(rank)):
            volume = 0.0
            for stage in mine:
                saved, least = memory.saved[stage], min(memory.saved[stage], memory.carried[stage])
                until_split = heads[problem.number(W, stage, 0)] - heads[problem.number(F, stage, 0)]
                # A whole backward holds `saved` where a split one holds `carried`: the smaller counts.
                volume += saved * until_split + least * costs.weights[stage]
            begin = min(heads[problem.number(F, stage, 0)] for stage in mine)
            found = max(found, begin + microbatches * volume / limit)
    return found


def paths_of(problem: Problem) -> tuple[list[float], list[float]]:
    """Return the shortest time before each pass of a single microbatch, and the shortest that must follow."""
    size, duration = problem.size, problem.duration
    order = [*range(F, size, 3), *reversed(range(I, size, 3)), *range(W, size, 3)]
    heads, tails = [0.0] * size, [0.0] * size
    for each in order:
        ends = (heads[other] + duration[other] + delay for other, delay in problem.before[each])
        heads[each] = max(ends, default=0.0)
    for each in reversed(order):
        follow = (delay + duration[other] + tails[other] for other, delay in problem.after[each])
        tails[each] = max(follow, default=0.0)
    return heads, tails


def one_rank(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Return the shortest makespan of one rank's jobs, interruptions allowed: (head, tail, time), by head."""
    waiting: list[tuple[float, float]] = []  # (-tail, time left)
    now = found = 0.0
    position = 0
    while waiting or position < len(jobs):
        if not waiting:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            _, tail, left = jobs[position]
            heapq.heappush(waiting, (-tail, left))
            position += 1
        tail, left = heapq.heappop(waiting)
        pause = jobs[position][0] if position < len(jobs) else float("inf")
        if now + left > pause:
            heapq.heappush(waiting, (tail, left - (pause - now)))
            now = pause
        else:
            now += left
            found = max(found, now - tail)
    return found
