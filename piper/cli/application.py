"""The command line: a few verbs over `recipe.py:function`."""

import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, NoReturn, TextIO

import typer
from rich.console import Console

from piper.cli.answer import with_json
from piper.cli.json_schema import schema_text
from piper.cli.options import USER_ERROR
from piper.cli.reports import REPORTS
from piper.errors import PiperError
from piper.version import VERSION


def app_with(verbs: Iterable[str] = REPORTS) -> typer.Typer:
    """Return the command line with some verbs, whose modules are imported here."""
    app = typer.Typer(
        name="piper",
        help="Plan, check and run distributed training strategies for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(root)
    for verb in verbs:
        module, function = ("export", "import_weights") if verb == "import" else (verb, verb)
        app.command(verb)(with_json(verb, getattr(import_module(f"piper.cli.{module}"), function)))
    return app


def main() -> None:
    """Run the command line: 0 on success, 1 when the answer is no, 2 on a user error with one message."""
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            asked = [verb for verb in sys.argv[1:2] if verb in REPORTS]
            # A verb is imported alone: importing all takes as long as `import piper`.
            app_with(asked or REPORTS)()
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


def show_schema(asked: bool) -> None:
    """Print the schema of what `--json` prints and end, where it is asked for."""
    if asked:
        sys.stdout.write(schema_text())
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            help="Print the JSON schema of what --json prints.",
            callback=show_schema,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Plan, check and run distributed training strategies for PyTorch."""
