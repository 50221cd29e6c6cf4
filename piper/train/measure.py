"""The measures of a run: of each step, with the learning rate of the next, its profile, and its outcome."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from torch import Tensor

from piper.checkpoint.json_state import decode
from piper.checkpoint.metadata import Trainer
from piper.compiler import Program
from piper.job import Job
from piper.plan.bucket import Bucket
from piper.run.run import Run
from piper.runtime.recorders import WARM, ClockOffset, DeviceProfile
from piper.runtime.trainers import Sizes, advance, empty_optimizer, make_scheduler
from piper.simulate.profile import FOLDER, Profile, Times, Track, fingerprint, works_of, write_profile
from piper.simulate.simulate import TOKENS
from piper.view.plan_trace import profile_trace
from piper.view.provenance import FILE, METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One step, as `metrics.jsonl` has it. Steps count from 1: step k is the k-th update."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float | None  # None: the batch has no tokens
    samples_per_s: float
    step_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss returns behind the loss

    def as_line(self) -> dict[str, object]:
        """Return the line of `metrics.jsonl`, which has metrics only where the loss returns some."""
        line = asdict(self)
        return line if self.metrics else {key: value for key, value in line.items() if key != "metrics"}


Reporter = Callable[[Measure], None]


class Rate:
    """The learning rate of each step, from an optimizer like the workers' that has nothing to train."""

    def __init__(
        self,
        job: Job,
        buckets: Iterable[Bucket],
        resumed: Trainer | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        """Build the schedule, from a resumed state if any; `sizes`: of all parameters that are trained."""
        self._job = job
        self._optimizer = empty_optimizer(job.optimizer, [bucket.update for bucket in buckets], sizes)
        self._scheduler = None
        if self._optimizer is None:
            return
        if job.scheduler is not None:
            self._scheduler = make_scheduler(job.scheduler, self._optimizer)
        if resumed is not None and resumed.optimizer is not None:
            groups = cast("list[dict[str, object]]", decode(resumed.groups))
            for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(saved)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(cast("dict[str, object]", decode(resumed.schedule)))

    @property
    def now(self) -> float:
        """Return the learning rate of the next step, of the first group of parameters."""
        return 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])

    def set_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group, as `run.optimizer[group][key] = value` does on the workers."""
        if self._optimizer is not None:
            self._optimizer.param_groups[group][key] = value

    def advance(self, step: int) -> None:
        """Go on by a step, as workers do at its end."""
        if self._scheduler is not None and self._job.scheduler is not None:
            advance(self._scheduler, self._job.scheduler, step)


def tokens_in(batch: Mapping[str, Tensor]) -> int | None:
    """Count the tokens of a batch. None: it has none."""
    return next((batch[name].numel() for name in TOKENS if name in batch), None)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run, so far or at its end."""

    folder: Path
    done: int
    steps: int
    saved: bool  # the last step is in a checkpoint
    seconds: float = 0.0  # of steps
    first: Measure | None = None  # step of this run, after a resume too. None: there was nothing left to do
    last: Measure | None = None
    preempted: bool = False  # stopped by SIGTERM

    def add(self, measure: Measure) -> None:
        """Note a step."""
        self.done = measure.step
        self.first, self.last = self.first or measure, measure
        self.seconds += measure.step_s

    @property
    def stopped(self) -> bool:
        """Return whether the run was stopped before its last step."""
        return self.done < self.steps


def ending(outcome: Outcome, program: str = "piper") -> str:
    """Return the closing message of a run that reached its last step. program: how the user calls Piper."""
    folder, first, last = outcome.folder, outcome.first, outcome.last
    if first is None or last is None:
        return f"The run is at step {outcome.done} already: --steps asks for more"
    fall = 100 * (1 - last.loss / first.loss) if first.loss else 0.0
    steps = last.step - first.step + 1
    rows = [
        f"Trained {steps} steps in {outcome.seconds:.0f} s: "
        f"loss {first.loss:.4f} -> {last.loss:.4f} ({abs(fall):.0f} % {'lower' if fall >= 0 else 'higher'})",
        f"  run      {folder}",
        f"  metrics  {folder / METRICS}",
        f"  plan     {folder / 'plan.txt'}",
        f"  look     {program} view {folder}",
    ]
    return "\n".join(rows)


def stopping(outcome: Outcome, again: str) -> str:
    """Return the message of a run that was stopped; `again`: the command that goes on."""
    where = f"{'preempted' if outcome.preempted else 'stopped'} after step {outcome.done} of {outcome.steps}"
    unsaved = "nothing was saved, because the job has no checkpoint"
    return f"{where}; " + (f"go on with: {again}" if outcome.saved else unsaved)


def profile_of(run: Run, program: Program, recipe: str, on: str, done: int = 0) -> Profile:
    """Return the profile that a run's workers recorded; `done`: the steps taken before they began."""
    recorded = run.recordings()
    tracks = [track_of(recording, clock) for recording, clock in recorded.values()]
    first = next((recording.first for recording, _ in recorded.values()), 0)
    return Profile(
        plans=program.plans,
        tracks=tuple(sorted(tracks, key=lambda track: track.device)),
        model=fingerprint(program.outline),
        recipe=recipe,
        on=on,
        accelerator=program.device,
        first=done + first + 1,
        works=works_of(program.outline.chunks),
    )


def track_of(recording: DeviceProfile, clock: ClockOffset) -> Track:
    """Return one device's recording on the driver's clock."""

    def moved(times: Times) -> Times:
        start, end, busy = times
        return start - clock.offset, end - clock.offset, busy

    steps = tuple(tuple(map(moved, step)) for step in recording.steps)
    return Track(device=recording.device, steps=steps, error=clock.error)


def save_profile(profile: Profile, folder: Path) -> str:
    """Write a run's profile and its trace into its folder, and return a message that says where they are."""
    if not profile.count:
        return f"No step was recorded: the run ended within its first {WARM}"
    write_profile(profile, folder / FOLDER)
    (folder / FOLDER / "trace.json").write_text(profile_trace(profile), encoding="utf-8")
    shutil.copyfile(folder / FILE, folder / FOLDER / FILE)  # a run that goes on may have other plans
    return f"Profile in {folder / FOLDER}: piper profile {folder}"
