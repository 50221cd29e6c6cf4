"""Runs the best candidates of a search on this machine, in turns, to choose the one that is fastest here.

[Note: what starts differ by] Processes that run the same program differ by some percent for as long as they
live: they have other cores and other memory. So every candidate is started several times. The processes of
one start come from one fork server, which costs most of the time of a start, and have its libraries at the
same addresses. Medians that differ by less than starts explain do not order candidates: of those, the one
with the shortest predicted step comes first.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from statistics import fmean, median
from time import perf_counter
from timeit import repeat

from piper.errors import ConfigError, PiperError
from piper.ir.format import count, percent
from piper.run.launch import machine_memory
from piper.runtime.accelerator import accelerators
from piper.simulate.cluster import Cluster
from piper.tuning.evaluate import Evaluation
from piper.workers.rank_environment import check_alone
from piper.workers.transport.fork_server import ForkServer

STARTS, FEWEST = 5, 3  # of each run: all, and those that are made however long they take
ROUNDS = 3  # of turns in a start
LONGEST = 120.0  # seconds after which nothing is started again, and an equal part of them for each start
WARM = 2  # steps of a run before its first turn, which build what later steps use again
APART = 4  # steps of a turn where a run is started for each of its turns
LOADED = 1.1  # how much longer fixed work may take on an idle machine
BY = "tune --measure"
Step = Callable[[], object]
Start = Callable[[ForkServer], AbstractContextManager[Step]]  # of a candidate's run, on such processes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """A candidate that ran on this machine."""

    candidate: Evaluation
    starts: tuple[tuple[float, ...], ...]  # seconds of steps. Empty: it failed, or no round was complete
    failed: str = ""  # why

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(spent for start in self.starts for spent in start)

    @property
    def step(self) -> float:
        """Return the median of its steps. Infinite: there are none."""
        return median(self.times) if self.times else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRuns:
    """The candidates that ran on this machine, the chosen one first: see [Note: what starts differ by]."""

    runs: tuple[TrialRun, ...]
    load: float  # how many times its best a fixed loop took before or after, the larger: see `stretch`
    margin: float = 0.0  # medians that differ by at most this fraction are equal, as far as starts tell
    interrupted: bool = False

    def of(self, candidate: Evaluation) -> TrialRun | None:
        """Return the run of a candidate. None: it did not run."""
        return next((run for run in self.runs if run.candidate is candidate), None)

    @property
    def equals(self) -> tuple[TrialRun, ...]:
        """Return the runs that are as fast as the fastest, as far as starts tell."""
        return equal_runs(self.runs, self.margin)

    @property
    def note(self) -> str:
        """Return what decided between runs that are equally fast. Empty: there was only one."""
        if len(self.equals) < 2:
            return ""
        within = percent(self.margin, 1)
        return (
            f"{len(self.equals)} are equally fast: their medians lie within {within}, and starts of one "
            "strategy differ by as much. The shortest by prediction is the best"
        )

    @property
    def warning(self) -> str:
        """Return what the user should know about the times. Empty: nothing."""
        if self.load <= LOADED:
            return ""
        return (
            f"other work slowed this machine down: a loop took {self.load:.2f} times its best, so candidates "
            "that are close may be in the wrong order"
        )


@dataclass(slots=True, kw_only=True)
class Turns:
    """Runs that take turns, and the seconds of their steps so far."""

    starts: Sequence[Start]
    together: bool  # all run at the same time. False: one after another
    clock: Callable[[], float] = perf_counter
    serve: Callable[[], AbstractContextManager[ForkServer]] = lambda: closing(ForkServer())  # for each start
    times: list[list[list[float]]] = field(default_factory=list)  # of each run in each of its starts
    failed: dict[int, PiperError] = field(default_factory=dict)

    def take(self) -> None:
        """Start all runs several times, and let them take turns in each start.

        The order is another one in each start and in each round, so that none always follows the same one.
        """
        self.times[:] = [[] for _ in self.starts]
        began = self.clock()
        for number in range(STARTS if self.together else FEWEST):
            if number >= FEWEST and self.clock() - began > LONGEST:
                return
            for times in self.times:
                times.append([])
            until = self.clock() + LONGEST / STARTS
            with self.serve() as forks:
                self._rounds(number, forks, until)

    def _rounds(self, number: int, forks: ForkServer, until: float) -> None:
        """Start all runs once, together or one by one, and let them take turns; together, until a time."""
        several = len(self.starts)
        order = [(number + one) % several for one in range(several)]  # each is first in one of as many starts
        for group in [order] if self.together else [[one] for one in order]:
            with ExitStack() as runs:
                steps = {one: self._started(one, forks, runs) for one in group}
                for turn in range(ROUNDS if self.together else APART):
                    if turn and self.together and self.clock() > until:
                        break
                    for one in Random(number * ROUNDS + turn).sample(sorted(group), len(group)):
                        self._turn(one, steps[one])

    def _started(self, one: int, forks: ForkServer, runs: ExitStack) -> Step:
        """Start a run, unless it has failed, and take the steps that do not count. Return its step."""
        step: Step = lambda: None  # noqa: E731  of a run that has failed
        if one not in self.failed:
            try:
                step = runs.enter_context(self.starts[one](forks))
                for _ in range(WARM):
                    step()
            except PiperError as error:
                self.failed[one] = error
        return step

    def _turn(self, one: int, step: Step) -> None:
        """Take a step of a run, unless it has failed."""
        if one in self.failed:
            return
        try:
            begin = self.clock()
            step()
            self.times[one][-1].append(self.clock() - begin)
        except PiperError as error:
            self.failed[one] = error


def run_candidates(candidates: Sequence[Evaluation], starts: Sequence[Start], *, together: bool) -> TrialRuns:
    """Run candidates in turns. Ctrl-C ends that with the rounds so far. If all fail, raise the first."""
    before = stretch()
    turns = Turns(starts=starts, together=together)
    interrupted = False
    try:
        turns.take()
    except KeyboardInterrupt:
        interrupted = True
    if len(turns.failed) == len(candidates):
        raise turns.failed[0]
    known = [
        () if one in turns.failed else tuple(tuple(start) for start in starts if start)
        for one, starts in enumerate(turns.times)
    ]
    unknown = any(not starts for one, starts in enumerate(known) if one not in turns.failed)
    runs = [
        TrialRun(
            candidate=candidate,
            starts=() if unknown else known[one],
            failed=str(turns.failed.get(one, "")).partition("\n")[0],
        )
        for one, candidate in enumerate(candidates)
    ]
    load = before if interrupted else max(before, stretch())
    margin = margin_of([run.starts for run in runs if run.times])
    return TrialRuns(runs=ordered(runs, margin), load=load, margin=margin, interrupted=interrupted)


def ordered(runs: Sequence[TrialRun], margin: float) -> tuple[TrialRun, ...]:
    """Return the runs that are as fast as the fastest in the order of their predictions, then the others."""
    by_time = sorted(runs, key=lambda run: (bool(run.failed), run.step))
    equal = equal_runs(by_time, margin)
    first = sorted(equal, key=lambda run: (run.candidate.step, run.step))
    return (*first, *by_time[len(equal) :])


def equal_runs(runs: Sequence[TrialRun], margin: float) -> tuple[TrialRun, ...]:
    """Return the runs whose medians exceed the shortest by at most a fraction. Empty: none was measured."""
    fastest = min((run.step for run in runs if run.times), default=0.0)
    return tuple(run for run in runs if run.times and run.step <= fastest * (1 + margin))


def margin_of(runs: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the fraction by which the times of two equal runs differ, as a standard error. 0: unknown.

    runs: seconds of the steps of each run in each of its starts. What all runs of a start have in common, as
    where the machine has other work, does not count: it says nothing about their order.
    """
    starts = min(map(len, runs), default=0)
    if len(runs) < 2 or starts < 2:
        return 0.0
    medians = [[median(start) for start in run[:starts]] for run in runs]
    relative = [[spent / fmean(run) for spent in run] for run in medians]
    common = [fmean(start) for start in zip(*relative, strict=True)]
    squares = sum(
        (spent / usual - 1) ** 2 for run in relative for spent, usual in zip(run, common, strict=True)
    )
    freedom = (len(runs) - 1) * (starts - 1)
    return sqrt(squares / freedom * 2 / starts)


