"""`tune`: searches for the strategy with the shortest step that fits."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from piper.capture.recordings import Capturing, Recordings
from piper.capture.short import short_capturing
from piper.compiler import MASTER_BYTES, Program, first_batch, known_recordings, probed
from piper.compiler import compile as compile_job
from piper.directives import Directive, apply, place
from piper.errors import ConfigError, PiperError
from piper.gc_pause import no_collection
from piper.ir.graph import start
from piper.ir.select import at
from piper.job import Batch, Job
from piper.launchers.local import launch_local
from piper.launchers.transport.fork_server import ForkConnection
from piper.lower.state import Settings
from piper.models.tensor_plan import tensor_plan
from piper.runtime.setup import device_kind
from piper.simulate.cluster import Cluster, load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.measured import Measured, MeasuredOn, check_model, read_costs
from piper.tuning.bounds import State
from piper.tuning.choice import GIVEN, Divide
from piper.tuning.evaluate import Evaluation, verify
from piper.tuning.forked_calls import made_beside
from piper.tuning.front import widen_front, with_front_ahead
from piper.tuning.given import divided_as, own_strategy
from piper.tuning.model import BY, Model, layers_of
from piper.tuning.result import Tuned, none_fits
from piper.tuning.space import Shapes, Space, rows_of
from piper.tuning.strategy_search import StrategySearch
from piper.tuning.trial_runs import (
    Step,
    TrialRuns,
    check_runs_here,
    fit_together,
    run_candidates,
)

TRIALS = 80
GAP = 0.005
SYNTHESIS_TRIALS = 60
REFINING_TRIALS = 400
WORTH = 0.05  # by how much shorter a step must be able to be to try tensor and context parallelism
DIVIDED_TRIALS = 3
MOST_WORKERS = 8  # unless asked for: more would evaluate much that a better candidate rules out
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
    extrapolate: bool = False,
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
    trials: how many candidates are compiled at most. gap: stop when no candidate can be shorter than the best
    by this fraction. space: what to choose from. front: also look for strategies that need less memory.
    start: a strategy that you have. It is evaluated first, and if it fits, none is chosen that takes longer.
    Tensor and context parallelism divide the weights and fields that it divides.
    extrapolate: predict a step of many microbatches from two shorter ones, and prove only what is chosen.
    compile: the chunks are or will be compiled, so operations that Inductor fuses cost one kernel.
    workers: processes that evaluate candidates. None: one for each core, up to eight. The result is the same.
    measure: how many of the shortest run on this machine, which must be one of the cluster, with `start` or
    else the job's own strategy. The one whose steps are the shortest here is chosen. None: none runs.
    """
    started = time.perf_counter()
    machine = load_cluster(cluster)
    check_counts(devices=devices, trials=trials, memory=memory, workers=workers, measure=measure)
    if measure is not None:
        check_runs_here(machine, devices)
        start = own_strategy(job, devices) if start is None else start
    limit = int(machine.usable(0) if memory is None else memory)
    measured = None if costs is None else read_costs(Path(costs))
    priced: Costs = Roofline(machine) if measured is None else MeasuredOn(measured, machine)
    wanted = space or Space()
    with no_collection():
        several = workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        model = captured_model(
            job, priced, wanted, devices, captured, measured, compile=compile, workers=several
        )
        if memory is None:
            reserve = machine.communicator * (1 - machine.fragmentation)
            model = replace(model, communicator=reserve)
        model = replace(model, divide=divided_as(start or (), model.divide), extrapolate=extrapolate)
        search = StrategySearch(
            model=model,
            space=wanted,
            shapes=shapes_of(model, devices),
            gap=gap,
            synthesis_trials=SYNTHESIS_TRIALS,
            report=progress or (lambda search, found: None),
            workers=several,
            wanted=measure or 1,
        )
        interrupted = False
        try:
            if start is not None:
                search.begin(start, limit)
            run_all(search, limit, trials, front=front)
        except KeyboardInterrupt:
            interrupted = True
            if search.best is None:
                raise
        if search.best is None:
            raise none_fits(search, limit, machine.name)
        discarded, lowest = tuple(search.discarded), search.lowest
        proven: tuple[Directive, ...] | None = None
        if front and not interrupted:
            try:
                proven = verify_and_widen(search, search.best)
            except KeyboardInterrupt:
                interrupted = True
        chosen = verified(search, limit, measure, proven)
    trial = None
    if measure is not None and not interrupted:
        trial = measured_here(search, chosen, machine, devices, limit)
    return Tuned(
        best=trial.runs[0].found if trial is not None else chosen[0],
        evaluated=tuple(search.evaluated.values()),
        discarded=discarded,
        limit=limit,
        machine=machine.name,
        devices=devices,
        tag=model.tag,
        lowest=lowest,
        recorded=tuple(model.recorded),
        interrupted=interrupted or (trial is not None and trial.interrupted),
        trial=trial,
        seconds=time.perf_counter() - started,
    )


