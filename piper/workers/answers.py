"""What a worker answers: steps, values, gradients, the optimizer, recordings, saves and loads."""

from collections.abc import Mapping, Sequence
from time import monotonic

from torch import Tensor

from piper.checkpoint.background import BackgroundSaver
from piper.checkpoint.move_state import move_state
from piper.ir.ids import Tags
from piper.runtime.recorders import DeviceProfile, OutputKey
from piper.runtime.worker import Sums, Worker
from piper.workers.messages import BatchSlice
from piper.workers.transport.versions import WorkerVersions

ProgramBatch = tuple[int, Mapping[str, BatchSlice | Tensor]]
# ^ the number of a program, and a device's rows of a batch, with the tables of experts


class WorkerAnswers(BackgroundSaver):
    """Answers the calls of a driver. A call has the name of its method, and one argument."""

    def __init__(self, worker: Worker, versions: WorkerVersions | None = None) -> None:
        """Answer for a worker; `versions`: its memory for copies of the state. None: it keeps none."""
        super().__init__(worker)
        self.versions = versions

    def step(self, given: ProgramBatch) -> Sums:
        """Train on this device's rows of a batch."""
        number, fields = given
        move_state(self.worker, number)
        return self.worker.step(fields, number)

    def evaluate(self, given: ProgramBatch) -> Sums:
        """Evaluate on this device's rows of a batch."""
        move_state(self.worker, given[0])
        return self.worker.evaluate(*given)

    def predictions(self, number: int) -> dict[Tags, Tensor]:
        """Return what this device predicted in the last evaluation by a program, by microbatch."""
        recorder = self.worker.others[number].predictions
        return {} if recorder is None else recorder.take()

    def come_home(self, _: object = None) -> None:
        """Hold the state as the first program does. All devices do so at once."""
        move_state(self.worker, 0)

    def protect(self, _: object = None) -> None:
        """Copy the state into memory that outlives this worker."""
        assert self.versions is not None
        self.versions.write()

    def restore(self, step: int) -> None:
        """Take the state after a step from memory."""
        assert self.versions is not None
        self.versions.restore(step)

    def owned(self, buckets: Sequence[str]) -> dict[str, Tensor]:
        """Return this device's part of some buckets, copied: torch cannot resize what NumPy has seen."""
        return {name: self.worker.owned(name).detach().to("cpu", copy=True) for name in buckets}

    def gradients(self, buckets: Sequence[str]) -> dict[str, Tensor | None]:
        """Return the last step's gradients of this device's part of some buckets."""
        return {name: self.worker.gradient(name) for name in buckets}

    def optimizer_options(self, _: object) -> list[tuple[bool, dict[str, object]]]:
        """Return of the optimizer's groups whether this device trains some of each, and the options."""
        return self.worker.holder.options()

    def set_optimizer_option(self, given: tuple[int, str, float]) -> None:
        """Set an option of one of the optimizer's groups."""
        self.worker.holder.set_option(*given)

    def optimizer_state(self, asked: tuple[str, Sequence[str]]) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
        """Return what the optimizer keeps under a key for this device's part of some buckets."""
        key, buckets = asked
        return {name: self.worker.env.state.kept(name, key) for name in buckets}

    def reached(self, _: object) -> set[str]:
        """Return the parameters that have gradients."""
        return self.worker.env.state.reached

    def buffers(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what this device holds of the named buffers that it uses."""
        return self.worker.buffers(names)

    def trail(self, _: object) -> dict[OutputKey, Tensor]:
        """Return what every chunk returned in the last step."""
        trail = self.worker.latest.trail
        return {} if trail is None else trail.kept

    def record(self, _: object) -> DeviceProfile | None:
        """Return when the instructions of the recorded steps ran, on this worker's clock."""
        return None if self.worker.recorder is None else self.worker.recorder.take()

    def clock(self, _: object) -> float:
        """Return the time of this worker's clock."""
        return monotonic()
