"""A running job as its driver sees it, whatever its workers are: what it asks, and what they answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from piper.errors import WorkerError
from piper.launchers.base import StepResult, Trains, ended, result_of, state_by_name
from piper.launchers.checkpoints import Checkpoints, Saves
from piper.launchers.excerpt import BatchSlicer
from piper.launchers.messages import Call
from piper.plan.divided import Share
from piper.plan.plan import Bucket, Plans
from piper.runtime.assemble import whole_buffers, whole_parameters
from piper.runtime.batch import check_batch, wanted_shapes
from piper.runtime.record import Clock, Recording, compare
from piper.runtime.setup import ProgramLike, setup_of
from piper.runtime.trail import Mark
from piper.runtime.worker import Sums


class WorkerGroup(ABC):
    """The workers of a job, one for each device."""

    @abstractmethod
    def ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        """Call workers, each with its argument; what each answers. One error ends them all."""

    @abstractmethod
    def close(self) -> None:
        """End every worker. Again: nothing."""


def devices_of(plans: Plans) -> list[int]:
    """Every device of a job, in order."""
    return sorted(device for plan in plans for device in plan.devices)


def holders(buckets: Sequence[Bucket]) -> dict[int, list[str]]:
    """Which devices to ask for which buckets, so that together they have all of every bucket once."""
    asked: dict[int, list[str]] = {}
    for bucket in buckets:
        for group in bucket.groups[: bucket.ways]:
            for device in group if bucket.zero else group[:1]:
                asked.setdefault(device, []).append(bucket.name)
    return asked


def unread_values(program: ProgramLike, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first values of parameters and buffers that no device holds: they stay as they are."""
    held = {piece.name for bucket in program.plans.buckets.values() for piece in bucket.pieces}
    held |= {slot.removeprefix("buffer.") for plan in program.plans for slot in plan.residents}
    return {name: value.clone() for name, value in values.items() if name not in held}


class RemoteRun(Saves, Trains):
    """A job whose devices are processes somewhere."""

    def __init__(self, program: ProgramLike, crew: WorkerGroup, unread: dict[str, Tensor]) -> None:
        """`unread`: the first values of parameters and buffers that no device holds."""
        self.program, self.plans, self.crew, self.unread = program, program.plans, crew, unread
        self.devices = devices_of(program.plans)
        self.shapes = wanted_shapes(setup_of(program))
        self.cutter = BatchSlicer(program.plans)
        self.open = True
        self.checkpoints = Checkpoints(program, self.devices, self._ask, unread, self.close)

    def _ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        if not self.open:
            raise ended()
        try:
            return self.crew.ask(call, arguments)
        except BaseException as error:
            self.checkpoints.abandon()  # what workers still answer is not the answer to the next call
            if isinstance(error, WorkerError):
                self.close()
            raise

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""
        check_batch(batch, self.shapes)
        cut = {device: self.cutter.cut(batch, device) for device in self.devices}
        answers = self._ask("step", cut)
        self.checkpoints.poll()
        return result_of(self.plans, cast(Sums, answers[self.devices[0]]))

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, by fully qualified name."""
        outline, buckets = self.program.outline, list(self.plans.buckets.values())
        owned = self._owned("owned", buckets)
        parameters = whole_parameters(buckets, lambda bucket, device: owned[bucket, device])
        names = [buffer.name for buffer in outline.buffers if buffer.persistent]
        buffers: dict[str, Tensor] = {}
        if names:
            answers = self._ask("buffers", dict.fromkeys(self.devices, names))
            held = [cast("dict[str, tuple[Share, Tensor]]", answers[device]) for device in self.devices]
            buffers = whole_buffers(held)
        whole = state_by_name(outline, self.unread | parameters | buffers)
        return {name: value.clone() for name, value in whole.items()}

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients in full, before clipping; `keep_gradients` must be on."""
        buckets = list(self.plans.buckets.values())
        owned = self._owned("gradients", buckets)
        given = [bucket for bucket in buckets if owned[bucket.name, bucket.groups[0][0]] is not None]
        first = self.devices[0]
        reached = cast("set[str]", self._ask("reached", {first: None})[first])
        whole = whole_parameters(given, lambda bucket, device: owned[bucket, device])
        return {name: value for name, value in whole.items() if name in reached}

    def _owned(self, call: Call, buckets: Sequence[Bucket]) -> dict[tuple[str, int], Tensor]:
        answers = self._ask(call, holders(buckets))
        return {
            (bucket, device): value
            for device, found in answers.items()
            for bucket, value in cast("dict[str, Tensor]", found).items()
        }

    def trails(self) -> dict[int, dict[Mark, Tensor]]:
        """What every chunk returned in the last step, by device; `keep_outputs` must be on."""
        answers = self._ask("trail", dict.fromkeys(self.devices))
        return cast("dict[int, dict[Mark, Tensor]]", answers)

    def recordings(self) -> dict[int, tuple[Recording, Clock]]:
        """When the instructions of the recorded steps ran, by device; `profile` must be on."""
        found: dict[int, tuple[Recording, Clock]] = {}
        for device, answer in self._ask("record", dict.fromkeys(self.devices)).items():
            if isinstance(answer, Recording):
                found[device] = (answer, compare(lambda asked=device: self._time(asked)))  # type: ignore[misc]
        return found

    def _time(self, device: int) -> float:
        return cast(float, self._ask("clock", {device: None})[device])

    def close(self) -> None:
        """End every worker. Again: nothing."""
        try:
            if self.open:
                self.checkpoints.settle()
        finally:
            self.open = False
            self.crew.close()