def run_all(search: StrategySearch, limit: int, trials: int, *, front: bool) -> None:
    """Search without tensor and context parallelism, then with them where that may be worth it.

    To divide a model takes seconds for each degree, so that is done where the space asks for it, where
    nothing else fits, or where it might shorten the best step by `WORTH`. front: is searched for after it.
    """
    best = search.run(limit, trials, further=True)
    if best is not None and best.choice.ranks > 1:
        search.refine(limit, REFINING_TRIALS)
        best = search.best
    asked = search.space.tensor is not None or search.space.context is not None
    bounds = [group.bound for group in search.groups(divided=True)]
    if not bounds or not (asked or best is None or min(bounds) < best.step * (1 - WORTH)):
        return
    before, lowest = search.discarded, search.lowest
    if best is None or asked:
        search.run(limit, trials, divided=True, further=True)
    else:
        few = partial(search.run, limit, min(trials, DIVIDED_TRIALS), divided=True, further=True)
        with_front_ahead(search, best, few, front=front)
    search.discarded = [*before, *search.discarded]
    search.lowest = min(lowest, search.lowest)


def check_counts(**numbers: int | None) -> None:
    """Refuse numbers that are not positive."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not number >= 1 or int(number) != number):
            raise ConfigError(f"{name}={number!r}", by=BY, hint=f"{name} is a whole number from 1")


def captured_model(
    job: Job,
    costs: Costs,
    space: Space,
    devices: int,
    captured: Program | Recordings | None = None,
    measured: Measured | None = None,
    *,
    compile: bool = False,
    workers: int = 1,
) -> Model:
    """Record a job's model for the two smallest microbatch sizes, and find what it is made of."""
    batch = first_batch(job)
    recordings = known_recordings(job, device_kind(None), batch, captured, compiled=compile)
    samples = len(next(iter(batch.values())))
    sizes = possible_rows(space, samples, devices)
    capturing = short_capturing(Capturing(batch=batch, recordings=recordings), sizes[0])
    outline = capturing.traced(sizes[0]).outline
    if measured is not None:
        check_model(measured, outline)
    tag, count = layers_of(outline)
    first = Model(
        job=replace(job, strategy=[], elastic=None),
        capturing=capturing,
        costs=costs,
        tag=tag,
        count=count,
        experts=max(chunk.experts for chunk in outline.chunks),
        divide=Divide(fields=fields_of(batch)),
        state=State(optimizer=0),
        samples=samples,
    )
    facts = partial(facts_of, first, recordings, sizes[0])
    second = partial(record_sizes, first, sizes[1:2])
    if workers > 1:
        found = made_beside(second, facts)
    else:
        second()
        found = None
    weights, optimizer = found or facts()
    return replace(first, divide=replace(first.divide, weights=weights), state=State(optimizer=optimizer))


def record_sizes(model: Model, sizes: Sequence[int]) -> None:
    """Record a model for microbatch sizes."""
    for rows in sizes:
        model.record(rows)


