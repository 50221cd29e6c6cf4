"""A session: workers from their start to their end, and what the driver keeps for them. A run has one.

Workers are started with one program, which has the number 0. The others are compiled when a batch of their
shape comes, and sent to the workers, whose parameters, optimizer and communicators they use too. An
evaluation runs forward-only programs. `recovery` starts other sessions when one ends.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from piper.checkpoint.bucket_spans import held_names
from piper.errors import ConfigError, ScheduleError
from piper.ir.format import size
from piper.job import limit_of
from piper.plan.memory_timeline import timeline
from piper.run.checkpointing import SavedWorkers
from piper.run.run_events import Repeats
from piper.run.whole_values import whole_buffers
from piper.runtime.batch import (
    COUNTS,
    as_run,
    check_batch,
    padded,
    read_shapes,
    shapes_of,
    wanted_batch,
    with_strategy_for,
)
from piper.runtime.compute import slices_of
from piper.runtime.expert_exchange import TABLES
from piper.runtime.recorders import predicted_rows
from piper.runtime.setup import Forward, ProgramLike, Shapes, initial_tensors, setup_of
from piper.runtime.worker import Options, Sums
from piper.workers.group import A, R, Starter, WorkerGroup
from piper.workers.messages import BatchSlicer
from piper.workers.results import (
    Batch,
    Means,
    Resumed,
    SampleGroup,
    StepResult,
    result_of,
    rows_by_expert,
    sums_over_groups,
)
from piper.workers.serve import ProgramBatch, WorkerAnswers, needs_of

P = ParamSpec("P")
T = TypeVar("T")
MANY = 8  # shapes after which a message says how to need fewer
log = logging.getLogger("piper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A program that workers are ready to run, and its number among those of a session."""

    number: int
    program: ProgramLike
    slicer: BatchSlicer
    buffers: Mapping[str, Tensor]  # those that came from the driver: the first program does not use them


