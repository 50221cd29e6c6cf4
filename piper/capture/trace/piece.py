"""A chunk together with its captured code, before it is differentiated."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from piper.ir.chunk import Chunk

Reads = tuple[Sequence[fx.Node], Sequence[fx.Node], Sequence[fx.Node]]  # inputs, parameters, buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of an expert region, and its rows when routing is balanced."""

    total: int
    rows: int
    counts: tuple[bool, ...]  # for each input, whether it is the counts; the others begin with the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Captured code: a graph whose placeholders are inputs, parameters and buffers, in this order."""

    graph: fx.Graph
    root: nn.Module  # holds the graph's attributes
    inputs: tuple[Tensor, ...]  # fakes of what the placeholders take
    params: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a chunk. What it reads and makes are nodes of the recording, as they are for the chunk."""

    body: Body
    reads: Reads
    makes: Sequence[fx.Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedChunk:
    """A chunk and its code."""

    chunk: Chunk
    inputs: tuple[Tensor, ...]  # fakes
    body: Body | None  # none: a marker
    reads: Reads = ((), (), ())
    makes: Sequence[fx.Node] = ()
    segments: tuple[Segment, ...] = ()  # the body in parts; empty: in one
