"""Strategies as JSON, in the published form: a list of objects, one per directive."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast

from piper.directives.base import STREAM, Directive, form_of, known_directives
from piper.directives.by_length import ByLength, by_length
from piper.errors import ConfigError, file_errors
from piper.ir.numbers import is_number, is_whole
from piper.ir.select import PASSES, Asked, At, Index, at

Read = Callable[[object, str, str, str], object]  # of a value: where it is, its key and what it must be


def load_strategy(path: Path) -> Sequence[Directive]:
    """Read a strategy from a JSON file, or one for each of several lengths."""
    with file_errors("the strategy cannot be read", path, "give the path of a JSON file"):
        text = path.read_text(encoding="utf-8")
    return parse_strategy(text, source=path.name)


def parse_strategy(text: str, source: str = "strategy") -> Sequence[Directive]:
    """Read a strategy from JSON text: a list, or an object of lists by length. Unknown keys are errors."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "this is not JSON",
            by=f"{source}:{error.lineno}",
            facts={"column": str(error.colno), "why": error.msg},
            hint='a strategy is a list of objects: [{"op": "place", "filter": {"PP": 0}, "devices": [0]}]',
        ) from None
    if isinstance(entries, dict) and entries and all(LENGTH.fullmatch(length) for length in entries):
        several = {int(n): read_entries(each, f"{source}[{n!r}]") for n, each in entries.items()}
        return by_length(several)
    return read_entries(entries, source)


def read_entries(entries: object, source: str) -> list[Directive]:
    """Read the directives of one strategy."""
    if not isinstance(entries, list):
        raise ConfigError(
            f"a strategy is a list, not {kind(entries)}",
            by=source,
            hint='put the directives in brackets: [{"op": "place", ...}]; '
            'or give a list for each length: {"4096": [...], "65536": [...]}',
        )
    return [read_entry(entry, f"{source}[{number}]") for number, entry in enumerate(entries)]


def show_strategy(strategy: Sequence[Directive]) -> str:
    """Write a strategy as JSON text that `parse_strategy` reads back: one directive on each line."""
    if isinstance(strategy, ByLength):
        several = (f'"{limit}": {show_strategy(each).strip()}' for limit, each in strategy.strategies.items())
        return "{" + ",\n".join(several) + "}\n"
    lines = (json.dumps(write_entry(directive)) for directive in strategy)
    return "[\n " + ",\n ".join(lines) + "\n]\n"


def write_entry(directive: Directive) -> dict[str, object]:
    """Return the JSON form of one directive, without fields that have their default value."""
    entry: dict[str, object] = {"op": directive.verb}
    defaults = {field.name: field.default for field in fields(directive)}
    for key, spelling in keys_of(type(directive)).items():
        value = getattr(directive, spelling.field)
        if spelling.level:
            if value == spelling.level:
                entry[key] = True
        elif spelling.needed or value != defaults[spelling.field]:
            entry[key] = write_value(value)
    assert read_entry(entry, "strategy") == directive, f"{directive} has no JSON form"
    return entry


def write_value(value: object) -> object:
    """Return the JSON form of one field of a directive."""
    match value:
        case At():
            tags = {tag: write_index(index) for tag, index in value.tags}
            return {**tags, "PASS": value.phase} if value.phase else tags
        case tuple() if value and all(isinstance(one, tuple) and isinstance(one[0], At) for one in value):
            return [[write_value(member) for member in group] for group in value]
        case tuple() if value and all(isinstance(one, tuple) for one in value):
            return dict(value)
        case tuple():
            return list(value)
    return value


def write_index(index: Index) -> object:
    """Return the JSON form of what a filter asks of a tag; neighbouring indices are a range."""
    if index is None:
        return "-"
    if not isinstance(index, tuple):
        return index
    whole = range(index[0], index[-1] + 1)
    return {"from": whole.start, "to": whole.stop} if index == (*whole,) else list(index)


def kind(value: object) -> str:
    """Return the kind of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def read_entry(entry: object, where: str) -> Directive:
    if not isinstance(entry, dict):
        raise ConfigError(
            f"a directive is an object, not {kind(entry)}", by=where, hint='{"op": "place", ...}'
        )
    op, kinds = entry.get("op"), known_directives()
    if not isinstance(op, str) or op not in kinds:
        close = get_close_matches(str(op), kinds, n=1)
        raise ConfigError(
            f"there is no directive {op!r}" if "op" in entry else "it does not say which directive it is",
            by=where,
            facts={"known": ", ".join(kinds)},
            hint=f"did you mean {close[0]!r}?" if close else 'give it an "op"',
        )
    form = form_of(op, entry)
    keys = keys_of(form)
    for key in entry:
        if key != "op" and key not in keys:
            close = get_close_matches(key, keys, n=1)
            raise ConfigError(
                f"{op} has no key {key!r}",
                by=where,
                facts={"known": ", ".join(keys)},
                hint=f"did you mean {close[0]!r}?" if close else "leave it out",
            )
    for key, spelling in keys.items():
        if spelling.needed and key not in entry:
            raise ConfigError(
                f"{op} needs the key {key!r}", by=where, facts={"has": ", ".join(entry)}, hint=f"add {key!r}"
            )
    values: dict[str, object] = {}
    for key, spelling in keys.items():
        if key in entry and not (entry[key] is None and not spelling.needed):
            value = spelling.read(entry[key], where, key, spelling.wanted)
            if spelling.level:
                value = max(spelling.level if value else 0, cast(int, values.get(spelling.field, 0)))
            values[spelling.field] = value
    return form(**values, source=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """The key and the type of a directive's field in JSON."""

    field: str
    read: Read
    wanted: str  # what the value must be, in words
    needed: bool
    level: int = 0  # of a flag: the least value of the field where the flag is true


