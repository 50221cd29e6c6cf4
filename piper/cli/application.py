"""The command line: a few verbs over `recipe.py:function`."""

import json
import sys
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import which
from typing import Annotated, NoReturn, TextIO

import typer
from rich.console import Console

from piper.cli.diff import diff
from piper.cli.export import export
from piper.cli.import_weights import import_weights
from piper.cli.init import init
from piper.cli.options import AsJson, Compile, Device, Recipe, StrategyFile
from piper.cli.profile import profile
from piper.cli.schedule import schedule
from piper.cli.simulate import simulate
from piper.cli.tune import tune
from piper.cli.view import view
from piper.errors import PiperError
from piper.launchers.rank_zero import on_rank_zero
from piper.version import VERSION

SUCCESS, NO, USER_ERROR, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130  # 75: EX_TEMPFAIL, try again

app = typer.Typer(
    name="piper",
    help="Plan, check and run distributed training strategies for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(simulate)
app.command()(profile)
app.command()(diff)
app.command()(schedule)
app.command()(view)
app.command()(init)
app.command()(export)
app.command("import")(import_weights)
app.command()(tune)


def main() -> None:
    """Run the command line: 0 on success, 1 when the answer is no, 2 on a user error with one message."""
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            app()
        except PiperError as error:
            fail("\n".join([str(error), *getattr(error, "__notes__", ())]))  # notes: a worker's traceback


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line for the user, without the line of code that gave it."""
    Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(f"warning: {message}")


def fail(message: str) -> NoReturn:
    """End with one message for the user."""
    Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(f"error: {message}")
    sys.exit(USER_ERROR)


def interrupted(message: str, code: int = INTERRUPTED) -> NoReturn:
    """End because of Ctrl-C or another signal, with one message."""
    sys.stderr.write(message + "\n")
    sys.exit(code)


def called_as() -> str:
    """Return how the user calls Piper: by the path of its program where the shell would not find it."""
    program = Path(sys.argv[0])
    return str(program) if program.name == "piper" and which("piper") is None else "piper"


def show_version(asked: bool) -> None:
    """Print the version and end, where it is asked for."""
    if asked:
        sys.stdout.write(f"piper {VERSION}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Plan, check and run distributed training strategies for PyTorch."""


@app.command()
def plan(
    recipe: Recipe,
    device: Annotated[int | None, typer.Option(help="Print this device's instructions.")] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Say what the compiler decided against, and why.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Write the plans in their text form to this file.")
    ] = None,
    strategy: StrategyFile = None,
    compiled: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Compile a recipe, prove its plans and show them."""
    from piper.recipe import load_recipe

    job = load_recipe(recipe, strategy)
    from piper.cli.plan_report import plan_report, print_plan, write_text
    from piper.compiler import compile  # torch is paid for only where it is used

    program = compile(job, compile=compiled)
    if text is not None:
        write_text(program, text)
    if as_json:
        sys.stdout.write(json.dumps(plan_report(program)) + "\n")
        return
    print_plan(program, Console(highlight=False, soft_wrap=True), device=device, why=why)


@app.command()
@on_rank_zero
def check(
    recipe: Recipe,
    on: Annotated[
        str, typer.Option(help="The launcher: inline (threads), local (processes), ...")
    ] = "inline",
    strategy: StrategyFile = None,
    device: Device = None,
    compiled: Compile = False,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    tol: Annotated[float, typer.Option(help="The largest relative difference that passes.")] = 1e-9,
    as_json: AsJson = False,
) -> None:
    """Compare a recipe, in fp64, with plain PyTorch on one device: losses, gradients and parameters."""
    from piper.cli.plan_report import check_report, check_text
    from piper.compiler import compile
    from piper.data.taking import batches_of
    from piper.launchers.launch import check_launcher, launcher
    from piper.recipe import load_recipe
    from piper.runtime.debug.check import check as compare

    check_launcher(on, "piper check")
    job = replace(load_recipe(recipe, strategy), precision="fp64")
    program = compile(job, device=device, compile=compiled)
    batches = list(islice(batches_of(job.data), steps))
    report = compare(program, lambda started, options: launcher(started, on, options), batches, tol)
    if as_json:
        sys.stdout.write(json.dumps(check_report(report)) + "\n")
    else:
        sys.stdout.write(check_text(report, f"{len(batches)} steps on {on}"))
    sys.exit(SUCCESS if report.ok else NO)


@app.command()
@on_rank_zero
def train(
    recipe: Recipe,
    on: Annotated[
        str,
        typer.Option(
            help="The launcher: inline (threads), local (processes), ... or rank:N, device N alone."
        ),
    ] = "local",
    strategy: StrategyFile = None,
    device: Device = None,
    compiled: Compile = False,
    cluster: Annotated[
        str | None,
        typer.Option(help="The network whose times rank:N keeps: a name or a file.", metavar="NAME|FILE"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps; else as the recipe says.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; else runs/recipe-function, numbered.", metavar="DIR"),
    ] = None,
    detect_nan: Annotated[
        bool, typer.Option("--detect-nan", help="Keep every result, to name the first that is no number.")
    ] = False,
    profile: Annotated[int, typer.Option(help="Time every instruction of this many steps.", metavar="K")] = 0,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="On CUDA, issue each step as one graph, after the first few.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds from SIGTERM to the end, in which the run is saved.", metavar="S")
    ] = 30.0,
    retries: Annotated[
        int,
        typer.Option(help="Failures in a row from which the run recovers; 100 good steps refill them."),
    ] = 3,
    stall: Annotated[
        float | None,
        typer.Option(help="Seconds without progress that are a failure; else by the steps.", metavar="S"),
    ] = None,
    spares: Annotated[
        int,
        typer.Option(help="On Ray, under torchrun: workers more than devices.", metavar="N"),
    ] = 0,
    replace_stragglers: Annotated[
        bool, typer.Option("--replace-stragglers", help="Replace the worker of a straggler, once a device.")
    ] = False,
) -> None:
    """Train a recipe: a live display, and a folder with metrics, checkpoints, the strategy and the plan."""
    if on.startswith("rank:"):
        from piper.train.one_device import SingleRankOptions, train_alone

        wanted = SingleRankOptions(
            recipe=recipe,
            on=on,
            strategy=strategy,
            steps=steps,
            device=device,
            cluster=cluster,
            compile=compiled,
            graphs=graphs,
        )
        sys.stdout.write(train_alone(wanted))
        return
    from piper.train.ending import ending, stopping
    from piper.train.interrupt import PreemptedError
    from piper.train.session import train_recipe
    from piper.train.train_options import TrainOptions

    asked = TrainOptions(
        recipe=recipe,
        on=on,
        strategy=strategy,
        steps=steps,
        resume=resume,
        out=out,
        detect_nan=detect_nan,
        profile=profile,
        device=device,
        compile=compiled,
        graphs=graphs,
        grace=grace,
        retries=retries,
        stall=stall,
        spares=spares,
        replace_stragglers=replace_stragglers,
    )
    console = Console(soft_wrap=True, markup=False, highlight=False)
    try:
        outcome = train_recipe(asked, console)
    except PreemptedError:
        interrupted("preempted; --resume goes on from the newest checkpoint, if any", PREEMPTED)
    except KeyboardInterrupt:
        interrupted("stopped before the step was done; --resume goes on from the newest checkpoint, if any")
    if outcome.stopped:
        same = f"{recipe} --on {on}" + (f" --strategy {strategy}" if strategy is not None else "")
        again = f"{called_as()} train {same} --steps {outcome.steps} --out {outcome.folder} --resume"
        interrupted(stopping(outcome, again), PREEMPTED if outcome.preempted else INTERRUPTED)
    sys.stdout.write(ending(outcome, called_as()) + "\n")
