"""The command line: a few verbs over `recipe.py:function`."""

import sys
import warnings
from typing import Annotated, NoReturn, TextIO

import typer
from rich.console import Console

from piper.cli.check import check
from piper.cli.diff import diff
from piper.cli.exit_codes import USER_ERROR
from piper.cli.export import export
from piper.cli.import_weights import import_weights
from piper.cli.init import init
from piper.cli.plan import plan
from piper.cli.profile import profile
from piper.cli.schedule import schedule
from piper.cli.simulate import simulate
from piper.cli.train import train
from piper.cli.tune import tune
from piper.cli.view import view
from piper.errors import PiperError
from piper.version import VERSION

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
app.command()(plan)
app.command()(check)
app.command()(train)


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
