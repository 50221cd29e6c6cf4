"""Makes each chunk a piece of code of its own: its inputs, its outputs, and the graph between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.amp import autocast_mode

from piper.capture.trace.cut import Cut, Regions
from piper.capture.trace.effects import draws, writes
from piper.capture.trace.functionalize import memory_of, value, written_memory
from piper.capture.trace.graph_walks import upstream
from piper.capture.trace.linear_layers import WEIGHT, is_grouped, weights_of
from piper.capture.trace.recording import OWN_ROWS, FromBuffer, FromParameter, Mode, Recording, how_of, marker
from piper.capture.trace.segments import split_chunks
from piper.capture.trace.sizes import SymbolicSizes
from piper.capture.trace_errors import node_line
from piper.errors import CaptureError
from piper.ir.chunk import Chunk, Output, Source, TensorSpec

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


_MARKERS = ("route", "unroute", "collective")  # kinds of chunks without code


class Assembler:
    """Builds the pieces of one recording."""

    def __init__(self, recording: Recording, regions: Regions, cuts: Sequence[Cut]) -> None:
        self.recording, self.regions, self.cuts = recording, regions, cuts
        self.cut_of = {node: cut for cut in cuts for node in cut.nodes}
        self.sizes, self.experts = _routed_sizes(regions, cuts)
        self.results = {cut.name: self._results(cut) for cut in cuts}
        origins = recording.origins.items()
        self.state = {node for node, origin in origins if isinstance(origin, FromParameter | FromBuffer)}

    def pieces(self) -> list[CapturedChunk]:
        """Return the piece of every chunk, in the order of the cuts."""
        nodes = {cut.name: self._with_copies(cut) for cut in self.cuts if cut.kind not in _MARKERS}
        whole = [cut.name for cut in self.cuts if cut.kind == "compute"]
        state, bundles = self.state, self.recording.bundles
        runs = dict(zip(whole, split_chunks([nodes[name] for name in whole], state, bundles), strict=True))
        pieces = [
            self._compute(cut, nodes[cut.name], runs.get(cut.name, ()))
            if cut.name in nodes
            else self._marker(cut)
            for cut in self.cuts
        ]
        _check_buffers([piece.chunk for piece in pieces])
        return pieces

    def output(self, node: fx.Node) -> Output:
        """Return the name by which other chunks refer to a value."""
        cut = self.cut_of[node]
        if cut.kind == "route":  # its results are read through getitems, several for one result
            index = node.args[1]
            assert isinstance(index, int)
            return Output(chunk=cut.name, index=index)
        return Output(chunk=cut.name, index=self.results[cut.name].index(node))

    def _results(self, cut: Cut) -> list[fx.Node]:
        """Return the values of a chunk that other chunks read or the loss returns."""
        if cut.kind in _MARKERS:
            return [node for node in cut.nodes if isinstance(value(node), Tensor)]
        return [
            node
            for node in cut.nodes
            if node in self.recording.results or any(self.cut_of.get(u, cut) is not cut for u in node.users)
        ]

    def _source(self, node: fx.Node) -> Source:
        if node in self.cut_of:
            return self.output(node)
        origin = self.recording.origins[node]
        assert not isinstance(origin, FromParameter | FromBuffer), "state is no input"
        return origin

    def _spec(self, cut: Cut, node: fx.Node) -> TensorSpec:
        result = value(node)
        if not isinstance(result, Tensor):
            raise CaptureError(
                "a number that is read off a tensor leaves its region",
                by=f"{node.name}{node_line(node)}",
                facts={"region": cut.name},
                hint="keep .item(), nonzero() and whatever depends on their sizes within one region",
            )
        return self.sizes.spec(result)

    def _marker(self, cut: Cut) -> CapturedChunk:
        """Return a `route`, `unroute` or collective: inputs and outputs, no code."""
        node = next(node for node in cut.nodes if marker(node))
        reads = [source for source in node.args[:2] if isinstance(source, fx.Node)]
        marked = value(node)
        results = marked if isinstance(marked, tuple | list) else [marked]
        chunk = Chunk(
            name=cut.name,
            tags=cut.tags,
            kind=cut.kind,
            inputs=tuple(self._source(source) for source in reads),
            input_specs=tuple(self._spec(cut, source) for source in reads),
            outputs=tuple(self.sizes.spec(result) for result in results if isinstance(result, Tensor)),
            experts=self.experts.get(cut.name, 0),
            own_rows=node.meta.get(OWN_ROWS, ()),
            collective=how_of(node) if cut.kind == "collective" else None,
        )
        return CapturedChunk(chunk=chunk, inputs=tuple(_tensor(source) for source in reads), body=None)

    def _compute(
        self, cut: Cut, nodes: Sequence[fx.Node], runs: Sequence[Sequence[fx.Node]]
    ) -> CapturedChunk:
        """Return a chunk with code. runs: its nodes, cut into segments."""
        reads = self._reads(nodes)
        inputs, params, buffers = reads
        results = self.results[cut.name]
        written = written_memory(nodes)
        chunk = Chunk(
            name=cut.name,
            tags=cut.tags,
            kind=cut.kind,
            inputs=tuple(self._source(node) for node in inputs),
            input_specs=tuple(self._spec(cut, node) for node in inputs),
            params=tuple(self._name(node) for node in params),
            buffers=tuple(self._name(node) for node in buffers),
            mutated=tuple(self._name(node) for node in buffers if memory_of(node) in written),
            outputs=tuple(self._spec(cut, node) for node in results),
            random=any(draws(node) for node in nodes),
            experts=self.experts.get(cut.name, 0),
            fixed=tuple(index for index, node in enumerate(results) if node in self.regions.fixed),
            products=weights_of([node for node in nodes if is_grouped(node) or cut.kind != "expert"]),
            rowwise=() if cut.kind == "expert" else weights_of(nodes, rowwise=True),
        )
        experts = None
        if cut.kind == "expert":
            experts = Experts(
                total=chunk.experts,
                rows=next(spec.shape[0] for spec in chunk.input_specs if spec.dynamic_rows),
                counts=tuple(isinstance(source, Output) and source.index == 1 for source in chunk.inputs),
            )
        body = self._body(nodes, reads, results, experts)
        return CapturedChunk(
            chunk=chunk,
            inputs=body.inputs,
            body=body,
            reads=reads,
            makes=results,
            segments=self._segments(runs, results) if len(runs) > 1 else (),
        )

    def _body(
        self,
        nodes: Sequence[fx.Node],
        reads: Reads,
        results: Sequence[fx.Node],
        experts: Experts | None = None,
    ) -> Body:
        return Body(
            graph=self._emitted(nodes, [node for group in reads for node in group], results),
            root=self.recording.root,
            inputs=tuple(_tensor(node) for node in reads[0]),
            params=tuple(_tensor(node) for node in reads[1]),
            buffers=tuple(_tensor(node) for node in reads[2]),
            experts=experts,
        )

    def _emitted(
        self, nodes: Sequence[fx.Node], reads: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> fx.Graph:
        """Copy nodes into a new graph. Placeholders stand for `reads`; the graph returns `results`."""
        # What is read is copied before anything writes into it in place, with all its views, but for buffers:
        # their new values are results. A result that is written later is returned as it was.
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in reads}
        last = {memory_of(target): position for position, node in enumerate(nodes) for target in writes(node)}
        last.pop(None, None)  # what has no memory to ask for
        for node in reads:
            buffer = isinstance(self.recording.origins.get(node), FromBuffer)
            if memory_of(node) in last and not buffer:
                copies[node] = graph.call_method("clone", (copies[node],))
        returned: dict[fx.Node, fx.Node] = {}
        current = _Modes(graph)
        for position, node in enumerate(nodes):
            current.enter(self.recording.modes[node])
            copy = graph.node_copy(node, copies.__getitem__)
            copy.meta = {key: node.meta.get(key) for key in ("stack_trace", WEIGHT) if key in node.meta}
            typed = any(isinstance(given, torch.dtype) for given in (*copy.args, *copy.kwargs.values()))
            if copy.op == "call_method" and copy.target == "view" and not typed:
                copy.target = "reshape"  # a view needs strides that a value may lose between chunks
            copies[node] = copy
            if node in results and last.get(memory_of(node), -1) > position:
                returned[node] = graph.call_method("clone", (copy,))
        current.enter(Mode())
        graph.output(tuple(returned.get(node, copies[node]) for node in results))
        return graph

    def _segments(self, runs: Sequence[Sequence[fx.Node]], results: Sequence[fx.Node]) -> tuple[Segment, ...]:
        run_of = {node: number for number, run in enumerate(runs) for node in run}
        segments = []
        for number, run in enumerate(runs):
            makes = [
                node
                for node in run
                if node in results or any(run_of.get(user, number) > number for user in node.users)
            ]
            reads = self._reads(run)
            segments.append(Segment(body=self._body(run, reads, makes), reads=reads, makes=makes))
        return tuple(segments)

    def _with_copies(self, cut: Cut) -> list[fx.Node]:
        """Return the chunk's nodes and those it runs its own copy of, in program order."""
        extra = self.regions.copied | (self.regions.weights if cut.kind == "expert" else frozenset())
        own = set(cut.nodes)
        nodes = upstream(own, lambda node: node in own or node in extra)
        return sorted(nodes, key=self.regions.order.__getitem__)

    def _reads(self, nodes: Sequence[fx.Node]) -> Reads:
        """Return the inputs, parameters and buffers that the nodes read, each in the order of first use."""
        inside = set(nodes)
        read = dict.fromkeys(
            source for node in nodes for source in node.all_input_nodes if source not in inside
        )
        params = [node for node in read if isinstance(self.recording.origins.get(node), FromParameter)]
        buffers = [node for node in read if isinstance(self.recording.origins.get(node), FromBuffer)]
        return [node for node in read if node not in self.state], params, buffers

    def _name(self, node: fx.Node) -> str:
        origin = self.recording.origins[node]
        assert isinstance(origin, FromParameter | FromBuffer)
        return origin.name


