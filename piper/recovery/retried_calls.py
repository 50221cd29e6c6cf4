"""The calls of a run that only ask its workers, made again when workers are lost meanwhile."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from piper.launchers.base import EvaluationResult
from piper.launchers.run import Run
from piper.recovery.starters import Recoverable
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.debug.profiler import ClockOffset, DeviceProfile

T = TypeVar("T")


class RetriedCalls(Run):
    """A run that asks its workers again where an answer is lost."""

    @abstractmethod
    def _call(self, act: Callable[[Recoverable], T], step: int | None = None) -> T:
        """Return what a method returns, over as many failures as there are retries. step: under way."""

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]] | None = None) -> EvaluationResult:
        """Evaluate on global batches, by default those of the job's `evaluate`; nothing is trained."""
        given = None if batches is None else [*batches]
        return self._call(lambda run: run.evaluate(given))

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return the options of the optimizer's groups."""
        return self._call(lambda run: run.optimizer_groups())

    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        """Return in full what the optimizer keeps for each parameter under a key, such as `exp_avg`."""
        return self._call(lambda run: run.optimizer_state(key))

    def state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer in full, by fully qualified name."""
        return self._call(lambda run: run.state_dict())

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients in full, before clipping; `keep_gradients` must be on."""
        return self._call(lambda run: run.gradients())

    def trails(self) -> dict[int, dict[OutputKey, Tensor]]:
        """Return what every chunk returned in the last step, by device; `keep_outputs` must be on."""
        return self._call(lambda run: run.trails())

    def recordings(self) -> dict[int, tuple[DeviceProfile, ClockOffset]]:
        """Return when the instructions of the recorded steps ran, by device; `profile` must be on."""
        return self._call(lambda run: run.recordings())
