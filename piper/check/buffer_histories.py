"""The buffers of a reference during a step: each device writes its own."""

from collections.abc import Callable, Mapping

from torch import Tensor

from piper.check.slicing import BatchSlicing
from piper.ir.chunk import CapturedModel, Tags

Key = tuple[str, int]  # a buffer, and the device that holds it


class BufferHistories:
    """Gives each slice of the batch the buffers that the slices before it on the same device have written."""

    def __init__(
        self,
        outline: CapturedModel,
        slicing: BatchSlicing,
        get: Callable[[], dict[str, Tensor]],
        put: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self._writers = {name: chunk.name for chunk in outline.chunks for name in chunk.mutated}
        self._slicing, self._get, self._put = slicing, get, put
        self._before = get()
        self._held: dict[Key, Tensor] = {}

    def _key(self, name: str, part: Tags, replica: int) -> Key:
        writer = self._writers.get(name)
        return name, 0 if writer is None else self._slicing.placed[writer].by_part[part][replica]

    def begin(self, part: Tags, replica: int) -> None:
        """Set the buffers to what a slice reads."""
        self._put({n: self._held.get(self._key(n, part, replica), v) for n, v in self._before.items()})

    def end(self, part: Tags, replica: int) -> None:
        """Take over what a slice has written."""
        self._held.update({self._key(name, part, replica): value for name, value in self._get().items()})

    def keep_first(self, part: Tags) -> None:
        """Set the buffers to those of the first replica of the devices that run the first microbatch."""
        self.begin(part, 0)
