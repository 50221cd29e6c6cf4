"""The optimizer of a job whose devices are processes: its options, and what it keeps for each parameter."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from piper.devices import Devices
from piper.launchers.messages import Call
from piper.plan.plan import Bucket, Plans
from piper.runtime.full_values import whole_state


def holders(buckets: Sequence[Bucket]) -> dict[int, list[str]]:
    """Return which devices to ask for which buckets, so that their answers hold every element once."""
    asked: dict[int, list[str]] = {}
    for bucket in buckets:
        for group in bucket.distinct:
            for device in group if bucket.zero else group[:1]:
                asked.setdefault(device, []).append(bucket.name)
    return asked


class RemoteOptimizer(ABC):
    """A run that asks workers about their optimizers."""

    plans: Plans
    devices: Devices

    @abstractmethod
    def _ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        """Call workers, each with its argument, and return their answers."""

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return the options of each group of parameters."""
        found = self._ask("optimizer_options", dict.fromkeys(self.devices)).values()
        return next((cast("list[dict[str, object]]", groups) for groups in found if groups is not None), [])

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""
        self._ask("set_optimizer_option", dict.fromkeys(self.devices, (group, key, value)))

    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        """Return in full what the optimizer keeps for each parameter under a key, such as `exp_avg`."""
        buckets = [bucket for bucket in self.plans.buckets.values() if bucket.trainable]
        asked = {device: (key, names) for device, names in holders(buckets).items()}
        answers = self._ask("optimizer_state", asked)
        owned = {
            (bucket, device): value
            for device, found in answers.items()
            for bucket, value in cast("dict[str, tuple[Tensor, tuple[str, ...]]]", found).items()
        }
        return whole_state(buckets, owned)
