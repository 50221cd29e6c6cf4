"""The times of the instructions of a step: the common form of simulated and measured steps."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One instruction in time, in seconds from the beginning of the step."""

    start: float
    end: float
    waited: float = 0.0  # for peers of the communication, before `start`


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one or more devices: a span for each instruction of their plan, in the plan's order."""

    devices: Sequence[int]  # all devices of a program where simulated, one where measured
    spans: Sequence[Span]

    @property
    def end(self) -> float:
        """Return when the last instruction ends."""
        return max((span.end for span in self.spans), default=0.0)
