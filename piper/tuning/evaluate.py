"""Evaluates candidates: compiles each with the shared recordings, proves it, and simulates a step.

[Note: candidates evaluated ahead] While the search evaluates a candidate, or waits for it, other processes
evaluate those that come next in its queue. Results wait until the search comes to them, so it takes the same
decisions, in the same order, with any number of processes.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import floor, log
from multiprocessing.connection import wait

from piper.directives import Directive
from piper.errors import PiperError
from piper.plan.plan import Plans
from piper.process.gc_pause import no_collection
from piper.runtime.memory_release import predicted_peak
from piper.schedules.grid import Grid
from piper.simulate.account import communicators_of
from piper.simulate.simulate import model_flops, simulate
from piper.tuning.bounds import LeastMemory
from piper.tuning.choice import GIVEN, SYNTHESISED, StrategyChoice, directives_of
from piper.tuning.forked_calls import ForkedCall
from piper.tuning.model import Model

AHEAD = 32  # entries of the queue among which processes find candidates to evaluate
CandidateKey = tuple[StrategyChoice, Grid | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """Candidates that differ only in the order of passes, in ZeRO levels and in how devices are numbered."""

    choice: StrategyChoice  # the plainest of them
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One candidate with its bounds."""

    choice: StrategyChoice
    bound: float
    memory: LeastMemory
    grid: Grid | None = None
    tries: int = 0  # syntheses so far
    beyond: tuple[int, ...] = ()  # by rank: bytes that its plans held beyond the limit

    @property
    def open(self) -> bool:
        """Return whether its order is still to be synthesised."""
        return self.choice.schedule == SYNTHESISED and self.grid is None

    @property
    def key(self) -> CandidateKey:
        """Return what tells its evaluation from others: a named schedule has one order."""
        return self.choice, self.grid if self.choice.schedule == SYNTHESISED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A candidate, or a group of them, that was discarded without compiling it."""

    choice: StrategyChoice
    bound: float
    memory: LeastMemory | None = None  # it does not fit; None: its bound is above the best step
    grouped: bool = False  # a whole group, of which `choice` is the plainest
    refused: str = ""  # it cannot be compiled: why


@dataclass(slots=True)
class Queue:
    """Candidates in the order of their bounds.

    Of those whose bounds differ by less than `gap`, microbatch sizes that are recorded already come first,
    then the plainest.
    """

    gap: float
    recorded: Callable[[int], bool]
    entries: list[tuple[float, bool, bool, tuple[object, ...], int, CandidateGroup | Leaf]] = field(
        default_factory=list
    )
    pushed: int = 0

    def extend(self, entries: Iterable[CandidateGroup | Leaf]) -> None:
        for entry in entries:
            self.pushed += 1
            choice = entry.choice
            level = floor(log(entry.bound) / self.gap) if self.gap and entry.bound else entry.bound
            fresh = not self.recorded(choice.rows)
            item = (level, isinstance(entry, Leaf) and fresh, fresh, choice.key, self.pushed, entry)
            heapq.heappush(self.entries, item)

    def pop(self) -> CandidateGroup | Leaf:
        return heapq.heappop(self.entries)[-1]

    def upcoming(self, until: float, leaves: Callable[[CandidateGroup], Iterable[Leaf]]) -> Iterator[Leaf]:
        """Yield the next candidates below `until`, in order. The queue stays as it is. leaves: of a group."""
        ahead = Queue(self.gap, self.recorded, list(self.entries), self.pushed)
        for _ in range(AHEAD):
            if not ahead.entries:
                return
            entry = ahead.pop()
            if entry.bound >= until:
                return
            if isinstance(entry, Leaf):
                yield entry
            else:
                ahead.extend(leaves(entry))

    def rest(self) -> list[CandidateGroup | Leaf]:
        """Return what is left, in order."""
        return [entry for *_, entry in sorted(self.entries)]


def discarded(entry: CandidateGroup | Leaf) -> Discard:
    """Return the record of a candidate whose bound is above the best step."""
    return Discard(choice=entry.choice, bound=entry.bound, grouped=isinstance(entry, CandidateGroup))


SPARE = 1  # results that may wait beside a process for each worker: more might be ruled out meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A candidate that was compiled, proven and simulated."""

    choice: StrategyChoice
    strategy: tuple[Directive, ...]
    step: float  # seconds
    peak: int  # bytes of the fullest device
    rank_peaks: tuple[int, ...]  # bytes of each rank's fullest device, with its communicators
    busy: float  # seconds a device computes, on average
    exposed: float  # seconds a device waits for communication that nothing hides, on average
    bound: float = 0.0  # the step was known to be at least this long
    flops: float = 0.0  # of the model, over all devices

    @property
    def needs(self) -> int:
        """Return the bytes of the fullest device with its communicators."""
        return max(self.rank_peaks)

    @property
    def idle(self) -> float:
        """Return the seconds in which a device neither computes nor waits for exposed communication."""
        return max(0.0, self.step - self.busy - self.exposed)


