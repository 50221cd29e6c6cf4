"""Symbolic values: small tuples that are equal exactly where the values are, and sums of contributions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Literal

from piper.ir.chunk import Tags
from piper.ir.devices import Devices
from piper.ir.ids import show_part
from piper.ir.mesh import Axis
from piper.ir.sharding import Sharding, show_shard
from piper.proof.covers import Cover, once

Kind = Literal[
    "output",  # of a chunk
    "batch",  # a field
    "constant",
    "place",  # of each device in its group along an axis
    "host_place",  # the same, in memory of the host
    "seed",  # the gradient of the loss
    "saved",  # for the backward
    "carried",  # from BI to BW
    "splits",  # the row counts of a route
    "gradient",  # of an output of a chunk: a sum over some of its readers
    "weights",  # gradients of a bucket's parameters: a sum over chunks and microbatches
    "sum",  # of losses or of weights
    "param",  # a bucket's parameters
    "buffer",
    "copy",  # of a part of the state
    "host",  # a copy of a value in memory of the host
    "state",  # of the optimizer, brought from the host
    "norm",
    "total",
    "spent",  # a gradient that an update has scaled in place
    "resident",  # a slot that no instruction should read
]
MODULUS = 1 << 128
Amount = int  # the number of an interned sum; 0 is the empty one
NOTHING: Amount = 0
NO_COVER = -1
IN_FULL = "in full"  # parameters, or gradients of them, where they are updated and devices have slices
Terms = tuple[tuple[Cover, Amount], ...]  # a sum over samples: for each cover what is summed over its cells
Value = tuple[int, Tags | str, int | Terms]
# ^ the number of a SymbolicValue; the microbatch or the state; of a gradient its readers, of a sum its terms


@dataclass(frozen=True, slots=True)
class SymbolicValue:
    """The identity of a value, without its microbatch."""

    kind: Kind
    name: str = ""
    index: int = 0
    cover: Cover = NO_COVER
    names: tuple[str, ...] = ()
    # ^ of gradients of parameters: the parameters of the bucket; of places: that of each device; of a field:
    # how it is sharded beyond its samples


class Amounts:
    """Interns sums of contributions, which are compared without being written out.

    A sum is a multiset of contributions. It is kept as the sum of their 128-bit digests modulo 2**128, so
    adding and comparing take constant time whatever the number of contributions. Two different multisets
    agree with a chance of about 2**-128; a multiplicity that is a multiple of 2**128 does not occur. How a
    sum came about is noted too, so that a counterexample can name what is missing.
    """

    def __init__(self) -> None:
        self._digests: list[int] = [0]
        self._numbers: dict[int, Amount] = {0: NOTHING}
        self._made_of: list[str | tuple[Amount, Amount]] = [""]

    @once
    def single(self, label: str) -> Amount:
        """Return the sum of one contribution, which its label identifies."""
        return self._intern(int.from_bytes(blake2b(label.encode(), digest_size=16).digest(), "big"), label)

    @once
    def add(self, left: Amount, right: Amount) -> Amount:
        """Return the sum of two sums."""
        return self._intern((self._digests[left] + self._digests[right]) % MODULUS, (left, right))

    def times(self, amount: Amount, count: int) -> Amount:
        """Return a sum taken several times."""
        total = NOTHING
        for _ in range(count):
            total = self.add(total, amount)
        return total

    def contributions(self, amount: Amount) -> Counter[str]:
        """Return the contributions of a sum, each with how often it is in it."""
        leaves: Counter[str] = Counter()
        counts = {amount: 1} if amount else {}
        waiting = [-amount] if amount else []
        while waiting:  # from the latest sum to the earliest: a sum is made of earlier ones
            number = -heappop(waiting)
            count, made_of = counts.pop(number), self._made_of[number]
            if isinstance(made_of, str):
                leaves[made_of] += count
                continue
            for part in made_of:
                if part not in counts:
                    heappush(waiting, -part)
                counts[part] = counts.get(part, 0) + count
        return leaves

    def _intern(self, digest: int, made_of: str | tuple[Amount, Amount]) -> Amount:
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._digests)
            self._digests.append(digest)
            self._made_of.append(made_of)
        return number


class SymbolTable:
    """Interns symbols, and describes values in the words of a plan."""

    def __init__(self, amounts: Amounts) -> None:
        self.amounts = amounts
        self._symbols: list[SymbolicValue] = []
        self._numbers: dict[SymbolicValue, int] = {}

    def number(self, symbol: SymbolicValue) -> int:
        """Return the number of a symbol. Equal symbols have the same number."""
        known = self._numbers.get(symbol)
        if known is None:
            known = self._numbers[symbol] = len(self._symbols)
            self._symbols.append(symbol)
        return known

    def symbol(self, value: Value) -> SymbolicValue:
        """Return the identity of a value."""
        return self._symbols[value[0]]

    @once
    def moved(self, number: int, cover: Cover) -> int:
        """Return the number of the same symbol with another cover."""
        return self.number(replace(self._symbols[number], cover=cover))

    def without_samples(self, value: Value) -> Value:
        """Return a value without the samples that it belongs to."""
        return (self.moved(value[0], NO_COVER), *value[1:])

    def describe(self, value: Value | None) -> str:
        """Describe a value in the words of a plan."""
        if value is None:
            return "nothing"
        symbol, about = self._symbols[value[0]], value[1]
        microbatch = "" if isinstance(about, str) else f" on{show_part(about)}" if about else ""
        if symbol.kind == "gradient":
            assert isinstance(value[2], int)
            given = sorted(self.amounts.contributions(value[2]).items())
            givers = " + ".join(label if count == 1 else f"{count} x {label}" for label, count in given)
            return f"the gradient of output {symbol.index} of {symbol.name}{microbatch} from {givers}"
        shown = ", ".join(symbol.names[:3]) + (" ..." if symbol.names[3:] else "")
        extent = {IN_FULL: "full ", "held": "a shard of ", "owned": "a shard of "}
        words: dict[Kind, str] = {
            "output": f"output {symbol.index} of {symbol.name}",
            "batch": f"field {symbol.name}" + (f" ({shown})" if shown else ""),
            "place": f"places {shown} of its devices",
            "host_place": f"places {shown} of its devices, on the host",
            "saved": symbol.name,
            "carried": f"what BI of {symbol.name} carries",
            "splits": f"the row counts of {symbol.name}",
            "weights": f"{extent.get(str(about), '')}gradients of {shown}",
            "sum": f"the sum of the {symbol.name}",
            "param": f"the {about} parameters of {symbol.name}",
            "seed": "the gradient of the loss",
            "norm": "the norm and the loss of this device",
            "total": f"the {about} sums over all devices",
            "spent": "a gradient that an update has used up",
            "copy": f"a copy of {symbol.name}",
            "host": f"{f'{about} ' if about else ''}{symbol.name}, on the host",
            "state": f"the {about} state of the optimizer for {symbol.name}",
        }
        return words.get(symbol.kind, f"the {symbol.kind} {symbol.name}") + microbatch


@lru_cache(maxsize=256)  # every bucket of a stage asks for the same
def places_along(devices: Devices, axis: Axis, members: Devices) -> tuple[str, ...]:
    """Return where some members of a mesh lie along one of its axes."""
    position = {device: i for i, device in enumerate(devices)}
    return tuple(str(axis.coordinate(position[device])) for device in members)


def shown_cuts(cuts: Sequence[Sharding], devices: Devices, members: Devices) -> tuple[str, ...]:
    """Return the slices of a field that some members of a set take, one dimension after another."""
    shown = ((",".join(places_along(devices, cut.axis, members)), cut) for cut in cuts)
    return tuple(f"slices {places} of {cut.degree} along {show_shard(cut)}" for places, cut in shown)
