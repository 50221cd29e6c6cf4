"""The base of all directives: their arguments, their source line, and checks on what they select."""

import difflib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from piper.errors import ScheduleError
from piper.ir.devices import Devices, interned
from piper.ir.graph import Graph
from piper.ir.node import Compute
from piper.ir.numbers import is_number, is_whole
from piper.ir.select import At, show_index

Given = Callable[[str, object], object]  # of the name and the value of an argument


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that an argument may have, in words and as a test."""

    words: str
    has: Callable[[object], bool]


def one_of(*values: object) -> Domain:
    """Return a domain of a few values."""
    *others, last = (f'"{value}"' if isinstance(value, str) else str(value) for value in values)
    return Domain(
        words=f"{', '.join(others)} or {last}" if others else last,
        has=lambda given: any(type(given) is type(value) and given == value for value in values),
    )


def whole(least: int) -> Domain:
    """Return the whole numbers from `least`."""
    return Domain(f"a whole number from {least}", lambda given: is_whole(given, least))


FRACTION = Domain("a number from 0 to 1", lambda given: is_number(given) and 0 <= given <= 1)
SIZE = Domain("a size in MiB from 0", lambda given: is_number(given) and 0 <= given < float("inf"))
POSITIVE_SIZE = Domain("a size in MiB above 0", lambda given: is_number(given) and given > 0)


def argument(
    domain: Domain | None = None,
    *,
    default: object = MISSING,
    hint: str = "",
    key: str = "",
    flags: Mapping[str, int] | None = None,
    needed: bool = False,
    given: Given | None = None,
) -> Any:  # noqa: ANN401  as `dataclasses.field` does
    """Return a dataclass field that is an argument of a directive. A default of None may stay None.

    hint: what the values of the domain mean. key: its name in JSON, if that is another. flags: in JSON it is
    the highest of these whose key is true. needed: JSON must have it, though Python need not. given: returns
    what the directive holds for a value, or refuses it.
    """
    needed = needed or default is MISSING
    about = {"domain": domain, "hint": hint, "flags": flags, "needed": needed, "given": given}
    about |= {"key": key} if key else {}
    return field(metadata=about) if default is MISSING else field(default=default, metadata=about)


@contextmanager
def naming(by: str) -> Iterator[None]:
    """Name the directive in what is refused inside the block."""
    try:
        yield
    except ScheduleError as error:
        raise (error if error.by else error.located(by)) from error.__cause__


def check_value(name: str, value: object, domain: Domain, hint: str, by: str = "") -> None:
    """Refuse a value that is not of a domain."""
    if not domain.has(value):
        raise ScheduleError(f"{name} must be {domain.words}, got {value!r}", by=by, hint=hint)


PACKAGE = str(Path(__file__).parents[1])
STREAM = re.compile(r"[\w.-]+")  # plans write streams down as words
D = TypeVar("D", bound="Directive")


def source_line() -> str:
    """Return the file and line outside this package that constructs a directive: `llama.py:41`."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename.startswith((PACKAGE, "<string>"))
        or frame.f_code.co_filename.endswith("dataclasses.py")
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def given_filter(key: str, at: object) -> At:
    """Return the filter that a directive is given, or refuse it."""
    if not isinstance(at, At):
        hint = "select nodes with at(): at(PP=0), or at() for all of them"
        raise ScheduleError(f"{at!r} is not a filter", hint=hint)
    return at


def given_devices(key: str, devices: object) -> Devices:
    """Return the devices that a directive is given, as a tuple. `apply` checks their values."""
    if isinstance(devices, str | bytes | set | frozenset | dict) or not isinstance(devices, Iterable):
        hint = f"list the devices in order: {key}=[0, 1]"
        raise ScheduleError(f"{key}={devices!r} is not a list", hint=hint)
    return tuple(devices)


def given_stream(key: str, stream: object) -> object:
    """Return the stream name that a directive is given. None: no stream is given."""
    if stream is not None and not (isinstance(stream, str) and STREAM.fullmatch(stream)):
        hint = f'name the stream in one word: {key}="pp"'
        raise ScheduleError(f"{key}={stream!r} is not a name", hint=hint)
    return stream


def given_tag(key: str, tag: object) -> object:
    """Return the tag that a directive is given. `apply` checks that the model has it. None: no tag."""
    if tag is not None and not isinstance(tag, str):
        hint = f'name a tag of the model: {key}="PP"'
        raise ScheduleError(f"{key}={tag!r} is not a tag", hint=hint)
    return tag


