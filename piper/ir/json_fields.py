"""Dataclasses as JSON and back, by their fields and the types of these."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

T = TypeVar("T")


def key_of(field: "Field[Any]") -> str:
    """Return the key of a field in JSON: its name, unless its metadata has another key."""
    return str(field.metadata.get("key", field.name))


def to_json(value: object) -> Any:  # noqa: ANN401  what json.dumps takes
    """Return a value in the form that JSON can hold: a dataclass as an object with a key for each field."""
    if is_dataclass(value):
        return {key_of(field): to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(one) for key, one in value.items()}
    return [to_json(one) for one in value] if isinstance(value, tuple | list) else value


def from_json(kind: type[T], data: object) -> T:
    """Return the value of a type that JSON data holds. Keys that are not of a field are ignored.

    A dataclass is an object, or a list of its first fields in order. Data of another form raises one of the
    errors that `piper.errors.CONTENT` lists, a KeyError where a field without a default is missing.
    """
    return cast(T, reader_of(cast(Hashable, kind))(data))


@cache
def reader_of(kind: object) -> Callable[[Any], object]:
    """Return the function that makes a value of a type of JSON data."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return record_reader(kind)
    if origin is tuple and inner[-1] is ...:
        each = reader_of(inner[0])
        return lambda data: tuple([each(one) for one in data])
    if origin is tuple:
        readers = [reader_of(one) for one in inner]
        return lambda data: tuple([read(one) for read, one in zip(readers, data, strict=True)])
    if origin is Mapping:
        each = reader_of(inner[1])
        return lambda data: {key: each(one) for key, one in data.items()}
    if origin is UnionType and len(inner) == 2 and inner[1] is NoneType:
        each = reader_of(inner[0])
        return lambda data: None if data is None else each(data)
    return cast("type[object]", kind) if kind in (int, float, str) else lambda data: data


def record_reader(kind: type) -> Callable[[Any], object]:
    """Return the function that makes a dataclass of an object, or of a list of its first fields."""
    known = [(key_of(field), field.name, reader_of(cast(Hashable, field.type))) for field in fields(kind)]
    needed = {key_of(field) for field in fields(kind) if field.default is field.default_factory is MISSING}

    def read(data: Any) -> object:  # noqa: ANN401  what json.loads returns
        if isinstance(data, list):
            return kind(**{name: each(one) for (_, name, each), one in zip(known, data, strict=False)})
        if not isinstance(data, dict):
            raise TypeError(f"{kind.__name__} is an object, not {data!r}")
        return kind(**{name: each(data[key]) for key, name, each in known if key in data or key in needed})

    return read
