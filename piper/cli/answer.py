"""What verbs share: options, exit codes, and the one place where an answer is printed, as text or as JSON."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.reports import SCHEMA, FailureReport, Report
from piper.errors import PiperError

SUCCESS = 0
NO = 1  # the answer of a check
USER_ERROR = 2
PREEMPTED = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130  # as a shell has it after Ctrl-C

Recipe = Annotated[str, typer.Argument(help="file.py:function, which returns a piper.Job", metavar="RECIPE")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; else CUDA where there is any.", metavar="cpu|cuda")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Run chunks as Inductor compiles them; kept in ~/.cache/piper.")
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Measured costs, from `piper profile --calibrate`.", metavar="FILE"),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="a100, h100, h200, b200, cpu, or a TOML file; with --costs, only its links.",
        metavar="NAME|FILE",
    ),
]
StrategyFile = Annotated[
    Path | None,
    typer.Option("--strategy", help="A JSON strategy in place of the recipe's own.", metavar="FILE"),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--out", help="The run's folder; else runs/recipe-function, numbered.", metavar="DIR"),
]


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a verb found: a report for scripts, and how it is shown to people."""

    report: Report
    show: Callable[[], object]
    code: int = SUCCESS


def with_json(name: str, verb: Callable[..., Answer]) -> Callable[..., None]:
    """Return a verb as a command with the option `--json`, which prints the verb's answer and ends."""

    @wraps(verb)
    def command(*, as_json: bool = False, **options: object) -> None:
        if not as_json:
            answer = verb(**options)
            answer.show()
            raise typer.Exit(answer.code)
        try:
            with printing_to_stderr():
                answer = verb(**options)
        except PiperError as error:
            print_json(name, failure(error))
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


def print_json(verb: str, report: Report) -> None:
    """Print a report as one object on one line, after the version of its schema and the verb."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, "verb": verb, **report}) + "\n")


def failure(error: PiperError) -> FailureReport:
    """Return an error as a report."""
    return {
        "error": {
            "kind": type(error).__name__,
            "message": str(error),
            "what": error.what,
            "by": error.by,
            "facts": error.facts,
            "hint": error.hint,
        }
    }