class Session(SavedWorkers):
    """Workers that hold several programs. Each shape of batches gets one, compiled when first seen."""

    def __init__(self, group: WorkerGroup, repeats: Repeats) -> None:
        super().__init__(group)
        self.repeats = repeats
        self.plans, self.wanted = self.program.plans, wanted_batch(self.program)
        self.first = Prepared(number=0, program=self.program, slicer=BatchSlicer(self.plans), buffers={})
        # by whether it trains, or what it predicts, and by shape
        self.prepared: dict[tuple[bool | Forward, Shapes], Prepared] = {}
        self.last = self.first  # the program of the last step
        self.elsewhere: dict[str, Tensor] = {}  # buffers that no step writes and only some devices hold
        self.moves = False  # workers have a program that holds the state in another layout than the first
        self.unsliced: set[int | None] = set()  # lengths whose strategies cannot slice what is evaluated
        self.preparations = 0  # how many programs workers have been given since they were started
        self.rows: dict[str, tuple[int, ...]] = {}  # of each expert in the last step, by regions with clones
        self.busy: dict[int, float] = {}  # seconds that each device computed in the last step, if known

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        needs = needs_of(call)
        if self.moves and needs.at_home:
            super().ask(WorkerAnswers.come_home, dict.fromkeys(self.devices))
        if needs.loads:
            self.elsewhere = {}
        return super().ask(call, arguments)

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch, of any sizes: the program of a new shape is compiled first."""
        tables = {TABLES: batch[TABLES]} if TABLES in batch else {}
        batch = {name: field for name, field in batch.items() if name != TABLES} if tables else batch
        check_batch(batch, self.wanted)
        rows, first = as_run(self.program, batch, self.wanted)
        ready = self.first if first else self._prepared(rows, trains=True, given=batch)
        answers = self._run(WorkerAnswers.step, ready, rows, tables)
        self.last = ready
        self.busy = {device: sums.busy for device, sums in answers.items()}
        self.poll()
        plans = ready.program.plans
        self.rows = rows_by_expert(plans, answers)
        if (line := self.repeats.note(answers.values())) is not None:
            log.warning(line)
        return result_of(plans, ready.program.outline, sums_over_groups(plans, answers))

    def evaluate(self, batch: Batch, means: Means) -> Means:
        """Evaluate on one global batch. Return the sums so far with those of the batch."""
        for piece in self._pieces(padded(batch, self.program.job.buckets)):
            ready = self._prepared(piece.batch, trains=False)
            answers = self._run(WorkerAnswers.evaluate, ready, piece.batch)
            means = means.add(ready.program, piece, sums_over_groups(ready.program.plans, answers))
        return replace(means, batches=means.batches + 1)

    def predict(self, batch: Batch, forward: Forward) -> Tensor:
        """Return the result of a forward for every sample of a global batch, in the order of the batch."""
        rows: list[Tensor] = []
        for piece in self._pieces(batch):
            ready = self._prepared(piece.batch, trains=False, forward=forward)
            self._run(WorkerAnswers.evaluate, ready, piece.batch)
            answers = self.ask_all(WorkerAnswers.predictions, ready.number)
            rows.append(predicted_rows(ready.program, answers)[: piece.samples])
        return torch.cat(rows)

    def _pieces(self, batch: Batch) -> Iterator[SampleGroup]:
        """Yield a batch in pieces that the programs which evaluate batches of its length can slice."""
        return pieces_of(batch, slices_of(self._trained_like(batch).plans))

    def _run(
        self,
        call: Callable[[WorkerAnswers, ProgramBatch], Sums],
        ready: Prepared,
        batch: Batch,
        tables: Batch | None = None,
    ) -> dict[int, Sums]:
        """Let all workers run a program on their rows, and tables of experts. Each answers all sums."""
        given: dict[int, ProgramBatch] = {
            device: (ready.number, {**ready.slicer.cut(batch, device), **(tables or {})})
            for device in self.devices
        }
        with self.group.running(ready.program):
            return self.ask(call, given)

    def _prepared(
        self, batch: Batch, *, trains: bool, given: Batch | None = None, forward: Forward | None = None
    ) -> Prepared:
        """Return the program for such batches, which as `given` were not padded; prepare it if it is new."""
        key = (forward or trains, read_shapes(batch, self.wanted) if trains else shapes_of(batch))
        known = self.prepared.get(key)
        values = self.unread | self.elsewhere
        if known is not None and all(values.get(name) is value for name, value in known.buffers.items()):
            return known
        if known is not None:
            program = known.program
        elif trains:
            program = self._shaped(batch, given or batch)
        else:
            program = self._trained_like(batch).evaluation(batch, forward)
        self.prepared[key] = self._prepare(program, trains=trains)
        return self.prepared[key]

    def _prepare(self, program: ProgramLike, *, trains: bool) -> Prepared:
        """Give workers a program, with the values of buffers that they do not hold."""
        buffers, setup = self._unheld(program), setup_of(program)
        self.preparations += 1
        number = self.preparations
        self.guarded(lambda: self.group.prepare(number, setup, buffers, trains=trains))
        self.moves = self.moves or not program.plans.lie_in(self.plans)
        return Prepared(number=number, program=program, slicer=BatchSlicer(program.plans), buffers=buffers)

    def _trained_like(self, batch: Batch) -> ProgramLike:
        """Return the program, which workers have, with the strategy that evaluates batches like this one."""
        program = with_strategy_for(self.program, batch)
        limit = limit_of(self.program.job, batch)
        if program is None and limit not in self.unsliced and self.wanted.shapes.keys() <= batch.keys():
            try:
                program = self._shaped(batch, batch)
            except ScheduleError as error:
                self.unsliced.add(limit)
                log.warning("Batches up to %s are evaluated with the first strategy: %s", limit, error.what)
        for shapes, one in self.program.shapes.items():
            if one is program and (True, shapes) not in self.prepared:
                self.prepared[True, shapes] = self._prepare(one, trains=True)
        return program or self.program

    def _shaped(self, batch: Batch, given: Batch) -> ProgramLike:
        """Return the program that trains on batches of these shapes. Say so if it has to be compiled."""
        key = read_shapes(batch, self.wanted)
        if key in self.program.shapes:
            return self.program.shaped(batch)
        sizes = ", ".join(f"{name} {list(given[name].shape)}" for name in self.wanted.shapes)
        if COUNTS in batch:
            sizes += f", with samples repeated to fill {slices_of(self.plans)} slices of equal size"
        if len(self.program.shapes) >= MANY:
            sizes += "; Job(buckets=...) pads batches to a few lengths"
        log.warning("Compiling for another shape of batches: %s", sizes)
        program = self.program.shaped(batch)
        peak, first = (max(timeline(plan).peak for plan in one.plans) for one in (program, self.program))
        log.warning("Proven. A device takes %s for it, and %s for the first shape", size(peak), size(first))
        return program

    def _unheld(self, program: ProgramLike) -> dict[str, Tensor]:
        """Return the values of the buffers that a program reads on devices that do not hold them."""
        read = {name for plan in program.plans for name in plan.buffers}
        unheld = sorted(read - held_names(self.plans))
        if missing := [name for name in unheld if name not in self.unread]:
            initial = initial_tensors(self.program)  # the run began from a checkpoint, which has none of them
            self.unread |= {name: initial[name] for name in missing}
        elsewhere: set[str] = set()
        for device in program.plans.devices:
            elsewhere |= program.plans.of(device).buffers.keys() - self.plans.of(device).buffers.keys()
        elsewhere.difference_update(unheld)
        if asked := sorted(elsewhere - self.elsewhere.keys()):
            self.elsewhere |= whole_buffers(self.plans, self.ask_all(WorkerAnswers.buffers, asked))
        held = {name: self.elsewhere[name] for name in elsewhere}
        return {name: self.unread[name] for name in unheld} | held

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""
        self.ask_all(WorkerAnswers.set_optimizer_option, (group, key, value))

    def protect(self) -> None:
        """Copy the state into memory that outlives workers, where it is kept. Steps do so by themselves."""
        if self.group.versions is not None:
            self.ask_all(WorkerAnswers.protect, None)

    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        """Take the state after a step from memory; `unread`: the values that no device holds."""
        with self.group.sharing(step):
            self.ask_all(WorkerAnswers.restore, step)
        self.unread.update(unread)


class Sessions:
    """The sessions of a run: one, which ends with the first failure."""

    elastic = False  # the number of devices can change

    def __init__(self, program: ProgramLike, options: Options, starter: Starter) -> None:
        self.program, self.options, self.starter = program, options, starter
        self.done = 0  # steps that are trained, those before a loaded checkpoint included
        self.current: Session | None = None
        self.repeats = Repeats()  # those before a recovery too: its message comes once

    def begin(self) -> None:
        """Start all workers."""
        self.current = self.open(self.options)

    def open(self, options: Options) -> Session:
        """Start all workers, and return their session."""
        return Session(self.starter.start(options), self.repeats)

    @property
    def session(self) -> Session:
        """Return the session. Start its workers if they do not run."""
        if self.current is None:
            self.begin()
        assert self.current is not None
        return self.current

    def call(self, act: Callable[[], T], *, steps: int = 0) -> T:
        """Return what a function returns that asks the workers of the session; `steps`: that it trains."""
        return act()

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch."""
        result = self.call(lambda: self._step(batch), steps=1)
        self.done += 1
        return result

    def _step(self, batch: Batch) -> StepResult:
        return self.session.step(batch)

    def complete(self, data: Callable[[], object]) -> None:
        """Note that all of the last step is done; `data`: what a checkpoint has besides tensors."""

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Write a checkpoint; `data`: with the states of callbacks, if they have any."""
        self.call(lambda: self.session.write(path, data, wait=wait, keep=keep))

    def try_write(self, folder: Path, data: object) -> None:
        """Refuse what could not be saved as it is now."""
        self.call(lambda: self.session.try_write(folder, data))

    def read(self, path: Path | str) -> Resumed:
        """Let workers go on from a checkpoint."""
        resumed = self.call(lambda: self.session.read(path))
        self.done = resumed.step
        return resumed

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        self.call(lambda: self.session.settle())

    def flush(self, folder: Path, data: Callable[[], object]) -> int | None:
        """End all workers, and write the newest state in memory as a checkpoint. Return its step, if any."""
        return None

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters, from the next step on."""
        self.call(lambda: self.session.set_optimizer_option(group, key, value))

    def resize(self, devices: int) -> None:
        """Go on with so many devices, if the job is elastic."""
        raise ConfigError(
            f"this run cannot go on with {devices} devices: their number is fixed",
            by="resize",
            hint="let piper train recover (--retries) and make the job elastic: piper.Job(elastic=(2, 4))",
        )

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return self.current is not None and self.current.group.leaving

    def close(self) -> None:
        """End every worker, and what starts them. Idempotent."""
        try:
            if self.current is not None:
                self.current.close()
        finally:
            self.starter.close()


