"""What slots hold when plans are run on symbols instead of numbers, and how rows of it move."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from piper.ir.chunk import Tags
from piper.plan import instr
from piper.plan.instr import Payload

Row = tuple[int, Tags]  # a cell of the samples and a part: the smallest piece that is never cut
Share = tuple[int, int]  # of the experts: which part, of how many
Terms = Counter[tuple[str, Row, Share]]  # how often a chunk's gradient of a row, for a share, is in a sum
WHOLE: Share = (0, 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a value; after an exchange, those of a whole group that belong to a share of the experts."""

    name: str
    rows: tuple[Row, ...]
    share: Share = WHOLE


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradient of a value, for some samples: which readers of the value have added theirs."""

    of: Rows
    terms: tuple[tuple[str, int], ...]  # (chunk, input), sorted


@dataclass(frozen=True, slots=True)
class Weights:
    """Gradients of parameters: for each, what is in the sum. Sums are never changed, so several may be one."""

    terms: Mapping[str, Terms]
    shard: Share | None = None  # of the flat bucket; none: all of it

    def __str__(self) -> str:
        """The sum, whatever the order in which it came about."""
        texts: dict[int, str] = {}
        for terms in self.terms.values():
            if id(terms) not in texts:
                texts[id(terms)] = str(sorted(terms.items()))
        return str(sorted((name, texts[id(terms)]) for name, terms in self.terms.items()))


@dataclass(frozen=True, slots=True)
class Held:
    """A bucket's parameters: the version of each shard, none where a device does not hold it."""

    versions: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Anything that must only come back as it was: saved and carried values, buffers, splits."""

    what: str
    rows: tuple[Row, ...] = ()
    share: Share = WHOLE


Value = Rows | Slope | Weights | Held | Note | Counter[Row]


def rows_of(value: Value) -> Rows:
    """The rows that a value or a gradient is of."""
    if isinstance(value, Slope):
        return value.of
    assert isinstance(value, Rows)
    return value


def with_rows(value: Value, rows: Rows) -> Value:
    """A value or a gradient, of other rows."""
    return replace(value, of=rows) if isinstance(value, Slope) else rows


def cut(value: Value, taken: Payload) -> Value:
    """The rows that a send or a copy takes."""
    if not isinstance(taken, instr.Rows):
        return value
    rows = rows_of(value)
    each, left = divmod(len(rows.rows), taken.of)
    assert not left and rows.rows, f"{taken} of {len(rows.rows)} rows"
    return with_rows(value, replace(rows, rows=rows.rows[taken.start * each : taken.stop * each]))


def joined(pieces: list[Value]) -> Value:
    """Pieces of one value, their rows one after another."""
    rows = [rows_of(piece) for piece in pieces]
    whole = replace(rows[0], rows=tuple(row for one in rows for row in one.rows))
    results = [with_rows(piece, whole) for piece in pieces]
    names = {one.name for one in rows}
    assert len(names) == 1 and results == [results[0]] * len(results), f"pieces of {names} are joined"
    return results[0]


def dispersed(values: list[Value]) -> list[Value]:
    """An all-to-all outward: each member gets all rows, for its own share of the experts."""
    rows = [rows_of(value) for value in values]
    assert len({one.name for one in rows}) == 1 and all(one.share == WHOLE for one in rows), rows
    every = tuple(row for one in rows for row in one.rows)
    moved = [replace(one, rows=every, share=(i, len(rows))) for i, one in enumerate(rows)]
    return [with_rows(value, one) for value, one in zip(values, moved, strict=True)]


def returned(values: list[Value], owned: list[tuple[Row, ...]]) -> list[Value]:
    """An all-to-all back: each member gets its own rows from every share of the experts."""
    every = tuple(row for rows in owned for row in rows)
    for i, value in enumerate(values):
        expected = Rows(rows_of(values[0]).name, every, (i, len(values)))
        assert rows_of(value) == expected, f"{value} comes back, not {expected}"
    return [with_rows(v, Rows(rows_of(v).name, rows)) for v, rows in zip(values, owned, strict=True)]


def plus(*values: Value) -> Weights:
    """The sum of gradients, element by element."""
    terms: dict[str, Terms] = {}
    shards: set[Share | None] = set()
    for value in values:
        assert isinstance(value, Weights)
        shards.add(value.shard)
        before = dict(terms)
        sums: dict[tuple[int, int], Terms] = {}  # the parameters of a chunk mostly have the same sum
        for name, found in value.terms.items():
            key = (id(before.get(name)), id(found))
            if key not in sums:
                sums[key] = Counter(before.get(name))
                sums[key].update(found)
            terms[name] = sums[key]
    assert len(shards) == 1, f"shards of different elements are summed: {shards}"
    return Weights(terms, shards.pop())


def added(left: Value, right: Value) -> Value:
    """The sum of two readers' gradients of one value."""
    assert isinstance(left, Slope) and isinstance(right, Slope) and left.of == right.of, (left, right)
    assert not set(left.terms) & set(right.terms), f"{left} and {right} share a term"
    return Slope(left.of, tuple(sorted((*left.terms, *right.terms))))


def accumulated(value: Value, *total: Value) -> Value:
    """Gradients or losses, begun or added to what there is."""
    if isinstance(value, Rows):
        before = total[0] if total else Counter()
        assert isinstance(before, Counter)
        return before + Counter(value.rows)
    return plus(value, *total)
