"""Measures how long a device computes, between events on the streams of its instructions."""

import torch

from piper.runtime.accelerator import module
from piper.runtime.context import Bound


class DeviceTimes:
    """The events of one device's instructions. The host issues them long before they run."""

    def __init__(self, accelerator: torch.device) -> None:
        self.module = module(accelerator)
        self.recorded: dict[int, tuple[torch.Event, torch.Event]] = {}  # by place, since `take`

    def watch(self, place: int, run: Bound) -> Bound:
        """Return an instruction that records when its stream begins and ends it."""
        events = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)

        def timed() -> None:
            if torch.cuda.is_current_stream_capturing():
                run()  # events inside a graph cannot be read
                return
            events[0].record()
            run()
            events[1].record()
            self.recorded[place] = events

        return timed

    def take(self) -> float:
        """Return the seconds of all instructions since the last call. The step must be over."""
        found, self.recorded = self.recorded, {}
        return float(sum(begin.elapsed_time(end) for begin, end in found.values())) / 1e3
