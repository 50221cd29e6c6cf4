"""`piper train`: trains a recipe, with a live display and a folder for the run."""

import sys
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, NoReturn

from rich.console import Console

from piper.cli.application import (
    INTERRUPTED,
    PREEMPTED,
    Answer,
    Compile,
    Device,
    Recipe,
    RunFolder,
    StrategyFile,
    on_rank_zero,
    option,
)
from piper.train.interrupt import GRACE
from piper.view.provenance import METRICS

if TYPE_CHECKING:
    from piper.train.measure import Outcome
    from piper.train.train_options import TrainOptions


@on_rank_zero
def train(
    recipe: Recipe,
    on: Annotated[
        str, option("The launcher: inline (threads), local (processes), ... or rank:N, device N alone.")
    ] = "local",
    strategy: StrategyFile = None,
    device: Device = None,
    compile: Compile = False,
    cluster: Annotated[
        str | None, option("The network whose times rank:N keeps: a name or a file.", metavar="NAME|FILE")
    ] = None,
    steps: Annotated[int | None, option("How many steps; else as the recipe says.")] = None,
    resume: Annotated[bool, option("Go on from the newest checkpoint of the run.", "--resume")] = False,
    out: RunFolder = None,
    detect_nan: Annotated[
        bool, option("Keep every result, to name the first that is no number.", "--detect-nan")
    ] = False,
    profile: Annotated[int, option("Time every instruction of this many steps.", metavar="K")] = 0,
    graphs: Annotated[
        bool, option("On CUDA, issue each step as one graph, after the first few.", "--graphs")
    ] = False,
    share: Annotated[
        str, option("Devices that share a GPU exchange values through the host, or by NCCL.")
    ] = "host",
    grace: Annotated[
        float, option("Seconds from SIGTERM to the end, in which the run is saved.", metavar="S")
    ] = GRACE,
    retries: Annotated[
        int, option("Failures in a row from which the run recovers; 100 good steps refill them.")
    ] = 3,
    stall: Annotated[
        float | None, option("Seconds without progress that are a failure; else by the steps.", metavar="S")
    ] = None,
    spares: Annotated[int, option("On Ray, under torchrun: workers more than devices.", metavar="N")] = 0,
) -> Answer:
    """Train a recipe: a live display, and a folder with metrics, checkpoints, the strategy and the plan."""
    options = locals()  # each is a field of the record
    from piper.train.train_options import TrainOptions  # torch is paid for only where it is used

    asked = TrainOptions(**options)
    if on.startswith("rank:"):
        from piper.train.train_command import train_alone

        rank = train_alone(asked)
        return Answer(report=rank.report(), show=str(rank))
    return train_and_report(asked)


def train_and_report(asked: "TrainOptions") -> Answer:
    """Train a recipe, and say how the run ended and how to go on. Exit if a signal left nothing to report."""
    from piper.train.interrupt import PreemptedError
    from piper.train.measure import ending, stopping
    from piper.train.train_command import train_recipe

    try:
        outcome = train_recipe(asked, Console(soft_wrap=True, markup=False, highlight=False))
    except PreemptedError:
        interrupted("preempted; --resume goes on from the newest checkpoint, if any", PREEMPTED)
    except KeyboardInterrupt:
        interrupted("stopped before the step was done; --resume goes on from the newest checkpoint, if any")
    if outcome.stopped:
        given = "" if asked.strategy is None else f" --strategy {asked.strategy}"
        same = f"{asked.recipe} --on {asked.on}{given}"
        again = f"{called_as()} train {same} --steps {outcome.steps} --out {outcome.folder} --resume"
        return Answer(
            report=train_report(outcome),
            show=lambda: sys.stderr.write(stopping(outcome, again) + "\n"),
            code=PREEMPTED if outcome.preempted else INTERRUPTED,
        )
    return Answer(report=train_report(outcome), show=ending(outcome, called_as()) + "\n")


def train_report(outcome: "Outcome") -> dict[str, object]:
    """Return how a run ended, for scripts."""
    first, last = outcome.first, outcome.last
    stopped = ("preempted" if outcome.preempted else "interrupted") if outcome.stopped else None
    return {
        "run": str(outcome.folder),
        "metrics": None if last is None else str(outcome.folder / METRICS),
        "step": outcome.done,
        "steps": outcome.steps,
        "first_loss": None if first is None else first.loss,
        "last_loss": None if last is None else last.loss,
        "seconds": outcome.seconds,
        "saved": outcome.saved,
        "stopped": stopped,
    }


def interrupted(message: str, code: int = INTERRUPTED) -> NoReturn:
    """End because of Ctrl-C or another signal, with one message."""
    sys.stderr.write(message + "\n")
    sys.exit(code)


def called_as() -> str:
    """Return how the user calls Piper: by the path of its program where the shell would not find it."""
    program = Path(sys.argv[0])
    return str(program) if program.name == "piper" and which("piper") is None else "piper"