GIVEN: Mapping[object, Given] = {At: given_filter, Sequence[int]: given_devices}  # by an argument's type


@dataclass(frozen=True, slots=True, repr=False)
class Directive:
    """One rewrite of the graph that the user asked for."""

    places: ClassVar[bool] = False  # it says on which devices nodes run

    source: str = field(default_factory=source_line, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        """Hold the arguments as they are used, and refuse those of the wrong kind."""
        with naming(f"{self.verb} ({self.source})"):
            for one in fields(self):
                given = one.metadata.get("given") or GIVEN.get(one.type)
                if one.name.endswith("stream"):
                    given = given_stream
                if given is not None:
                    object.__setattr__(self, one.name, given(one.name, getattr(self, one.name)))

    @property
    def verb(self) -> str:
        """Return the name by which users call this directive: `place`."""
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        """Return the call that makes this directive, without arguments that have their default value."""
        selects, *others = (one for one in fields(self) if one.name != "source")
        given = [show_argument(getattr(self, selects.name))]
        for one in others:
            value = getattr(self, one.name)
            if value != one.default:
                given.append(f"{one.name}={show_argument(value)}")
        return f"{self.verb}({', '.join(given)})"

    def title(self, number: int) -> str:
        """Return the directive's name in messages: its number in the strategy and its source line."""
        return f"{self.verb} #{number} ({self.source})"

    def check_arguments(self) -> None:
        """Refuse arguments that are not of their domains."""
        for one in fields(self):
            domain, value = one.metadata.get("domain"), getattr(self, one.name)
            if domain is not None and not (value is None and one.default is None):
                check_value(one.name, value, domain, one.metadata["hint"])

    def apply(self, graph: Graph, number: int) -> Graph:
        """Return the graph after this directive. Raise ScheduleError when it cannot be applied."""
        raise AssertionError(f"{self.verb} does not say what it does")

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        """Return the graph with the options of the chunks of selected nodes changed."""
        raise AssertionError(f"{self.verb} does not say what it decides")


@dataclass(frozen=True, slots=True, repr=False)
class ChunkDirective(Directive):
    """A directive that decides an option of the whole chunks that it selects, and places nothing."""

    at: At

    def apply(self, graph: Graph, number: int) -> Graph:
        nodes = selected(graph, self.at)
        check_whole(graph, nodes)
        graph = self.decide(graph, nodes, number)
        return graph.update(replace(node, origin=touched(node, number)) for node in nodes)


@dataclass(frozen=True, slots=True, repr=False)
class PlacingDirective(Directive):
    """A directive that places the selected nodes on devices, and may decide how their chunks live there."""

    places: ClassVar[bool] = True

    at: At
    devices: Sequence[int]

    def apply(self, graph: Graph, number: int) -> Graph:
        devices = checked_devices(self.devices)
        nodes = selected(graph, self.at)
        graph = self.decide(graph, nodes, number)
        return graph.update(replace(node, devices=devices, origin=touched(node, number)) for node in nodes)


def show_argument(value: object) -> str:
    """Write an argument of a directive as Python. A group of one filter is written without its list."""
    if isinstance(value, str):
        return f'"{value}"'
    if not isinstance(value, tuple):
        return repr(value)
    if len(value) > 1 and all(map(is_whole, value)):
        return show_index(value)
    if value and all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in value):
        return "{" + ", ".join(f"{show_argument(key)}: {item!r}" for key, item in value) + "}"
    members = (one[0] if isinstance(one, tuple) and len(one) == 1 else one for one in value)
    return "[" + ", ".join(map(show_argument, members)) + "]"


_KNOWN: dict[tuple[int, str], type[Directive]] = {}  # filled where directives are defined, and never changed


def registered(rank: int, key: str = "") -> Callable[[type[D]], type[D]]:
    """Register a directive with the JSON form, with hints and with `piper` itself, at `rank` in every list.

    key: it is another form of the directive at that rank, for entries that have this key.
    """

    def register(kind: type[D]) -> type[D]:
        made = inspect.signature(kind)
        shown = [parameter for name, parameter in made.parameters.items() if name != "source"]
        kind.__signature__ = made.replace(parameters=shown, return_annotation=kind)  # type: ignore[attr-defined]
        _KNOWN[rank, key] = kind
        return kind

    return register


def known_directives() -> dict[str, type[Directive]]:
    """Return every kind of directive, by its name for users, in the order of their ranks."""
    return {_KNOWN[at].__name__.lower(): _KNOWN[at] for at in sorted(_KNOWN) if not at[1]}