def evaluate(model: Model, choice: StrategyChoice, grid: Grid | None) -> Evaluation:
    """Compile, prove and simulate a candidate."""
    strategy = directives_of(choice, grid, model.tag, model.divide, routed=model.shapes.experts > 0)
    return evaluate_strategy(model, choice, strategy)


def evaluate_strategy(model: Model, choice: StrategyChoice, strategy: Sequence[Directive]) -> Evaluation:
    """Compile, prove and simulate a strategy."""
    with no_collection():
        program = model.compile(list(strategy))
        simulation = simulate(program.plans, program.outline, model.costs)
        busy, exposed, _ = simulation.mean
        peaks = [
            max(memory.peak, predicted_peak(plan))  # by the simulated times, and as the runtime frees
            for memory, plan in zip(simulation.memories, program.plans, strict=True)
        ]
    return Evaluation(
        choice=choice,
        strategy=tuple(strategy),
        step=simulation.step,
        peak=max(peaks),
        rank_peaks=rank_peaks(model, choice, program.plans, peaks),
        busy=busy,
        exposed=exposed,
        flops=model_flops(program.plans, program.outline),
    )


def rank_peaks(model: Model, choice: StrategyChoice, plans: Plans, peaks: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of the fullest device of each rank, with its communicators. peaks: of each plan."""
    if choice.schedule == GIVEN:
        groups = [plan.devices for plan in plans]
    else:
        groups = [choice.devices_of(rank) for rank in range(choice.ranks)]
    fullest = [0] * len(groups)
    rank_of = {device: rank for rank, group in enumerate(groups) for device in group}
    for peak, plan in zip(peaks, plans, strict=True):
        rank = rank_of[plan.devices[0]]
        fullest[rank] = max(fullest[rank], peak + int(model.communicator * communicators_of(plan)))
    return tuple(fullest)


Attempt = Evaluation | str  # or why the compiler refuses a candidate


def attempt(model: Model, choice: StrategyChoice, grid: Grid | None) -> Attempt:
    """Evaluate a candidate. Return why the compiler refuses it, if it does."""
    try:
        return evaluate(model, choice, grid)
    except PiperError as error:
        return str(error).splitlines()[0]


@dataclass(slots=True, kw_only=True)
class EvaluationsAhead:
    """Candidates under way in other processes, and results that the search has not come to."""

    model: Model
    evaluated: Container[CandidateKey]  # that the search has taken
    running: dict[CandidateKey, ForkedCall[Attempt]] = field(default_factory=dict)
    waiting: dict[CandidateKey, Attempt] = field(default_factory=dict)
    captured: set[tuple[object, ...]] = field(default_factory=set)  # in this process

    def take(self, leaf: Leaf, following: Callable[[], Iterable[Leaf]], workers: int) -> Attempt:
        """Return the evaluation of a candidate, or why it is refused. following: returns what may be next."""
        while leaf.key in self.running:
            self.fill(following, leaf, workers)
            self.collect()
        result = self.waiting.pop(leaf.key, None)
        if result is None:  # it was not started, or raised an exception, and will here
            self.fill(following, leaf, workers - 1)
            self.captured.add(leaf.choice.captured_for)
            result = attempt(self.model, leaf.choice, leaf.grid)
        return result

    def fill(self, following: Callable[[], Iterable[Leaf]], first: Leaf, workers: int) -> None:
        """Start candidates that may be next while processes are free."""
        leaves = self.able(following(), first)
        while len(self.running) < workers and len(self.running) + len(self.waiting) <= workers + SPARE:
            leaf = next(leaves, None)
            if leaf is None:
                return
            self.start(leaf)

    def able(self, following: Iterable[Leaf], first: Leaf) -> Iterator[Leaf]:
        """Yield the candidates that can be evaluated while another, the first, is.

        Their sizes must be recorded: that may change the order of candidates. A division of the model that is
        not captured yet is captured in the forked process, unless it is also that of the first.
        """
        recorded = self.model.recorded
        for leaf in following:
            known = (self.evaluated, self.running, self.waiting)
            if leaf.open or leaf.choice.rows not in recorded or any(leaf.key in some for some in known):
                continue
            asked = leaf.choice.captured_for
            if leaf.key != first.key and (
                not leaf.choice.divided or asked in self.captured or asked != first.choice.captured_for
            ):
                yield leaf

    def start(self, leaf: Leaf) -> None:
        """Evaluate a candidate in a forked process."""
        self.model.capture(leaf.choice)  # what a forked process captures is lost with it
        self.running[leaf.key] = ForkedCall(partial(attempt, self.model, leaf.choice, leaf.grid))

    def collect(self) -> None:
        """Wait for a process, and keep its result."""
        ready = wait([call.result_file.fileno() for call in self.running.values()])
        for key, call in [*self.running.items()]:
            if call.result_file.fileno() in ready:
                result = call.result()
                del self.running[key]
                if result is not None:
                    self.waiting[key] = result

    def end(self) -> None:
        while self.running:
            self.running.popitem()[1].end()
