"""The nodes of a joint graph that one phase runs, reads and writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

Kind = Literal["inputs", "params", "buffers", "saved", "carried", "tangents"]
KINDS: tuple[Kind, ...] = ("inputs", "params", "buffers", "saved", "carried", "tangents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A result of a phase. `copy`: it must not share memory with the values it is computed from."""

    node: fx.Node
    copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a joint graph that one phase runs. Positions are those of the piece."""

    reads: Mapping[Kind, Mapping[int, fx.Node]]
    body: Sequence[fx.Node]
    lengths: Mapping[fx.Node, tuple[fx.Node, int]]  # a size, as an axis of something the phase reads
    writes: Sequence[Write]
    writers: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    # ^ recomputed values, each with the result in whose kernel a compiler writes it
    grad_inputs: tuple[int, ...] = ()
    grad_params: tuple[int, ...] = ()

    @property
    def read_nodes(self) -> list[fx.Node]:
        return [node for kind in KINDS for node in self.reads[kind].values()]
