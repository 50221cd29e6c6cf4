"""Strategies as JSON, in the published form: a list of objects, one per directive."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from piper.directives.base import STREAM, Directive
from piper.directives.order import order
from piper.directives.place import place
from piper.directives.remat import remat
from piper.directives.replicate import replicate
from piper.directives.shard import shard
from piper.directives.split import split
from piper.errors import ConfigError
from piper.ir.select import PASSES, At, Index, at

KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # op: what it needs, what it may have
    "place": (("filter", "devices"), ("stream",)),
    "replicate": (
        ("filter", "devices"),
        ("reduce_stream", "gather_stream", "bucket_size", "shard_optimizer", "shard_grads", "shard_params"),
    ),
    "shard": (("filter", "devices"), ("stream", "ways")),
    "split": (("filter", "num_microbatches"), ("dim_name",)),
    "order": (("filters",), ()),
    "remat": (("filter", "budget"), ("across",)),
}


def load_strategy(path: Path) -> list[Directive]:
    """Read a strategy from a JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the strategy cannot be read",
            by=str(path),
            facts={"why": str(error)},
            hint="give the path of a JSON file",
        ) from None
    return parse_strategy(text, source=path.name)


def parse_strategy(text: str, source: str = "strategy") -> list[Directive]:
    """Read a strategy from JSON text. Unknown keys are errors."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "this is not JSON",
            by=f"{source}:{error.lineno}",
            facts={"column": str(error.colno), "why": error.msg},
            hint='a strategy is a list of objects: [{"op": "place", "filter": {"PP": 0}, "devices": [0]}]',
        ) from None
    if not isinstance(entries, list):
        raise ConfigError(
            f"a strategy is a list, not {kind(entries)}",
            by=source,
            hint='put the directives in brackets: [{"op": "place", ...}]',
        )
    return [read_entry(entry, f"{source}[{number}]") for number, entry in enumerate(entries)]


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def read_entry(entry: object, where: str) -> Directive:
    """Read one directive."""
    if not isinstance(entry, dict):
        raise ConfigError(
            f"a directive is an object, not {kind(entry)}", by=where, hint='{"op": "place", ...}'
        )
    op = entry.get("op")
    if not isinstance(op, str) or op not in KEYS:
        close = get_close_matches(str(op), KEYS, n=1)
        raise ConfigError(
            f"there is no directive {op!r}" if "op" in entry else "it does not say which directive it is",
            by=where,
            facts={"known": ", ".join(KEYS)},
            hint=f"did you mean {close[0]!r}?" if close else 'give it an "op"',
        )
    needed, allowed = KEYS[op]
    for key in entry:
        if key != "op" and key not in (*needed, *allowed):
            close = get_close_matches(key, (*needed, *allowed), n=1)
            raise ConfigError(
                f"{op} has no key {key!r}",
                by=where,
                facts={"known": ", ".join((*needed, *allowed))},
                hint=f"did you mean {close[0]!r}?" if close else "leave it out",
            )
    for key in needed:
        if key not in entry:
            raise ConfigError(
                f"{op} needs the key {key!r}", by=where, facts={"has": ", ".join(entry)}, hint=f"add {key!r}"
            )
    return replace(READERS[op](entry, where), source=where)


def wrong(where: str, key: str, value: object, wanted: str) -> ConfigError:
    """The error for a value of the wrong kind."""
    return ConfigError(f"{key!r} is {json.dumps(value)}", by=where, hint=f"{key!r} is {wanted}")


def read_filter(value: object, where: str, key: str = "filter") -> At:
    """Read a filter: tags with an index, "*" for any, "-" for without; PASS by its letters."""
    if not isinstance(value, dict):
        raise wrong(where, key, value, 'an object such as {"PP": 0, "EP": "*", "PASS": "F"}')
    tags: dict[str, Index] = {}
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
        elif isinstance(index, int) and not isinstance(index, bool) and index >= 0:
            tags[tag] = index
        else:
            raise wrong(where, tag, index, 'a whole number from 0, "*" for any or "-" for without')
    return at(phase, **tags)


def read_devices(entry: Mapping[str, object], where: str) -> list[int]:
    """Read a list of devices; their values are checked where the directive is applied."""
    devices = entry["devices"]
    if not isinstance(devices, list) or not all(
        isinstance(d, int) and not isinstance(d, bool) for d in devices
    ):
        raise wrong(where, "devices", devices, "a list of whole numbers")
    return devices


def read_text(entry: Mapping[str, object], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and not (isinstance(value, str) and STREAM.fullmatch(value)):
        raise wrong(where, key, value, "a name in one word")
    return value


def read_whole(entry: Mapping[str, object], key: str, where: str) -> int | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise wrong(where, key, value, "a whole number")
    return value


def read_flag(entry: Mapping[str, object], key: str, where: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise wrong(where, key, value, "true or false")
    return value


def read_place(entry: Mapping[str, object], where: str) -> Directive:
    return place(
        read_filter(entry["filter"], where), read_devices(entry, where), read_text(entry, "stream", where)
    )


def read_replicate(entry: Mapping[str, object], where: str) -> Directive:
    bucket = entry.get("bucket_size")
    if bucket is not None and (not isinstance(bucket, int | float) or isinstance(bucket, bool)):
        raise wrong(where, "bucket_size", bucket, "a size in MB")
    levels = {"shard_optimizer": 1, "shard_grads": 2, "shard_params": 3}
    return replicate(
        read_filter(entry["filter"], where),
        read_devices(entry, where),
        zero=max((level for key, level in levels.items() if read_flag(entry, key, where)), default=0),
        bucket_mb=bucket,
        reduce_stream=read_text(entry, "reduce_stream", where),
        gather_stream=read_text(entry, "gather_stream", where),
    )


def read_shard(entry: Mapping[str, object], where: str) -> Directive:
    return shard(
        read_filter(entry["filter"], where),
        read_devices(entry, where),
        ways=read_whole(entry, "ways", where),
        stream=read_text(entry, "stream", where),
    )


def read_split(entry: Mapping[str, object], where: str) -> Directive:
    parts = read_whole(entry, "num_microbatches", where)
    if parts is None:
        raise wrong(where, "num_microbatches", None, "a whole number")
    return split(
        read_filter(entry["filter"], where), axis=read_text(entry, "dim_name", where) or "MB", parts=parts
    )


def read_order(entry: Mapping[str, object], where: str) -> Directive:
    filters = entry["filters"]
    if not isinstance(filters, list):
        raise wrong(where, "filters", filters, "a list of groups, each a filter or a list of filters")
    groups: list[Sequence[At]] = []
    for number, group in enumerate(filters):
        members = group if isinstance(group, list) else [group]
        groups.append([read_filter(member, where, f"filters[{number}]") for member in members])
    return order(groups)


def read_remat(entry: Mapping[str, object], where: str) -> Directive:
    budget = entry["budget"]
    if not isinstance(budget, int | float) or isinstance(budget, bool):
        raise wrong(where, "budget", budget, "a number from 0 to 1")
    return remat(read_filter(entry["filter"], where), budget, across=read_text(entry, "across", where))


READERS: Mapping[str, Callable[[Mapping[str, object], str], Directive]] = {
    "place": read_place,
    "replicate": read_replicate,
    "shard": read_shard,
    "split": read_split,
    "order": read_order,
    "remat": read_remat,
}
