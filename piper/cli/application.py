"""The command line: what verbs over `recipe.py:function` share, and the schema of what `--json` prints."""

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    NotRequired,
    ParamSpec,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import typer
from rich.console import Console

from piper.cli.reports import REPORTS, SCHEMA, FailureReport, Report
from piper.errors import PiperError
from piper.version import VERSION
from piper.workers.rank_environment import RANKS, rank_environment

P = ParamSpec("P")
SUCCESS = 0
NO = 1  # the answer of a check
USER_ERROR = 2
PREEMPTED = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130  # as a shell has it after Ctrl-C

Recipe = Annotated[str, typer.Argument(help="file.py:function, which returns a piper.Job", metavar="RECIPE")]
Device = Annotated[
    str | None, typer.Option(help="cpu, or an accelerator as cuda; else what there is.", metavar="KIND")
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
            answer.show()
            raise typer.Exit(answer.code)
        try:
            with printing_to_stderr():
                answer = verb(**options)
        except PiperError as error:
            failure: FailureReport = {
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


def print_json(verb: str, report: Report) -> None:
    """Print a report as one object on one line, after the version of its schema and the verb."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, "verb": verb, **report}) + "\n")


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


Schema = dict[str, object]
SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


def schema_text() -> str:
    """Return the schema as a file has it."""
    return json.dumps(json_schema(), indent=1) + "\n"


def json_schema() -> Schema:
    """Return the schema of one object, with a definition for each kind of report."""
    definitions: Schema = {}
    reports = [
        {"properties": {"verb": {"const": verb}}, **reference(kind, definitions)}
        for verb, kinds in REPORTS.items()
        for kind in kinds
    ]
    failure = {"properties": {"verb": {"enum": [*REPORTS]}}, **reference(FailureReport, definitions)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"What piper VERB --json prints, schema {SCHEMA}",
        "properties": {"schema": {"const": SCHEMA}},
        "required": ["schema", "verb"],
        "anyOf": [*reports, failure],
        "$defs": dict(sorted(definitions.items())),
    }


def reference(kind: type, definitions: Schema) -> Schema:
    """Return a reference to a record, whose definition is added."""
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a record may hold itself
        fields = get_type_hints(kind, include_extras=True)
        definitions[kind.__name__] = {
            "description": kind.__doc__,
            "type": "object",
            "properties": {name: schema_of(field, definitions) for name, field in fields.items()},
            "required": [name for name, field in fields.items() if get_origin(field) is not NotRequired],
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


def schema_of(kind: object, definitions: Schema) -> Schema:
    """Return the schema of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return schema_of(arguments[0], definitions)
    if origin is Annotated:
        return {**schema_of(arguments[0], definitions), "description": arguments[1]}
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(each, definitions) for each in arguments]}
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], definitions)}
    if isinstance(kind, type) and is_typeddict(kind):
        return reference(kind, definitions)
    return {"type": SIMPLE[kind]} if isinstance(kind, type) and kind in SIMPLE else {}  # object: anything


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
