"""The command line: a few verbs over `recipe.py:function`, and the schema of what `--json` prints."""

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from types import NoneType, UnionType
from typing import (
    Annotated,
    NotRequired,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import typer
from rich.console import Console

from piper.cli.answer import USER_ERROR, with_json
from piper.cli.reports import REPORTS, SCHEMA, FailureReport
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


Schema: TypeAlias = dict[str, object]
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