def facts_of(model: Model, recordings: Recordings, rows: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the weights that can be divided, and the bytes of the optimizer for each element."""
    return weights_of(recordings), optimizer_bytes(model, rows)


def optimizer_bytes(model: Model, rows: int) -> int:
    """Try the job's optimizer on one device, and return its bytes for each element, with the master copy."""
    master = MASTER_BYTES[model.job.precision]
    graph = apply(start(model.capturing.traced(rows).outline), [place(at(), [0])])
    settings = Settings(samples=model.samples, state_bytes=0, master_bytes=master)
    return probed(model.job, graph, settings).probe.state_bytes + master


def possible_rows(space: Space, samples: int, devices: int) -> list[int]:
    """Return the microbatch sizes that some number of replicas allows, in order."""
    found = {rows for replicas in range(1, devices + 1) if not devices % replicas
             for rows in rows_of(space, samples, replicas)}  # fmt: skip
    if not found:
        raise ConfigError(
            f"{samples} samples in a batch cannot be cut for {devices} devices",
            by=BY,
            hint="give a batch whose samples some number of replicas divides",
        )
    return sorted(found)


def weights_of(recordings: Recordings) -> tuple[tuple[str, int], ...]:
    """Return the weights that tensor parallelism would divide. Empty: the model does not say."""
    try:
        return tuple(tensor_plan(recordings.built()).items())
    except ConfigError:
        return ()


def fields_of(batch: Batch) -> tuple[tuple[str, int], ...]:
    """Return the fields of a batch that context parallelism would divide. Empty: not all are sequences."""
    sequences = {name: value.shape[1] for name, value in batch.items() if has_sequence(value)}
    if len(sequences) != len(batch) or len(set(sequences.values())) != 1:
        return ()
    return tuple((name, 1) for name in sequences)


def has_sequence(value: Tensor) -> bool:
    """Return whether a field of a batch is a sequence of whole numbers for each sample."""
    return value.dim() == 2 and not value.is_floating_point() and value.shape[1] > 1


def shapes_of(model: Model, devices: int) -> Shapes:
    """Return the numbers that limit the space."""
    return Shapes(
        devices=devices,
        samples=model.samples,
        layers=model.count,
        experts=model.experts,
        tensor=bool(model.divide.weights),
        context=bool(model.divide.weights) and bool(model.divide.fields),
    )


def verify_and_widen(search: StrategySearch, best: Evaluation) -> tuple[Directive, ...] | None:
    """Look for the front, and verify the best meanwhile. Return its strategy if that is done and it holds."""
    widen = partial(widen_front, search, best)
    if search.workers == 1:
        widen()
        return None
    proven = made_beside(widen, partial(verified_strategy, search.model, best.strategy))
    return best.strategy if proven else None


def verified_strategy(model: Model, strategy: Sequence[Directive]) -> bool:
    """Verify a strategy; raise an exception if it does not hold."""
    verify(model, strategy)
    return True


def verified(
    search: StrategySearch, limit: int, measure: int | None, proven: tuple[Directive, ...] | None = None
) -> list[Evaluation]:
    """Return the shortest strategies that the job's optimizer can train, their plans proven once more.

    measure: how many, and a given strategy that fits besides. None: one. proven: one for which that is done.
    """
    fitting = [found for found in search.evaluated.values() if found.needs <= limit]
    fitting.sort(key=lambda found: found.step)  # of equal ones the first that was evaluated
    chosen: list[Evaluation] = []
    refused: PiperError | None = None
    for found in fitting:
        enough = len(chosen) >= (measure or 1)
        besides = measure is not None and found.choice.schedule == GIVEN
        if (enough and not besides) or any(found.strategy == one.strategy for one in chosen):
            continue
        try:
            if found.strategy != proven:
                verify(search.model, found.strategy)
        except PiperError as error:
            refused = refused or error
            continue
        chosen.append(found)
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
    def started(number: int, forks: ForkConnection) -> Iterator[Step]:
        with launch_local(program(number), forks=forks) as run:
            yield lambda: run.step(model.capturing.batch)

    search.measuring = len(chosen)
    search.report(search, chosen[0])
    starts = [partial(started, number) for number in range(len(chosen))]
    return run_candidates(chosen, starts, together=fit_together(chosen, machine, devices, limit))