def check_runs_here(cluster: Cluster, devices: int) -> None:
    """Refuse to measure candidates for devices that this machine does not have."""
    cards = accelerators()
    here = count(cards, "GPU") if cards else "no GPU"
    if bool(cluster.cores) == bool(cards):
        raise ConfigError(
            f"candidates for {cluster.name} cannot be measured on this machine",
            by=BY,
            facts={"cluster": "processes of a host" if cluster.cores else "GPUs", "here": here},
            hint="describe this machine (piper profile --cluster-out FILE), or leave --measure out",
        )
    if cards and devices > cards:
        raise ConfigError(
            f"candidates for {devices} devices cannot be measured on this machine",
            by=BY,
            facts={"asked": str(devices), "here": here},
            hint=f"tune for at most {cards}, or leave --measure out and measure where the devices are",
        )
    check_alone(BY)


def fit_together(candidates: Sequence[Evaluation], cluster: Cluster, devices: int, limit: int) -> bool:
    """Return whether all candidates may hold their memory at the same time."""
    room = float(limit)
    if cluster.cores:  # devices share the memory of the host, and half of it is for others
        room = machine_memory() / 2 / devices
    return sum(candidate.needs + cluster.context for candidate in candidates) <= room


def stretch(times: int = 7) -> float:
    """Return by how much the median time of a fixed loop exceeds its shortest: 1.0 on an idle machine."""
    spent = repeat("total += 1", "total = 0", repeat=times, number=2_000_000)
    return median(spent) / min(spent)
