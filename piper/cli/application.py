"""The command line: what verbs over `recipe.py:function` share."""

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console

from piper.errors import PiperError
from piper.version import VERSION
from piper.workers.rank_environment import RANKS, rank_environment

VERBS = (
    *("plan", "check", "simulate", "train", "tune", "profile", "diff", "selftest", "schedule", "view"),
    *("init", "export", "import"),
)
SCHEMA = 1  # of schema.json: raised when a field of a report goes, or means something else. New ones may come
P = ParamSpec("P")
SUCCESS = 0
NO = 1  # the answer of a check
USER_ERROR = 2
PREEMPTED = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130  # as a shell has it after Ctrl-C


def option(help: str, *names: str, metavar: str | None = None, **more: Any) -> Any:  # noqa: ANN401
    """Return an option of a verb: what it does, in words, and its names if they are not the parameter's."""
    return typer.Option(*names, help=help, metavar=metavar, **more)


Recipe = Annotated[str, typer.Argument(help="file.py:function, which returns a piper.Job", metavar="RECIPE")]
Device = Annotated[str | None, option("cpu, or an accelerator as cuda; else what there is.", metavar="KIND")]
Compile = Annotated[
    bool, option("Run chunks as Inductor compiles them; kept in ~/.cache/piper.", "--compile")
]
CostsFile = Annotated[
    Path | None, option("Measured costs, from `piper profile --calibrate`.", "--costs", metavar="FILE")
]
ClusterName = Annotated[
    str | None,
    option(
        "a100, h100, h200, b200, cpu, or a TOML file; with --costs, only its links.",
        "--cluster",
        metavar="NAME|FILE",
    ),
]
StrategyFile = Annotated[
    Path | None, option("A JSON strategy in place of the recipe's own.", "--strategy", metavar="FILE")
]
RunFolder = Annotated[
    Path | None, option("The run's folder; else runs/recipe-function, numbered.", "--out", metavar="DIR")
]


AsJson = Annotated[bool, option("Print one JSON object and nothing else.", "--json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a verb found: a report for scripts, and for people a text, or what prints one."""

    report: Mapping[str, object]  # as schema.json says
    show: str | Callable[[], object]
    code: int = SUCCESS


def on_rank_zero(verb: Callable[P, Answer]) -> Callable[P, Answer]:
    """Run a verb of the command line on rank 0 only under torchrun, with agents in the other ranks."""

    @wraps(verb)
    def act(*args: P.args, **kwargs: P.kwargs) -> Answer:
        world = rank_environment() if kwargs["on"] in RANKS else None
        if world is None:
            return verb(*args, **kwargs)
        if world.leads:
            from piper.workers.rendezvous import leading  # torch is paid for only where it is used

            with leading(world):
                return verb(*args, **kwargs)
        from piper.workers.rank_agent import attend

        sys.exit(attend(world))

    return act


def with_json(name: str, verb: Callable[..., Answer]) -> Callable[..., None]:
    """Return a verb as a command with the option `--json`, which prints the verb's answer and ends."""

    @wraps(verb)
    def command(*, as_json: bool = False, **options: object) -> None:
        if not as_json:
            answer = verb(**options)
            if isinstance(answer.show, str):
                sys.stdout.write(answer.show)
            else:
                answer.show()
            raise typer.Exit(answer.code)
        try:
            with printing_to_stderr():
                answer = verb(**options)
        except PiperError as error:
            failure = {
                "error": {
                    "kind": type(error).__name__,
                    "message": str(error),
                    "what": error.what,
                    "by": error.by,
                    "facts": error.facts,
                    "hint": error.hint,
                }
            }
            print_json(name, failure)
            raise
        print_json(name, answer.report)
        raise typer.Exit(answer.code)

    signature = inspect.signature(verb)
    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    parameters = [*signature.parameters.values(), option]
    vars(command)["__signature__"] = signature.replace(parameters=parameters, return_annotation=None)
    command.__annotations__ = {**verb.__annotations__, "as_json": AsJson, "return": None}
    return command


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Let all that is printed meanwhile go to stderr, what processes print that are started here too."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_json(verb: str, report: Mapping[str, object]) -> None:
    """Print a report as one object on one line, after the version of its schema and the verb."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, "verb": verb, **report}) + "\n")


def app_with(verbs: Iterable[str] = VERBS) -> typer.Typer:
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
            asked = [verb for verb in sys.argv[1:2] if verb in VERBS]
            # A verb is imported alone: importing all takes as long as `import piper`.
            app_with(asked or VERBS)()
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


def schema_text() -> str:
    """Return the schema of what `--json` prints. The file is its source: tests hold every verb to it."""
    return (files("piper.cli") / "schema.json").read_text(encoding="utf-8")


VERSIONED = printing(lambda: f"piper {VERSION}\n")
SCHEMA_HELP = "Print the JSON schema of what --json prints."


def root(
    version: Annotated[
        bool, option("Print the version.", "--version", callback=VERSIONED, is_eager=True)
    ] = False,
    schema: Annotated[
        bool, option(SCHEMA_HELP, "--schema", callback=printing(schema_text), is_eager=True)
    ] = False,
) -> None:
    """Plan, check and run distributed training strategies for PyTorch."""
