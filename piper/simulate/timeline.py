"""When each instruction of a step ran, or would run: simulated and measured steps share this form."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One instruction in time, in seconds from the beginning of the step."""

    start: float
    end: float
    waited: float = 0.0  # before it started: it was its turn, but others of the communication were not ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of the devices that it speaks for: a span for each instruction of their plan, by its place."""

    devices: Sequence[int]  # all devices of a program where simulated, one where measured
    spans: Sequence[Span]

    @property
    def end(self) -> float:
        """When the last instruction ends."""
        return max((span.end for span in self.spans), default=0.0)