def form_of(verb: str, keys: Iterable[str]) -> type[Directive]:
    """Return the kind of directive that an entry with these keys is."""
    usual = known_directives()[verb]
    rank = next(rank for (rank, _), kind in _KNOWN.items() if kind is usual)
    return next((_KNOWN[rank, key] for key in keys if (rank, key) in _KNOWN), usual)


def group_size(ways: int | None, devices: Sequence[int], kind: str = "group") -> int:
    """Return how many devices form one group: `ways`, or all. Refuse a number that does not divide them."""
    size = len(devices) if ways is None else ways
    if not is_whole(size, 1) or len(devices) % size:
        raise ScheduleError(
            f"{len(devices)} devices cannot form groups of {size!r}",
            facts={"asked": f"ways={size!r}, devices={list(devices)}"},
            hint=f"ways is the size of one {kind}: a divisor of the number of devices",
        )
    return size


def selected(graph: Graph, at: At) -> list[Compute]:
    """Return the nodes that `at` selects. Refuse unknown tags and an empty selection."""
    check_tags(graph, at)
    nodes = graph.select(at)
    if not nodes:
        empty = [
            f"{tag}={index} ({graph.outline.empty[tag, index]}) holds no operation"
            for tag, asked in at.tags
            if asked is not None and asked != "*"
            for index in (asked if isinstance(asked, tuple) else (asked,))
            if (tag, index) in graph.outline.empty
        ]
        raise ScheduleError(
            "the filter matches no node",
            facts={"asked": str(at), "known": extent(graph)} | ({"empty": "; ".join(empty)} if empty else {}),
            hint="use an index that exists; only an order that asks for halves makes a backward BI and BW",
        )
    return nodes


def check_whole(graph: Graph, nodes: list[Compute]) -> None:
    """Refuse a filter that selects only some nodes of a chunk."""
    # The code of a chunk is the same for all its microbatches, and its forward and backward agree on what
    # is saved.
    names = {node.name for node in nodes}
    chunks = {node.chunk for node in nodes}
    outside = next((n for n in graph.nodes.values() if n.chunk in chunks and n.name not in names), None)
    if outside is not None:
        raise ScheduleError(
            "the filter cuts through a chunk",
            facts={"matched": nodes[0].name, "left out": outside.name},
            hint="select whole regions: leave PASS and axes of split out of the filter",
        )


def check_tags(graph: Graph, at: At) -> None:
    """Refuse a filter by a tag that nothing has, and several indices of which one does not exist."""
    for tag, asked in at.tags:
        if tag not in graph.index.indices:
            known = sorted(graph.index.indices)
            spelt = {name.lower(): name for name in known}
            close = difflib.get_close_matches(tag.lower(), spelt, n=1)
            way_out = "annotate the model with it, or split along it first"
            raise ScheduleError(
                f"there is no tag {tag!r}",
                facts={"asked": str(at), "tags": ", ".join(known) or "none: the model has no annotations"},
                hint=f"did you mean {spelt[close[0]]!r}?" if close else way_out,
            )
        for index in asked if isinstance(asked, tuple) else ():
            if index not in graph.index.indices[tag] and (tag, index) not in graph.outline.empty:
                raise ScheduleError(
                    f"there is no {tag}={index}",
                    facts={"asked": str(at), "known": extent(graph)},
                    hint="select only indices that exist",
                )


def extent(graph: Graph) -> str:
    """Return the tags of a graph with their ranges: `MB=0..7, PP=0..3`."""
    ranges = []
    for tag in sorted(graph.index.indices):
        indices = graph.index.indices[tag]
        low, high = min(indices), max(indices)
        ranges.append(f"{tag}={low}" if low == high else f"{tag}={low}..{high}")
    return ", ".join(ranges) or "no tags"


def checked_devices(devices: Sequence[int]) -> Devices:
    """Return the devices as a tuple: whole numbers from 0, at least one, none twice."""
    wrong = [] if devices else ["no devices are given"]
    wrong += [f"{device!r} is not a device" for device in devices if not is_whole(device, 0)]
    counts = {} if wrong else Counter(devices)
    wrong += [f"device {device} is given twice" for device, times in counts.items() if times > 1]
    if wrong:
        raise ScheduleError(
            wrong[0],
            facts={"asked": f"devices={list(devices)}"},
            hint="devices are whole numbers from 0, at least one, each once: the i-th takes the i-th slice",
        )
    return interned(tuple(devices))


def touched(node: Compute, number: int) -> tuple[int, ...]:
    """Return a node's origin with directive `number` added."""
    return node.origin if number in node.origin else (*node.origin, number)
