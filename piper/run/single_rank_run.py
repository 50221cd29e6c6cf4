"""`rank:N`: one device of a job by itself, for its step time and peak memory."""

from dataclasses import dataclass
from pathlib import Path

from piper.errors import ConfigError
from piper.plan.memory_timeline import timeline
from piper.run.run import Run
from piper.run.sessions import Sessions
from piper.runtime.accelerator import module
from piper.runtime.memory_release import predicted_peak
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.group import GivenGroup
from piper.workers.results import Resumed
from piper.workers.single_rank import SingleRankGroup, single_rank_error


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The peak memory of a device, predicted and measured, in bytes."""

    planned: int  # counting in the order of issue
    predicted: int  # with what is held while streams run at the same time
    measured: int | None  # none on a host, which does not count


class SingleRankRun(Run):
    """One device of a job, for its step time and peak memory. Its numbers mean nothing."""

    saves = False

    def __init__(self, group: SingleRankGroup) -> None:
        super().__init__(Sessions(group.program, group.options, GivenGroup(group)))
        self.device, self.setup, self.plans = group.device, group.setup, group.program.plans
        self.network, self.engine, self.seconds = group.network, group.engine, group.seconds
        self.sessions.begin()
        self.worker = group.worker

    def peak(self) -> PeakMemory:
        """Return the peak memory so far, predicted and measured."""
        plan = self.worker.env.plan
        measured = None
        if self.engine is not None:
            measured = module(self.setup.device).max_memory_allocated(self.setup.device) - self.engine.nbytes
        return PeakMemory(planned=timeline(plan).peak, predicted=predicted_peak(plan), measured=measured)

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Refuse to save."""
        raise single_rank_error("there is nothing worth saving")

    def load(self, path: Path | str) -> Resumed:
        """Refuse to load."""
        raise single_rank_error("a checkpoint cannot be loaded")


def device_named(on: str, program: ProgramLike) -> int:
    """Return the device that `rank:N` names."""
    known = program.plans.devices
    text = on.partition(":")[2]
    if not text.isdecimal() or int(text) not in known:
        raise ConfigError(
            f"there is no device {text!r}",
            by=on,
            facts={"devices": f"{known[0]} to {known[-1]}"},
            hint="name one of the plan's devices: --on rank:0",
        )
    return int(text)


def launch_single_rank(
    program: ProgramLike, on: str, options: Options | None = None, *, cluster: str | None = None
) -> SingleRankRun:
    """Start one device of a program in this process."""
    return SingleRankRun(SingleRankGroup(program, device_named(on, program), options or Options(), cluster))
