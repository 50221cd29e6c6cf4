"""The command line: a few verbs over `recipe.py:function`."""

import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated

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
        warnings.showwarning = lambda message, *_, **__: tell(f"warning: {message}")
        try:
            asked = [verb for verb in sys.argv[1:2] if verb in REPORTS]
            # A verb is imported alone: importing all takes as long as `import piper`.
            app_with(asked or REPORTS)()
        except PiperError as error:
            notes = getattr(error, "__notes__", ())  # a worker's traceback
            tell("\n".join([f"error: {error}", *notes]))
            sys.exit(USER_ERROR)


def tell(message: str) -> None:
    """Print a message for the user on stderr, without the line of code that gave it."""
    Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(message)


def printing(text: Callable[[], str]) -> Callable[[bool], None]:
    """Return what an option does that prints a text and ends, where it is asked for."""

    def act(asked: bool) -> None:
        if asked:
            sys.stdout.write(text())
            raise typer.Exit

    return act


VERSIONED = printing(lambda: f"piper {VERSION}\n")
SCHEMA_HELP = "Print the JSON schema of what --json prints."


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=VERSIONED, is_eager=True)
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help=SCHEMA_HELP, callback=printing(schema_text), is_eager=True)
    ] = False,
) -> None:
    """Plan, check and run distributed training strategies for PyTorch."""