def keys_of(kind: type[Directive]) -> dict[str, Spelling]:
    """Return the keys of a directive's JSON form, those that it needs first: its fields, by name and type."""
    spellings: dict[str, Spelling] = {}
    for field in fields(kind):
        if field.name == "source":
            continue
        read, key, wanted = FORMS[field.type]
        needed = field.metadata.get("needed", field.default is MISSING)
        key = field.metadata.get("key", key or field.name)
        domain = field.metadata.get("domain")
        wanted = wanted if domain is None else domain.words
        flags: Mapping[str, int] | None = field.metadata.get("flags")
        if flags:
            read, wanted, needed = read_flag, "true or false", False
        for name, level in (flags or {key: 0}).items():
            spellings[name] = Spelling(field=field.name, read=read, wanted=wanted, needed=needed, level=level)
    return dict(sorted(spellings.items(), key=lambda entry: not entry[1].needed))


def wrong(where: str, key: str, value: object, wanted: str) -> ConfigError:
    """Return the error for a value of the wrong kind."""
    return ConfigError(f"{key!r} is {json.dumps(value)}", by=where, hint=f"{key!r} is {wanted}")


def read_filter(value: object, where: str, key: str, wanted: str) -> At:
    """Read a filter: tags with an index or several, "*" for any, "-" for without; PASS by its letters."""
    if not isinstance(value, dict):
        raise wrong(where, key, value, wanted)
    tags: dict[str, Asked] = {}
    phase: str | None = None
    for tag, index in value.items():
        if tag == "PASS":
            if index not in PASSES:
                raise wrong(where, "PASS", index, "one of " + ", ".join(PASSES))
            phase = index
        elif index == "-":
            tags[tag] = None
        elif index == "*":
            tags[tag] = "*"
        elif is_index(index) or (isinstance(index, list) and index and all(map(is_index, index))):
            tags[tag] = index
        elif (several := read_range(index)) is not None:
            tags[tag] = several
        else:
            raise wrong(where, tag, index, INDICES)
    return at(phase, **tags)


def read_range(value: object) -> range | None:
    """Read {"from": 0, "to": 4}, the indices 0 to 3. None: it is no range, or an empty one."""
    if not isinstance(value, dict) or set(value) != {"from", "to"} or not all(map(is_index, value.values())):
        return None
    return range(value["from"], value["to"]) or None


def read_groups(value: object, where: str, key: str, wanted: str) -> tuple[tuple[At, ...], ...]:
    """Read groups of filters; one that is alone may stand without its list."""
    if not isinstance(value, list):
        raise wrong(where, key, value, wanted)
    groups = [group if isinstance(group, list) else [group] for group in value]
    return tuple(
        tuple(read_filter(member, where, f"{key}[{number}]", FILTER) for member in group)
        for number, group in enumerate(groups)
    )


def checked(test: Callable[[Any], bool], change: Callable[[Any], object] = lambda value: value) -> Read:
    """Return a reader that refuses a value without a property. change: makes the field of the value."""

    def read(value: object, where: str, key: str, wanted: str) -> object:
        if not test(value):
            raise wrong(where, key, value, wanted)
        return change(value)

    return read


is_index = partial(is_whole, least=0)
LENGTH = re.compile(r"[1-9][0-9]*")  # of the batches that a strategy is for
read_flag = checked(lambda value: isinstance(value, bool))
read_word = checked(lambda value: isinstance(value, str) and STREAM.fullmatch(value) is not None)
read_whole, read_number = checked(is_whole), checked(is_number)
read_devices = checked(lambda value: isinstance(value, list) and all(map(is_whole, value)), tuple)
read_dims = checked(
    lambda value: isinstance(value, dict) and all(map(is_index, value.values())),
    lambda value: tuple(value.items()),
)
read_settings = checked(
    lambda value: (
        isinstance(value, dict) and all(isinstance(one, bool | int | float) for one in value.values())
    ),
    lambda value: tuple(value.items()),
)
INDICES = (
    'a whole number from 0, several as [0, 2] or {"from": 0, "to": 4} (without 4), "*" for any '
    'or "-" for without'
)
FILTER = 'an object such as {"PP": 0, "EP": "*", "PASS": "F"}'
WORD, WHOLE = "a name in one word", "a whole number"
FORMS: Mapping[object, tuple[Read, str, str]] = {  # by a field's type: its reader, its key, what it must be
    At: (read_filter, "filter", FILTER),
    tuple[tuple[At, ...], ...]: (
        read_groups, "filters", "a list of groups, each a filter or a list of filters"
    ),
    tuple[tuple[str, int], ...]: (read_dims, "", "an object of names, each with a dimension from 0"),
    Mapping[str, float] | None: (read_settings, "", "an object of settings, each a number, true or false"),
    Sequence[int]: (read_devices, "", "a list of whole numbers"),
    str: (read_word, "", WORD),
    str | None: (read_word, "", WORD),
    int: (read_whole, "", WHOLE),
    int | None: (read_whole, "", WHOLE),
    float: (read_number, "", "a number"),
    float | None: (read_number, "", "a number"),
}  # fmt: skip
