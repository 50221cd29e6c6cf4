"""A session: workers from their start to their end, and what the driver keeps for them.

Workers are started with one program, which has the number 0. The others are compiled when a batch of their
shape comes, and sent to the workers, whose parameters, optimizer and communicators they use too. An
evaluation runs forward-only programs.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from piper.checkpoint.bucket_spans import held_names
from piper.errors import WorkerError
from piper.ir.format import size
from piper.plan.memory_timeline import timeline
from piper.run.checkpointing import Checkpoints
from piper.run.evaluating import pieces_of
from piper.runtime.batch import as_run, check_batch, padded, read_shapes, shapes_of, wanted_batch
from piper.runtime.compute import slices_of
from piper.runtime.setup import ProgramLike, Shapes, initial_tensors, setup_of
from piper.runtime.uneven import COUNTS
from piper.runtime.worker import Sums
from piper.workers.answers import ProgramBatch, WorkerAnswers
from piper.workers.group import WorkerGroup
from piper.workers.messages import BatchSlicer
from piper.workers.results import Batch, Means, Resumed, StepResult, result_of

A = TypeVar("A")
R = TypeVar("R")
MANY = 8  # shapes after which a message says how to need fewer
log = logging.getLogger("piper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A program that workers are ready to run, and its number among those of a session."""

    number: int
    program: ProgramLike
    slicer: BatchSlicer
    buffers: Mapping[str, Tensor]  # those that came from the driver: the first program does not use them


class Session:
    """Workers that hold several programs. Each shape of batches gets one, compiled when first seen."""

    def __init__(self, group: WorkerGroup) -> None:
        """Drive a group whose workers have started."""
        self.group, self.program = group, group.program
        self.plans, self.wanted = self.program.plans, wanted_batch(setup_of(self.program))
        self.devices, self.unread = group.devices, group.unread
        self.first = Prepared(number=0, program=self.program, slicer=BatchSlicer(self.plans), buffers={})
        self.prepared: dict[tuple[bool, Shapes], Prepared] = {}  # by whether it trains, and by shape
        self.preparations = 0  # how many programs workers have been given since they were started
        self.busy: dict[int, float] = {}  # seconds that each device computed in the last step, if known
        self.open = True
        self.checkpoints = Checkpoints(self.program, self.devices, self.ask, self.unread, self.close)

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        """Call a method of workers, each with its argument, and return their answers."""
        return self._guarded(lambda: self.group.ask(call, arguments))

    def ask_all(self, call: Callable[[WorkerAnswers, A], R], argument: A) -> dict[int, R]:
        """Call a method of all workers with one argument, and return their answers."""
        return self.ask(call, dict.fromkeys(self.devices, argument))

    def _guarded(self, act: Callable[[], R]) -> R:
        """Return what workers answer. With an error of theirs the session ends."""
        if not self.open:
            raise ended()
        try:
            return act()
        except BaseException as error:
            if not self.group.in_order:
                self.checkpoints.abandon()  # what workers still answer is not the answer to the next call
            if isinstance(error, WorkerError):
                self.close()
            raise

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch, of any sizes: the program of a new shape is compiled first."""
        check_batch(batch, self.wanted)
        rows, first = as_run(self.program, batch, self.wanted)
        ready = self.first if first else self._prepared(rows, trains=True, given=batch)
        answers = self._run(WorkerAnswers.step, ready, rows)
        self.busy = {device: sums.busy for device, sums in answers.items()}
        self.checkpoints.poll()
        return result_of(ready.program.plans, ready.program.outline, answers[self.devices[0]])

    def evaluate(self, batch: Batch, means: Means) -> Means:
        """Evaluate on one global batch. Return the sums so far with those of the batch."""
        for piece in pieces_of(padded(batch, self.program.job.buckets), slices_of(self.plans)):
            ready = self._prepared(piece.batch, trains=False)
            answers = self._run(WorkerAnswers.evaluate, ready, piece.batch)
            means = means.add(ready.program, piece, answers[self.devices[0]])
        return replace(means, batches=means.batches + 1)

    def _run(
        self, call: Callable[[WorkerAnswers, ProgramBatch], Sums], ready: Prepared, batch: Batch
    ) -> dict[int, Sums]:
        """Let all workers run a program on their rows of a batch. Each answers the sums over all devices."""
        given = {device: (ready.number, ready.slicer.cut(batch, device)) for device in self.devices}
        with self.group.running(ready.program):
            return self.ask(call, given)

    def _prepared(self, batch: Batch, *, trains: bool, given: Batch | None = None) -> Prepared:
        """Return the program for batches of these shapes. Compile it and prepare the workers if it is new.

        given: the batch before it was padded and its samples were repeated, for a message.
        """
        key = (trains, read_shapes(batch, self.wanted) if trains else shapes_of(batch))
        known = self.prepared.get(key)
        if known is not None and all(self.unread.get(name) is value for name, value in known.buffers.items()):
            return known
        if known is not None:
            program = known.program
        else:
            program = self._shaped(batch, given or batch) if trains else self.program.evaluation(batch)
        buffers, setup = self._unheld(program), setup_of(program)
        self.preparations += 1
        number = self.preparations
        self._guarded(lambda: self.group.prepare(number, setup, buffers, trains=trains))
        ready = Prepared(number=number, program=program, slicer=BatchSlicer(program.plans), buffers=buffers)
        self.prepared[key] = ready
        return ready

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
        """Return the values of the buffers that a program reads and no worker holds."""
        read = {name for plan in program.plans for name in plan.buffers}
        unheld = sorted(read - held_names(self.plans))
        if missing := [name for name in unheld if name not in self.unread]:
            initial = initial_tensors(self.program)  # the run began from a checkpoint, which has none of them
            self.unread |= {name: initial[name] for name in missing}
        return {name: self.unread[name] for name in unheld}

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""
        self.ask_all(WorkerAnswers.set_optimizer_option, (group, key, value))

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Write a checkpoint; `data`: with the states of callbacks, if they have any."""
        self.checkpoints.save(path, data=data, wait=wait, keep=keep)

    def read(self, path: Path | str) -> Resumed:
        """Let workers go on from a checkpoint."""
        return self.checkpoints.load(path)

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        self.checkpoints.settle()

    def protect(self) -> None:
        """Copy the state into memory that outlives workers, where it is kept. Steps do so by themselves."""
        if self.group.protects:
            self.ask_all(WorkerAnswers.protect, None)

    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        """Take the state after a step from memory; `unread`: the values that no device holds."""
        with self.group.sharing(step):
            self.ask_all(WorkerAnswers.restore, step)
        self.unread.update(unread)

    def close(self) -> None:
        """End every worker. Idempotent."""
        try:
            if self.open:
                self.checkpoints.settle()
        finally:
            self.open = False
            self.group.close()


def ended() -> WorkerError:
    """Return the error of a run that is used after its end."""
    return WorkerError("the workers have ended", by="run", hint="launch the program again")
