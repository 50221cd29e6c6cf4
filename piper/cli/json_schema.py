"""The JSON schema of what `--json` prints, made from the types of the reports."""

import json
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

from piper.cli.reports import REPORTS, SCHEMA, FailureReport

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
