"""A profile: the measured times of the instructions of some steps, of every device, on one clock.

profile.json    what was profiled            plan.txt      the plans that ran
device-N.json   one device's times           trace.json    all of it, for Perfetto and Chrome
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from piper.errors import CONTENT, ConfigError, file_errors
from piper.ir.chunk import CapturedModel, Chunk
from piper.ir.devices import Devices
from piper.ir.json_fields import from_json, to_json
from piper.plan.ops import COMMUNICATION
from piper.plan.plan import Plans
from piper.plan.text import read_plans, show_plans
from piper.simulate.account import Span, Timeline
from piper.version import VERSION

FOLDER, ABOUT, PLANS, DEVICE = "profile", "profile.json", "plan.txt", "device-{}.json"
DIGITS = 7  # of seconds: a tenth of a microsecond
Times = tuple[float, float, float]  # from, to, and seconds of computing on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """The arithmetic and memory traffic of a chunk's phases, as capture estimates them."""

    key: str
    phases: Mapping[str, tuple[int, int]]  # arithmetic, and bytes of memory traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One device's recorded steps, on the clock that all share."""

    device: int
    steps: tuple[tuple[Times, ...], ...]
    error: float = 0.0  # seconds by which its clock may be off


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Some steps of a run."""

    plans: Plans
    tracks: tuple[Track, ...]
    model: str  # what `fingerprint` says of the model
    recipe: str = ""
    on: str = ""  # the launcher
    accelerator: str = "cpu"
    first: int = 0  # the number of the first step recorded, counted from 1
    works: Mapping[str, ChunkWork] = field(default_factory=dict)  # by chunk

    @property
    def count(self) -> int:
        """Return how many steps were recorded."""
        return min((len(track.steps) for track in self.tracks), default=0)

    @property
    def error(self) -> float:
        """Return the largest clock error between any two devices, in seconds."""
        return sum(sorted((track.error for track in self.tracks), reverse=True)[:2])

    def seconds(self, step: int) -> float:
        """Return the seconds of a step from its first instruction to its last, over all devices."""
        times = [row for track in self.tracks for row in track.steps[step]]
        return max(end for _, end, _ in times) - min(start for start, _, _ in times) if times else 0.0

    @property
    def typical(self) -> int:
        """Return the number of the step whose time is nearest to the median."""
        middle = median(self.seconds(step) for step in range(self.count))
        return min(range(self.count), key=lambda step: abs(self.seconds(step) - middle))

    def timelines(self, step: int | None = None) -> dict[int, Timeline]:
        """Return the timeline of each device in a step, from its beginning. None: the typical step.

        A communication starts when its last member is ready. Until then the other members wait.
        """
        number = self.typical if step is None else step
        begin = min((row[0] for track in self.tracks for row in track.steps[number]), default=0.0)
        met = meetings(self.plans, {track.device: track.steps[number] for track in self.tracks})
        found: dict[int, Timeline] = {}
        for track in self.tracks:
            spans = []
            for place, (start, end, _) in enumerate(track.steps[number]):
                ready = min(max(start, met.get((track.device, place), start)), end)
                spans.append(Span(start=ready - begin, end=end - begin, waited=ready - start))
            found[track.device] = Timeline(devices=(track.device,), spans=tuple(spans))
        return found


def meetings(plans: Plans, steps: Mapping[int, Sequence[Times]]) -> dict[tuple[int, int], float]:
    """Return when the last member of each communication was ready, by device and place of the instruction."""
    latest: dict[tuple[str, str, Devices], float] = {}
    keys: dict[tuple[int, int], tuple[str, str, Devices]] = {}
    for device, rows in steps.items():
        groups: dict[tuple[str, str], Devices] = {}
        for place, ins in enumerate(plans.of(device).instrs):
            if ins.comm is None or ins.op not in COMMUNICATION:
                continue
            if (ins.comm, ins.op) not in groups:
                groups[ins.comm, ins.op] = plans.comms[ins.comm].group_of(device, ins.op)
            key = (ins.node, ins.comm, groups[ins.comm, ins.op])
            keys[device, place] = key
            latest[key] = max(latest.get(key, 0.0), rows[place][0])
    return {where: latest[key] for where, key in keys.items()}


def fingerprint(outline: CapturedModel) -> str:
    """Return a hash of the names, shapes and types of a model's parameters."""
    names = sorted(f"{p.name} {p.shape} {p.dtype}" for p in outline.parameters)
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def works_of(chunks: Sequence[Chunk]) -> dict[str, ChunkWork]:
    """Return the arithmetic and memory traffic of every chunk."""
    return {
        chunk.name: ChunkWork(
            key=chunk.key,
            phases={phase: (spec.flops, spec.bytes_moved) for phase, spec in chunk.phases.items()},
        )
        for chunk in chunks
    }


