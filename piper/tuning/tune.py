"""`tune`: searches for the strategy with the shortest step that fits, and for those that need less memory."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from piper.capture.recordings import Recordings
from piper.compiler import Program
from piper.compiler import compile as compile_job
from piper.directives import Directive
from piper.errors import ConfigError, PiperError
from piper.ir.dtypes import DTYPES
from piper.job import Job
from piper.process.gc_pause import no_collection
from piper.run.launch import launch_local
from piper.simulate.cluster import Cluster
from piper.simulate.measured import prices_of
from piper.simulate.simulate import Throughput, amount_of
from piper.tuning.choice import GIVEN, own_strategy
from piper.tuning.evaluate import Evaluation
from piper.tuning.model import BY, captured_model
from piper.tuning.result import Tuned, none_fits
from piper.tuning.space import Space
from piper.tuning.strategy_search import StrategySearch
from piper.tuning.trial_runs import Step, TrialRuns, check_runs_here, fit_together, run_candidates
from piper.workers.transport.fork_server import ForkServer

TRIALS = 80
GAP = 0.005
SYNTHESIS_TRIALS = 60
REFINING_TRIALS = 400
WORTH = 0.05  # by how much shorter a step must be able to be to try tensor and context parallelism
DIVIDED_TRIALS = 3
FRONT = (0.75, 0.5, 0.25)  # of the best strategy's peak: limits for which the front is searched too
FRONT_TRIALS = 4
WORKERS_LIMIT = 8  # unless asked for: more would evaluate much that a better candidate rules out
Progress = Callable[[StrategySearch, Evaluation], None]


def tune(
    job: Job,
    cluster: str | Path,
    devices: int,
    *,
    memory: int | None = None,
    costs: str | Path | None = None,
    trials: int = TRIALS,
    space: Space | None = None,
    start: Sequence[Directive] | None = None,
    gap: float = GAP,
    front: bool = True,
    captured: Program | Recordings | None = None,
    compile: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
    measure: int | None = None,
) -> Tuned:
    """Search for the strategy of a job with the shortest simulated step whose peak memory fits.

    cluster: a name that `piper simulate` knows, or a TOML file.
    memory: bytes that a plan may hold on a device. None: what the cluster's devices have, less their reserve
    for context, communicators and fragmentation.
    costs: measured times of this model's chunks, from `piper profile --calibrate`, with the cluster's links.
    trials: how many candidates the search for the shortest step compiles at most. What follows compiles a few
    more: longer searches for orders, tensor and context parallelism, `front`.
    gap: stop when no candidate can be shorter than the best by this fraction. space: what to choose from.
    front: also look for strategies that need less memory.
    start: a strategy that you have. It is evaluated first, and if it fits, none is chosen that takes longer.
    Tensor and context parallelism divide the weights and fields that it divides.
    compile: the chunks are or will be compiled, so operations that Inductor fuses cost one kernel.
    workers: processes that evaluate candidates. None: one for each core, up to eight. The result is the same.
    measure: how many of the shortest run on this machine, which must be one of the cluster, with `start` or
    else the job's own strategy. The one whose steps are the shortest here is chosen. None: none runs.
    """
    started = time.perf_counter()
    prices = prices_of(cluster, None if costs is None else Path(costs))
    assert prices.cluster is not None, "it is named"
    machine = prices.cluster
    check_counts(devices=devices, trials=trials, memory=memory, workers=workers, measure=measure)
    if measure is not None:
        check_runs_here(machine, devices)
        start = own_strategy(job, devices) if start is None else start
    limit = int(machine.usable(0) if memory is None else memory)
    wanted = space or Space()
    with no_collection():
        several = workers or min(WORKERS_LIMIT, len(os.sched_getaffinity(0)))
        model = captured_model(job, prices, wanted, devices, captured, start or (), compile=compile)
        if memory is None:
            model = replace(model, communicator=machine.communicator * (1 - machine.fragmentation))
        search = StrategySearch(
            model=model,
            space=wanted,
            gap=gap,
            synthesis_trials=SYNTHESIS_TRIALS,
            report=progress or (lambda search, evaluation: None),
            workers=several,
            wanted=measure or 1,
        )
        chosen, interrupted = prove_best(
            search, limit, trials, start, machine.name, front=front, measure=measure
        )
    trial = None
    if measure is not None and not interrupted:
        trial = measured_here(search, chosen, machine, devices, limit)
    best = trial.runs[0].candidate if trial is not None else chosen[0]
    amount, unit = amount_of({name: field.shape for name, field in model.capturing.batch.items()})
    peak = devices * machine.peak(DTYPES[job.precision])
    return Tuned(
        best=best,
        evaluated=tuple(search.evaluated.values()),
        discarded=tuple(search.discarded),
        limit=limit,
        machine=machine.name,
        devices=devices,
        lowest=search.lowest,
        recorded=tuple(model.recorded),
        interrupted=interrupted or (trial is not None and trial.interrupted),
        trial=trial,
        throughput=Throughput(amount=amount, unit=unit, flops=best.flops, peak=peak),
        seconds=time.perf_counter() - started,
    )


def prove_best(
    search: StrategySearch,
    limit: int,
    trials: int,
    start: Sequence[Directive] | None,
    machine: str,
    *,
    front: bool,
    measure: int | None,
) -> tuple[list[Evaluation], bool]:
    """Search, and return the shortest that fit, proven, the best first, and whether Ctrl-C ended it."""
    interrupted = False
    try:
        if start is not None:
            search.begin(start, limit)
        run_all(search, limit, trials)
    except KeyboardInterrupt:
        interrupted = True
        if search.best is None:
            raise
    if search.best is None:
        raise none_fits(search, limit, machine)
    discarded, lowest, peak = search.discarded, search.lowest, search.best.peak
    if front and not interrupted:
        search.wanted = 1
        try:
            for share in FRONT:
                search.run(int(peak * share), FRONT_TRIALS)
        except KeyboardInterrupt:
            interrupted = True
    search.discarded, search.lowest = discarded, lowest  # not those of the front
    return verified(search, limit, measure), interrupted


def run_all(search: StrategySearch, limit: int, trials: int) -> None:
    """Search without tensor and context parallelism, then with them where that may be worth it.

    To divide a model takes seconds for each degree, so that is done where the space asks for it, where
    nothing else fits, or where it might shorten the best step by `WORTH`.
    """
    best = search.run(limit, trials, further=True)
    if best is not None and best.choice.ranks > 1:
        search.refine(limit, REFINING_TRIALS)
        best = search.best
    asked = search.space.tensor is not None or search.space.context is not None
    bounds = [group.bound for group in search.groups(divided=True)]
    if bounds and (asked or best is None):
        search.run(limit, trials, divided=True, further=True)
    elif bounds and best is not None and min(bounds) < best.step * (1 - WORTH):
        search.run(limit, min(trials, DIVIDED_TRIALS), divided=True, further=True)


def check_counts(**numbers: int | None) -> None:
    """Refuse numbers that are not positive."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not number >= 1 or int(number) != number):
            raise ConfigError(f"{name}={number!r}", by=BY, hint=f"{name} is a whole number from 1")


