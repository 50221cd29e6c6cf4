"""Lines of named fields: the shape that the text forms of graphs and plans share.

A line is `kind  name  key=value  key=value`, two blanks between fields. A name may hold any character: those
that would end it, a field or a line are written as `%7C`, the way addresses on the web do.
"""

import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TypeVar

from piper.errors import ConfigError

GAP = "  "  # between fields
AND = " | "  # between the members of a list
CLASHES = re.compile(r"%(?=[0-9A-F]{2})|[|\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|^ | $| (?= )")
ESCAPED = re.compile("(?:%[0-9A-F]{2})+")
FIELD = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)
Reader = Callable[[str], object]
Readers = Mapping[str, Reader]
Pairs = tuple[tuple[str, int], ...]
T = TypeVar("T")


class BadLineError(Exception):
    """A line that is not of the text form; `each_line` says which."""


def quote(name: str) -> str:
    """Write a name so that it holds no end of a name, a field or a line."""
    return CLASHES.sub(lambda found: urllib.parse.quote(found[0], safe="", errors="surrogatepass"), name)


def unquote(text: str) -> str:
    """Read a name that `quote` wrote."""
    return ESCAPED.sub(lambda found: urllib.parse.unquote(found[0], errors="surrogatepass"), text)


def join(members: Iterable[str]) -> str:
    """Write a list of names."""
    return AND.join(map(quote, members))


def names(text: str) -> tuple[str, ...]:
    """Read a list of names."""
    return tuple(map(unquote, text.split(AND))) if text else ()


def numbers(text: str) -> tuple[int, ...]:
    """Read a list of whole numbers."""
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
    """The fields of a line, each read by its reader."""
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


def build(record: Callable[..., T], /, **values: object) -> T:
    """Make a record of a line's fields; one that is missing is the line's fault."""
    try:
        return record(**values)
    except TypeError:
        needed = {f.name for f in fields(record)} - set(values)  # type: ignore[arg-type]
        raise BadLineError(f"it lacks one of {', '.join(sorted(needed))}") from None


def each_line(text: str, take: Callable[[str, str, list[str]], None], *, source: str, hint: str) -> None:
    """Hand each line to `take` as its kind, its name and its fields; what it refuses is the user's error."""
    for number, line in enumerate(text.splitlines(), 1):
        kind, *rest = line.split(GAP)
        try:
            take(kind, unquote(rest[0]) if rest else "", rest[1:])
        except (BadLineError, ValueError) as error:
            raise ConfigError(
                "this line cannot be read",
                by=f"{source}:{number}",
                facts={"line": line[:120], "why": str(error)},
                hint=hint,
            ) from None


def line(kind: str, name: str, shown: Iterator[str] | Iterable[str]) -> str:
    """Write a line."""
    return GAP.join([kind, quote(name), *shown])
