"""Lines of named fields: the shape of text forms, such as that of plans.

A line is `kind  name  key=value  key=value`, two blanks between fields. A name that would break its line is
written as a JSON string.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

GAP = "  "  # between fields
AND = " | "  # between the members of a list
FIELD = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)
Reader = Callable[[str], object]
Readers = Mapping[str, Reader]
Pairs = tuple[tuple[str, int], ...]
T = TypeVar("T")


class BadLineError(Exception):
    """A line that is not of the text form."""


def quoted(name: str) -> str:
    """Return a name quoted, so that it ends neither a field nor a member of a list."""
    return json.dumps(name).replace("|", "\\u007c").replace("  ", " \\u0020")


def shown(name: str) -> str:
    """Return a name as it is where it is unambiguous, and quoted where it is not."""
    tame = name.isprintable() and name == " ".join(name.split()) and name[:1] not in ("", '"')
    return name if tame and AND not in name else quoted(name)


def name(text: str) -> str:
    """Read a name that `quoted` or `shown` wrote."""
    return str(json.loads(text)) if text[:1] == '"' else text


def names(text: str) -> tuple[str, ...]:
    return tuple(map(name, text.split(AND))) if text else ()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


def flag(text: str) -> bool:
    """Read a yes or no."""
    if text not in ("0", "1"):
        raise ValueError("it is 0 or 1")
    return text == "1"


def show_pairs(pairs: Pairs) -> str:
    """Write names with their numbers: `MB=0 PP=2`."""
    return " ".join(f"{name}={number}" for name, number in pairs)


def pairs(text: str) -> Pairs:
    """Read names with their numbers."""
    return tuple((name, int(number)) for name, _, number in (word.partition("=") for word in text.split()))


def read_fields(words: Iterable[str], readers: Readers) -> dict[str, object]:
    """Read the fields of a line, each by its reader, and return them by name."""
    found: dict[str, object] = {}
    for word in words:
        match = FIELD.fullmatch(word)
        if match is None or match[1] not in readers or match[1] in found:
            raise BadLineError(f"{word!r} is not one of {', '.join(readers)}")
        try:
            found[match[1]] = readers[match[1]](match[2])
        except ValueError as error:
            raise BadLineError(f"{word!r} cannot be read: {error}") from None
    return found


def build(record: type[T], /, **values: object) -> T:
    """Make a record from a line's fields. Raise `BadLineError` if one is missing."""
    try:
        return record(**values)
    except TypeError:
        needed = {f.name for f in fields(cast(Any, record)) if f.default is f.default_factory is MISSING}
        if lacks := needed - values.keys():
            raise BadLineError(f"it lacks {', '.join(sorted(lacks))}") from None
        raise


def line(kind: str, name: str, fields: Iterable[str]) -> str:
    """Return the text of a line. `name` is as `shown` returns it."""
    return GAP.join([kind, name, *fields])