def asking(method: Callable[P, T]) -> Callable[P, T]:
    """Do all of a method of a run again if workers are lost meanwhile, where the run recovers."""

    @wraps(method)
    def act(*args: P.args, **kwargs: P.kwargs) -> T:
        sessions = cast(Sessions, getattr(args[0], "sessions"))  # noqa: B009  of the run
        return sessions.call(partial(method, *args, **kwargs))

    return act


def pieces_of(batch: Batch, slices: int) -> Iterator[SampleGroup]:
    """Yield a batch in pieces whose samples divide into slices, each sample in exactly one piece.

    A remainder runs with copies of its samples, one for each slice: 3 samples in 4 slices run as 2 samples
    twice, then 1 sample four times. The sums are divided by the number of copies, so they stay exact.
    """
    samples = len(next(iter(batch.values())))
    start = samples - samples % slices
    if start:
        whole = batch if start == samples else {name: field[:start] for name, field in batch.items()}
        yield SampleGroup(batch=whole, samples=start)
    while start < samples:
        some = next(n for n in range(samples - start, 0, -1) if slices % n == 0)
        copies = slices // some
        rows = {name: torch.cat([field[start : start + some]] * copies) for name, field in batch.items()}
        yield SampleGroup(batch=rows, samples=some, copies=copies)
        start += some
