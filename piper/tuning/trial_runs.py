"""Runs the best candidates of a search on this machine, in turns, to choose the one that is fastest here."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import perf_counter

import torch

from piper.errors import ConfigError, PiperError
from piper.format import count
from piper.launchers.processes import rank_environment
from piper.runtime.setup import device_kind
from piper.simulate.cluster import Cluster
from piper.tuning.evaluate import Evaluation

ROUNDS, FEWEST = 15, 3  # of turns: all, and those that are taken however long they are
LONGEST = 120.0  # seconds after which no further round begins
WARM = 2  # steps of a run before its first turn, which build what later steps use again
APART = 4  # steps of a turn where a run is started for each of its turns
LOADED = 1.1  # how much longer fixed work may take on an idle machine
BY = "tune --measure"
Step = Callable[[], object]
Start = Callable[[], AbstractContextManager[Step]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """A candidate that ran on this machine."""

    found: Evaluation
    times: tuple[float, ...]  # seconds of its steps. Empty: it failed, or no round was complete
    failed: str = ""  # why

    @property
    def step(self) -> float:
        """Return the median of its steps. Infinite: there are none."""
        return median(self.times) if self.times else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRuns:
    """The candidates that ran on this machine, the fastest first."""

    runs: tuple[TrialRun, ...]
    load: float  # how many times its best a fixed loop took before or after, the larger: see `stretch`
    interrupted: bool = False

    def of(self, found: Evaluation) -> TrialRun | None:
        """Return the run of a candidate. None: it did not run."""
        return next((run for run in self.runs if run.found is found), None)

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
    together: bool  # all are started once. False: each is started and ended for each of its turns
    clock: Callable[[], float] = perf_counter
    times: list[list[float]] = field(default_factory=list)
    failed: dict[int, PiperError] = field(default_factory=dict)

    def take(self) -> None:
        """Take turns, in another order in each round, so that none always follows the same one."""
        self.times[:] = [[] for _ in self.starts]
        everyone = range(len(self.starts))
        with ExitStack() as held:
            steps = {one: self._kept(one, held) for one in everyone} if self.together else {}
            began = self.clock()
            for number in range(ROUNDS if self.together else FEWEST):
                if number >= FEWEST and self.clock() - began > LONGEST:
                    return
                for one in Random(number).sample(everyone, len(everyone)):
                    self._turn(one, steps.get(one))

    def _kept(self, one: int, held: ExitStack) -> Step | None:
        try:
            return held.enter_context(self._warm(one))
        except PiperError as error:
            self.failed[one] = error
            return None

    def _turn(self, one: int, step: Step | None) -> None:
        if one in self.failed:
            return
        try:
            with self._warm(one) if step is None else nullcontext(step) as taken:
                for _ in range(APART if step is None else 1):
                    begin = self.clock()
                    taken()
                    self.times[one].append(self.clock() - begin)
        except PiperError as error:
            self.failed[one] = error
            self.times[one].clear()

    @contextmanager
    def _warm(self, one: int) -> Iterator[Step]:
        with self.starts[one]() as step:
            for _ in range(WARM):
                step()
            yield step


def run_candidates(candidates: Sequence[Evaluation], starts: Sequence[Start], *, together: bool) -> TrialRuns:
    """Run candidates in turns. Ctrl-C ends that with the rounds so far. If all fail, raise the first error.

    starts: starts the run of each candidate, and gives its step.
    """
    before = stretch()
    turns = Turns(starts=starts, together=together)
    interrupted = False
    try:
        turns.take()
    except KeyboardInterrupt:
        interrupted = True
    if len(turns.failed) == len(candidates):
        raise turns.failed[0]
    unknown = any(not times for one, times in enumerate(turns.times) if one not in turns.failed)
    runs = [
        TrialRun(
            found=found,
            times=() if unknown else tuple(turns.times[one]),
            failed=str(turns.failed.get(one, "")).partition("\n")[0],
        )
        for one, found in enumerate(candidates)
    ]
    runs.sort(key=lambda run: (bool(run.failed), run.step))
    load = before if interrupted else max(before, stretch())
    return TrialRuns(runs=tuple(runs), load=load, interrupted=interrupted)


def check_runs_here(cluster: Cluster, devices: int) -> None:
    """Refuse to measure candidates for devices that this machine does not have."""
    cards = torch.cuda.device_count() if device_kind(None) == "cuda" else 0
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
    if rank_environment() is not None:
        raise ConfigError(
            "candidates run in processes of their own, and this one belongs to a job of torchrun",
            by=BY,
            hint="start one process, without torchrun",
        )


def fit_together(candidates: Sequence[Evaluation], cluster: Cluster, devices: int, limit: int) -> bool:
    """Return whether all candidates may hold their memory at the same time."""
    room = float(limit)
    if cluster.cores:  # devices share the memory of the host, and half of it is for others
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / devices
    return sum(found.needs + cluster.context for found in candidates) <= room


def stretch(times: int = 7) -> float:
    """Return by how much the median time of a fixed loop exceeds its shortest: 1.0 on an idle machine."""
    spent = [fixed_work() for _ in range(times)]
    return median(spent) / min(spent)


def fixed_work() -> float:
    """Time a loop of fixed work."""
    begin = perf_counter()
    total = 0
    for number in range(2_000_000):
        total += number
    return perf_counter() - begin
