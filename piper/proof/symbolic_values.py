"""Symbolic values: small tuples that are equal exactly where the values are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from piper.ir.chunk import Tags
from piper.ir.devices import Devices
from piper.ir.ids import show_part
from piper.ir.mesh import Axis
from piper.ir.sharding import Sharding
from piper.proof.amounts import Amount, Amounts
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
            "buffer": f"the buffer {symbol.name}",
            "constant": f"the constant {symbol.name}",
            "seed": "the gradient of the loss",
            "norm": "the norm and the loss of this device",
            "total": f"the {about} sums over all devices",
            "spent": "a gradient that an update has used up",
            "resident": f"the resident {symbol.name}",
            "copy": f"a copy of {symbol.name}",
            "host": f"{f'{about} ' if about else ''}{symbol.name}, on the host",
            "state": f"the {about} state of the optimizer for {symbol.name}",
        }
        return words[symbol.kind] + microbatch


@lru_cache(maxsize=256)  # every bucket of a stage asks for the same
def places_along(devices: Devices, axis: Axis, members: Devices) -> tuple[str, ...]:
    """Return where some members of a mesh lie along one of its axes."""
    position = {device: i for i, device in enumerate(devices)}
    return tuple(str(axis.coordinate(position[device])) for device in members)


def shown_cuts(cuts: Sequence[Sharding], devices: Devices, members: Devices) -> tuple[str, ...]:
    """Return the slices of a field that some members of a set take, one dimension after another."""
    shown = []
    for cut in cuts:
        blocks = f", {cut.blocks} blocks" if cut.blocks > 1 else ""
        order = ", zigzag" if cut.zigzag else ""
        places = ",".join(places_along(devices, cut.axis, members))
        shown.append(f"slices {places} of {cut.degree} along dimension {cut.dim}{blocks}{order}")
    return tuple(shown)
