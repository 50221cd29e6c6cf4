"""The front: strategies that need less memory than the best, searched for while the search itself goes on.

[Note: the front ahead] To search with tensor and context parallelism takes as long as to search for the
front, and mostly the best stays what it was. So a forked process looks for the front of the best so far
meanwhile. What it has evaluated and synthesised waits until the search comes to it. The decisions are taken
in this process, from the same values, so the result does not depend on the number of processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from piper.schedules.grid import Grid
from piper.tuning.bounds import LeastMemory
from piper.tuning.candidates import CandidateKey
from piper.tuning.choice import StrategyChoice
from piper.tuning.evaluate import Evaluation
from piper.tuning.forked_calls import made_beside
from piper.tuning.strategy_search import Asked, StrategySearch

FRONT = (0.75, 0.5, 0.25)  # of the best strategy's peak: limits for which the front is searched too
FRONT_TRIALS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFront:
    """What a search for the front has evaluated, synthesised and bounded."""

    evaluated: dict[CandidateKey, Evaluation]
    grids: dict[Asked, Grid]
    holds: dict[StrategyChoice, LeastMemory]
    times: dict[StrategyChoice, float]
    recorded: frozenset[int]  # the microbatch sizes that were recorded there


def widen_front(search: StrategySearch, best: Evaluation) -> None:
    """Look for strategies that need less memory than the best."""
    search.wanted = 1
    for share in FRONT:
        search.run(int(best.peak * share), FRONT_TRIALS)


def with_front_ahead(
    search: StrategySearch, best: Evaluation, call: Callable[[], object], *, front: bool
) -> None:
    """Make a call while another process searches for the front of `best`: [Note: the front ahead].

    front: the front will be asked for. Else only the call is made.
    """
    workers = search.workers
    if workers == 1 or not front:
        call()
        return
    search.workers = workers - workers // 2
    try:
        found = made_beside(call, partial(prepare_front, search, best, workers // 2))
    finally:
        search.workers = workers
    if found is not None:
        search.ahead.prepared |= found.evaluated
        search.grids |= found.grids
        search.holds |= found.holds
        search.times |= found.times
        for rows in found.recorded ^ frozenset(search.model.recorded):
            search.drop_bounds(rows)  # one process has estimated its bounds, the other knows them


def prepare_front(search: StrategySearch, best: Evaluation, workers: int) -> PreparedFront:
    """Search for a front in a forked process, whose own state of the search ends with it."""
    evaluated, grids = set(search.evaluated), set(search.grids)
    search.workers, search.report = workers, lambda search, found: None
    widen_front(search, best)
    return PreparedFront(
        evaluated={key: found for key, found in search.evaluated.items() if key not in evaluated},
        grids={asked: grid for asked, grid in search.grids.items() if asked not in grids},
        holds=search.holds,
        times=search.times,
        recorded=frozenset(search.model.recorded),
    )
