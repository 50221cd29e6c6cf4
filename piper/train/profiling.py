"""The profile of a run: what its workers recorded, on the driver's clock, in the run's folder."""

import shutil
from pathlib import Path

from piper.compiler import Program
from piper.errors import ConfigError
from piper.run.run import Run
from piper.runtime.recorders import WARM, ClockOffset, DeviceProfile
from piper.simulate.profile import FOLDER, Profile, Times, Track, fingerprint, works_of, write_profile
from piper.simulate.trace_events import profile_trace
from piper.view.provenance import FILE

TRACE = "trace.json"


def check_profile(profile: int, steps: int) -> None:
    """Refuse to record steps that a run does not have."""
    if profile < 0:
        raise ConfigError(f"--profile {profile}", by="piper train", hint="record at least 1 step")
    if profile and steps < profile + WARM:
        raise ConfigError(
            f"--profile {profile} needs {profile + WARM} steps",
            by="piper train",
            facts={
                "run": f"{steps} steps to take",
                "first": f"{WARM} steps pass before the recording begins",
            },
            hint="train longer with --steps, or record less",
        )


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
    (folder / FOLDER / TRACE).write_text(profile_trace(profile), encoding="utf-8")
    shutil.copyfile(folder / FILE, folder / FOLDER / FILE)  # a run that goes on may have other plans
    return f"Profile in {folder / FOLDER}: piper profile {folder}"
