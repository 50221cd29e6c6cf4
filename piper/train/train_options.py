"""The arguments of `piper train`: their checks, the job they ask for, and whether the run recovers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from piper.errors import ConfigError
from piper.job import Job
from piper.recipe import load_recipe
from piper.run.launch import On
from piper.train.interrupt import GRACE
from piper.workers.rank_environment import RANKS, rank_environment

RESERVE = 10.0  # seconds of the grace in which a version is written, at most


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
    device: str | None = None  # cpu or cuda; none: as there is
    compile: bool = False  # chunks run as Inductor compiles them
    graphs: bool = False  # on CUDA each step is one graph, after the first few
    share: str = "host"  # how devices that share an accelerator exchange values
    grace: float = GRACE  # seconds from SIGTERM to the end
    retries: int = 3  # failures in a row that a run may have
    spares: int = 0  # workers more than devices, on Ray or under torchrun
    stall: float | None = None  # seconds without progress after which a step has failed. None: as steps take
    cluster: str | None = None  # the network whose times `rank:N` keeps


def check_options(asked: TrainOptions) -> None:
    """Refuse times, spares and retries that a run cannot have."""
    if not asked.grace > 0:
        raise ConfigError(
            f"--grace {asked.grace:g}", by="piper train", hint="give a run some seconds to save: --grace 30"
        )
    if asked.stall is not None and not asked.stall > 0:
        raise ConfigError(
            f"--stall {asked.stall:g}", by="piper train", hint="give a step some seconds: --stall 60"
        )
    ranks = rank_environment() if asked.on in RANKS else None
    if asked.spares < 0 or (asked.spares and asked.on != "ray" and ranks is None):
        raise ConfigError(
            f"--spares {asked.spares}, on {asked.on}",
            by="piper train",
            hint="spares are actors of Ray (--on ray --spares 1), or ranks of torchrun more than devices",
        )
    if asked.retries < 0:
        raise ConfigError(
            f"--retries {asked.retries}", by="piper train", hint="0 ends the run with the first failure"
        )


def asked_job(asked: TrainOptions) -> Job:
    """Return the recipe's job, for as many steps as asked for."""
    if asked.steps is not None and asked.steps < 1:
        raise ConfigError(f"--steps {asked.steps}", by="piper train", hint="train at least 1 step")
    job = load_recipe(asked.recipe, asked.strategy)
    return job if asked.steps is None else replace(job, steps=asked.steps)


def recovering_asked(asked: TrainOptions) -> bool:
    """Return whether a run recovers from failures: it is asked to, and its launcher can."""
    return asked.retries > 0 and not asked.profile and asked.on in get_args(On)


def reserve(asked: TrainOptions) -> float:
    """Return the seconds of the grace in which a version is written if the step does not end in time."""
    return min(asked.grace / 2, RESERVE) if recovering_asked(asked) else 0.0