def verified(search: StrategySearch, limit: int, measure: int | None) -> list[Evaluation]:
    """Return the shortest strategies that the job's optimizer can train, their plans proven once more.

    measure: how many, and a given strategy that fits besides. None: one.
    """
    fitting = [candidate for candidate in search.evaluated.values() if candidate.needs <= limit]
    fitting.sort(key=lambda candidate: candidate.step)  # of equal ones the first that was evaluated
    chosen: list[Evaluation] = []
    refused: PiperError | None = None
    for candidate in fitting:
        enough = len(chosen) >= (measure or 1)
        besides = measure is not None and candidate.choice.schedule == GIVEN
        if (enough and not besides) or any(candidate.strategy == one.strategy for one in chosen):
            continue
        try:
            search.model.compile(list(candidate.strategy), tried=False)
        except PiperError as error:
            refused = refused or error
            continue
        chosen.append(candidate)
    if not chosen:
        assert refused is not None, "there is a best"
        raise refused
    return chosen


def measured_here(
    search: StrategySearch, chosen: Sequence[Evaluation], machine: Cluster, devices: int, limit: int
) -> TrialRuns:
    """Run candidates on this machine in turns."""
    model, recordings = search.model, search.model.capturing.complete

    @cache
    def program(number: int) -> Program:
        job = replace(model.job, strategy=list(chosen[number].strategy))
        return compile_job(job, compile=recordings.compiled, captured=recordings)

    @contextmanager
    def started(number: int, forks: ForkServer) -> Iterator[Step]:
        with launch_local(program(number), forks=forks) as run:
            yield lambda: run.step(model.capturing.batch)

    search.measuring = len(chosen)
    search.report(search, chosen[0])
    starts = [partial(started, number) for number in range(len(chosen))]
    return run_candidates(chosen, starts, together=fit_together(chosen, machine, devices, limit))
