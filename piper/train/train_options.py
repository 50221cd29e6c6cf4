"""What `piper train` is asked for: by its arguments, and by a file in the folder of an elastic run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

from piper.capture.compile.cache import CACHE
from piper.compiler import Program, compile
from piper.errors import ConfigError, ScheduleError
from piper.job import directives_for
from piper.run.elastic import ElasticRange
from piper.run.launch import On
from piper.run.run import Run
from piper.runtime.recorders import WARM
from piper.train.interrupt import GRACE
from piper.workers.rank_environment import RANKS, rank_environment

RESERVE = 10.0  # seconds of the grace in which a version is written, at most
DEVICES = "devices"  # the file of a run's folder that asks for a number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The arguments of `piper train`."""

    recipe: str
    on: str = "local"
    strategy: Path | None = None  # a JSON file that takes the place of the job's own
    steps: int | None = None  # None: as the job says
    resume: bool = False
    out: Path | None = None
    detect_nan: bool = False
    profile: int = 0  # steps to record
    device: str | None = None  # its kind; none: as there is
    compile: bool = False  # chunks run as Inductor compiles them
    graphs: bool = False  # on CUDA each step is one graph, after the first few
    share: str = "host"  # how devices that share an accelerator exchange values
    grace: float = GRACE  # seconds from SIGTERM to the end
    retries: int = 3  # failures in a row that a run may have
    spares: int = 0  # workers more than devices, on Ray or under torchrun
    stall: float | None = None  # seconds without progress after which a step has failed. None: as steps take
    cluster: str | None = None  # the network whose times `rank:N` keeps


def check_options(asked: TrainOptions) -> None:
    """Refuse times, spares, retries and steps that a run cannot have."""
    need(asked.grace > 0, f"--grace {asked.grace:g}", "give a run some seconds to save: --grace 30")
    stall = 1.0 if asked.stall is None else asked.stall
    need(stall > 0, f"--stall {stall:g}", "give a step some seconds: --stall 60")
    ranks = rank_environment() if asked.on in RANKS else None
    possible = asked.spares >= 0 and (not asked.spares or asked.on == "ray" or ranks is not None)
    hint = "spares are actors of Ray (--on ray --spares 1), or ranks of torchrun more than devices"
    need(possible, f"--spares {asked.spares}, on {asked.on}", hint)
    need(asked.retries >= 0, f"--retries {asked.retries}", "0 ends the run with the first failure")
    need(asked.steps is None or asked.steps >= 1, f"--steps {asked.steps}", "train at least 1 step")
    need(asked.profile >= 0, f"--profile {asked.profile}", "record at least 1 step")


def need(holds: bool, what: str, hint: str) -> None:
    """Refuse an argument unless `holds`."""
    if not holds:
        raise ConfigError(what, by="piper train", hint=hint)


def check_profile(profile: int, steps: int) -> None:
    """Refuse to record steps that a run does not have."""
    if profile and steps < profile + WARM:
        first = f"{WARM} steps pass before the recording begins"
        raise ConfigError(
            f"--profile {profile} needs {profile + WARM} steps",
            by="piper train",
            facts={"run": f"{steps} steps to take", "first": first},
            hint="train longer with --steps, or record less",
        )


def recovering_asked(asked: TrainOptions) -> bool:
    """Return whether a run recovers from failures: it is asked to, and its launcher can."""
    return asked.retries > 0 and not asked.profile and asked.on in get_args(On)


def reserve(asked: TrainOptions) -> float:
    """Return the seconds of the grace in which a version is written if the step does not end in time."""
    return min(asked.grace / 2, RESERVE) if recovering_asked(asked) else 0.0


def sizes_of(program: Program, fewest: int, most: int) -> ElasticRange:
    """Return the programs of an elastic job, each compiled when it is first asked for."""

    @cache
    def sized(devices: int) -> Program:
        if devices == most:
            return program
        job = replace(program.job, strategy=directives_for(program.job, devices), elastic=None)
        folder, compiled = (CACHE, False) if program.cache is None else (program.cache.folder, True)
        return compile(job, device=program.device, compile=compiled, cache=folder, captured=program)

    return ElasticRange(fewest=fewest, most=most, program=sized)


class SizeFile:
    """The file in a run's folder that asks for a number of devices: `echo 2 > DIR/devices`."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.path, self.say, self.seen = folder / DEVICES, say, ""

    def obey(self, run: Run) -> None:
        """Let a run go on with the number of devices that was asked for since the last look."""
        try:
            text = self.path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            text = ""
        if text == self.seen or not run.sessions.elastic:
            return
        self.seen = text
        try:
            if text.isdecimal():
                run.resize(int(text))
            elif text:
                self.say(f"warning: {self.path} asks for {text!r}, which is not a number of devices")
        except (ConfigError, ScheduleError) as error:
            self.say(f"warning: {error}")