def write_profile(profile: Profile, folder: Path) -> None:
    """Write a profile into a folder of its own."""
    hint = "name a folder you own, on a disk with room: --out DIR"
    with file_errors("the profile cannot be written", folder, hint):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ABOUT).is_file() and (others := sorted(path.name for path in folder.iterdir())):
            raise ConfigError(
                "this folder holds files that are not a profile's",
                by=str(folder),
                facts={"has": others[0] + (f", and {len(others) - 1} more" if len(others) > 1 else "")},
                hint="move them away, or record into another folder: --out DIR",
            )
        for name, text in files_of(profile):
            (folder / name).write_text(text, encoding="utf-8")


def files_of(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the name and text of every file of a profile."""
    about = {
        "piper": VERSION,
        "recipe": profile.recipe,
        "on": profile.on,
        "accelerator": profile.accelerator,
        "model": profile.model,
        "first_step": profile.first,
        "steps": profile.count,
        "step_s": [round(profile.seconds(step), DIGITS) for step in range(profile.count)],
        "clock_error_s": profile.error,
        "devices": [track.device for track in profile.tracks],
        "chunks": to_json(profile.works),
    }
    yield ABOUT, json.dumps(about, indent=1) + "\n"
    yield PLANS, show_plans(profile.plans)
    begin = min((row[0] for track in profile.tracks for step in track.steps for row in step), default=0.0)
    for track in profile.tracks:
        columns = [
            [[round(row[i] - (begin if i < 2 else 0.0), DIGITS) for row in step] for step in track.steps]
            for i in range(3)
        ]
        times = dict(zip(("start_s", "end_s", "cpu_s"), columns, strict=True))
        yield (
            DEVICE.format(track.device),
            json.dumps({"device": track.device, "clock_error_s": track.error, **times}),
        )


def find_profile(path: Path) -> Path | None:
    """Return the folder of a profile: the one given, or that inside a run's folder. None: there is none."""
    return next((folder for folder in (path, path / FOLDER) if (folder / ABOUT).is_file()), None)


def read_profile(path: Path) -> Profile:
    """Read a profile back from its folder, or from that of its run."""
    folder = find_profile(path)
    if folder is None:
        raise ConfigError(
            "there is no profile" if path.exists() else "there is no such folder",
            by=str(path),
            facts={"looked": f"for {path / FOLDER / ABOUT}"},
            hint="record one: piper train RECIPE --profile 5 --out DIR",
        )
    hint = "record it again: piper train RECIPE --profile 5 --out DIR"
    with file_errors("this profile cannot be read", folder, hint, *CONTENT):
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        tracks = tuple(read_track(folder / DEVICE.format(device)) for device in about["devices"])
        plans = read_plans((folder / PLANS).read_text(encoding="utf-8"), str(folder / PLANS))
        profile = Profile(
            plans=plans,
            tracks=tracks,
            model=about["model"],
            recipe=about["recipe"],
            on=about["on"],
            accelerator=about["accelerator"],
            first=about["first_step"],
            works={name: from_json(ChunkWork, work) for name, work in about["chunks"].items()},
        )
        check_whole(profile)
        return profile


def read_track(path: Path) -> Track:
    """Read the recorded steps of one device."""
    found = json.loads(path.read_text(encoding="utf-8"))
    columns = zip(found["start_s"], found["end_s"], found["cpu_s"], strict=True)
    steps = tuple(
        tuple((float(s), float(e), float(c)) for s, e, c in zip(*step, strict=True)) for step in columns
    )
    return Track(device=int(found["device"]), steps=steps, error=float(found["clock_error_s"]))


def check_whole(profile: Profile) -> None:
    """Refuse a profile whose times do not match its plans."""
    if not profile.tracks or not profile.count:
        raise ValueError("it holds no step")
    for track in profile.tracks:
        wanted = len(profile.plans.of(track.device).instrs)
        if any(len(step) != wanted for step in track.steps):
            raise ValueError(f"device {track.device} has not one time for each of its {wanted} instructions")