def _tensor(node: fx.Node) -> Tensor:
    result = value(node)
    assert isinstance(result, Tensor)
    return result


def _routed_sizes(regions: Regions, cuts: Sequence[Cut]) -> tuple[SymbolicSizes, Mapping[str, int]]:
    """Return the balanced size of every routed axis, and the experts of each expert chunk and marker."""
    balanced: dict[str, int] = {}
    rows: set[str] = set()
    experts, behind = dict[str, int](), dict[fx.Node, int]()  # of chunks, and behind each route
    for cut in cuts:
        node = cut.nodes[0]
        if cut.kind == "route":
            x, counts = (_tensor(source) for source in node.all_input_nodes[:2])
            routed, received = node.meta["example_value"]
            balanced |= {str(routed.shape[0]): x.shape[0], str(received.shape[0]): counts.shape[0]}
            rows.add(str(routed.shape[0]))
            experts[cut.name] = behind[node] = counts.shape[0]
        elif cut.kind in ("expert", "unroute"):
            experts[cut.name] = behind[regions.areas[node]]
    return SymbolicSizes(balanced, frozenset(rows)), experts


def _check_buffers(chunks: Sequence[Chunk]) -> None:
    """Refuse a buffer that one region changes and another reads: they may be on different devices."""
    for chunk in chunks:
        for name in chunk.mutated:
            for other in chunks:
                if name in other.buffers and other.tags != chunk.tags:
                    raise CaptureError(
                        f"{name} is changed by one region and read by another",
                        by="model",
                        facts={"changed": chunk.name, "read": other.name},
                        hint="give each region a module of its own, or put both uses into one region",
                    )


class _Modes:
    """Writes the calls that change from one mode to another into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.mode = Mode()
        self.open: list[fx.Node] = []

    def enter(self, mode: Mode) -> None:
        if mode.autocast != self.mode.autocast:
            for _ in self.mode.autocast:
                self.graph.call_function(autocast_mode._exit_autocast, (self.open.pop(),))
        if mode.grad != self.mode.grad:
            self.graph.call_function(torch._C._set_grad_enabled, (mode.grad,))
        if mode.autocast != self.mode.autocast:
            for arguments in mode.autocast:
                self.open.append(self.graph.call_function(autocast_mode._enter_autocast, arguments))
        self.mode = mode
