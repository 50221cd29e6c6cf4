"""Makes each chunk a graph of its own: what it reads, what it returns, and the code between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.amp import autocast_mode

from piper.capture.cut import Cut
from piper.capture.effects import draws, marker, writes
from piper.capture.record import FromBuffer, FromParameter, Mode, Recording
from piper.capture.regions import Regions
from piper.capture.rewrite import relaxed_view, value
from piper.capture.segments import split_nodes
from piper.capture.sizes import Sizes
from piper.errors import CaptureError
from piper.ir.chunk import Chunk, Output, Source, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What makes an expert region's code its own: how many experts, and the balanced number of rows."""

    total: int
    rows: int
    counts: tuple[bool, ...]  # for each input, whether it is the counts; the others have the rows on their first axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Code as captured: a graph whose placeholders are inputs, parameters and buffers, in this order."""

    graph: fx.Graph
    root: nn.Module  # holds the graph's attributes
    inputs: tuple[Tensor, ...]  # fakes of what the placeholders take
    params: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A value that an earlier segment made."""

    segment: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a chunk. Its inputs are the chunk's, by position, or what earlier segments made."""

    body: Body
    inputs: tuple[int | Made, ...]
    params: tuple[int, ...]  # positions among the chunk's
    buffers: tuple[int, ...]
    returns: Mapping[int, int]  # the chunk's outputs that are made here, and which of the body's they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk and its code."""

    chunk: Chunk
    inputs: tuple[Tensor, ...]  # fakes
    body: Body | None  # none: a marker
    segments: tuple[Segment, ...] = ()  # the body in parts; empty: in one


class Assembler:
    """Builds the pieces of one recording."""

    def __init__(self, recording: Recording, regions: Regions, cuts: Sequence[Cut]) -> None:
        self.recording, self.regions, self.cuts = recording, regions, cuts
        self.home = {node: cut for cut in cuts for node in cut.nodes}
        self.sizes, self.experts = _routed_sizes(regions, cuts)
        self.results = {cut.name: self._results(cut) for cut in cuts}

    def pieces(self) -> list[Piece]:
        """Every chunk's piece, in the order of the cuts."""
        return [self._marker(cut) if cut.kind in ("route", "unroute") else self._compute(cut) for cut in self.cuts]

    def output(self, node: fx.Node) -> Output:
        """How other chunks name a value."""
        home = self.home[node]
        if home.kind == "route":  # `route` is read through its getitems, of which a value may have several
            return Output(chunk=home.name, index=int(node.args[1]))  # type: ignore[arg-type]
        return Output(chunk=home.name, index=self.results[home.name].index(node))

    def _results(self, cut: Cut) -> list[fx.Node]:
        """The values of a chunk that others read."""
        if cut.kind in ("route", "unroute"):
            return [node for node in cut.nodes if isinstance(value(node), Tensor)]
        inside = set(cut.nodes)
        return [
            node
            for node in cut.nodes
            if node in self.recording.results or any(user in self.home and user not in inside for user in node.users)
        ]

    def _source(self, node: fx.Node) -> Source:
        if node in self.home:
            return self.output(node)
        origin = self.recording.origins[node]
        assert not isinstance(origin, FromParameter | FromBuffer), "state is no input"
        return origin

    def _spec(self, cut: Cut, node: fx.Node) -> TensorSpec:
        result = value(node)
        if not isinstance(result, Tensor):
            raise CaptureError(
                f"{cut.name} needs a number that another region reads off a tensor",
                by=f"{node.name}",
                hint="keep .item(), nonzero() and what depends on their sizes within one region",
            )
        return self.sizes.spec(result)

    def _marker(self, cut: Cut) -> Piece:
        """A `route` or `unroute`: inputs and outputs, no code."""
        node = next(node for node in cut.nodes if marker(node))
        reads = [source for source in node.args[:2] if isinstance(source, fx.Node)]
        found = value(node)
        results = list(found) if isinstance(found, tuple | list) else [found]
        chunk = Chunk(
            name=cut.name,
            tags=cut.tags,
            kind=cut.kind,
            inputs=tuple(self._source(source) for source in reads),
            input_specs=tuple(self._spec(cut, source) for source in reads),
            outputs=tuple(self.sizes.spec(result) for result in results),
            experts=self.experts[cut.name],
        )
        return Piece(chunk=chunk, inputs=tuple(_tensor(source) for source in reads), body=None)

    def _compute(self, cut: Cut) -> Piece:
        nodes = self._with_copies(cut)
        inputs, params, buffers = self._reads(nodes)
        results = self.results[cut.name]
        written = {target for node in nodes for target in writes(node)}
        chunk = Chunk(
            name=cut.name,
            tags=cut.tags,
            kind=cut.kind,
            inputs=tuple(self._source(node) for node in inputs),
            input_specs=tuple(self._spec(cut, node) for node in inputs),
            params=tuple(self._name(node) for node in params),
            buffers=tuple(self._name(node) for node in buffers),
            mutated=tuple(self._name(node) for node in buffers if node in written),
            outputs=tuple(self._spec(cut, node) for node in results),
            random=any(draws(node) for node in nodes),
            experts=self.experts.get(cut.name, 0),
        )
        body = self._body(nodes, results, _experts(chunk))
        parts = split_nodes(nodes, [*params, *buffers], self.recording.bundles)
        whole = cut.kind == "expert" or len(parts) == 1
        segments = () if whole else self._segments(parts, inputs, params, buffers, results)
        return Piece(chunk=chunk, inputs=body.inputs, body=body, segments=segments)

    def _body(self, nodes: Sequence[fx.Node], results: Sequence[fx.Node], experts: Experts | None = None) -> Body:
        reads = self._reads(nodes)
        inputs, params, buffers = (tuple(_tensor(node) for node in group) for group in reads)
        return Body(
            graph=self._graph(nodes, [node for group in reads for node in group], results),
            root=self.recording.root,
            inputs=inputs,
            params=params,
            buffers=buffers,
            outputs=tuple(_tensor(node) for node in results),
            experts=experts,
        )

    def _segments(
        self,
        parts: Sequence[Sequence[fx.Node]],
        inputs: Sequence[fx.Node],
        params: Sequence[fx.Node],
        buffers: Sequence[fx.Node],
        results: Sequence[fx.Node],
    ) -> tuple[Segment, ...]:
        home = {node: number for number, part in enumerate(parts) for node in part}
        made: dict[fx.Node, Made] = {}
        segments = []
        for number, part in enumerate(parts):
            going = [node for node in part if node in results or any(home.get(u, -1) > number for u in node.users)]
            made.update({node: Made(segment=number, output=i) for i, node in enumerate(going)})
            own = self._reads(part)
            segments.append(
                Segment(
                    body=self._body(part, going),
                    inputs=tuple(made[node] if node in made else inputs.index(node) for node in own[0]),
                    params=tuple(params.index(node) for node in own[1]),
                    buffers=tuple(buffers.index(node) for node in own[2]),
                    returns={results.index(node): i for i, node in enumerate(going) if node in results},
                )
            )
        return tuple(segments)

    def _with_copies(self, cut: Cut) -> list[fx.Node]:
        """The chunk's nodes and those it makes its own copy of, in the order of the program."""
        extra = self.regions.copied | (self.regions.weights if cut.kind == "expert" else frozenset())
        nodes, stack = set(cut.nodes), list(cut.nodes)
        while stack:
            for source in stack.pop().all_input_nodes:
                if source in extra and source not in nodes:
                    nodes.add(source)
                    stack.append(source)
        return sorted(nodes, key=self.regions.order.__getitem__)

    def _reads(self, nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """What comes from outside, in the order it is first used: inputs, parameters, buffers."""
        inside = set(nodes)
        found = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        params = [node for node in found if isinstance(self.recording.origins.get(node), FromParameter)]
        buffers = [node for node in found if isinstance(self.recording.origins.get(node), FromBuffer)]
        return [node for node in found if not self._state(node)], params, buffers

    def _state(self, node: fx.Node) -> bool:
        return isinstance(self.recording.origins.get(node), FromParameter | FromBuffer)

    def _name(self, node: fx.Node) -> str:
        origin = self.recording.origins[node]
        assert isinstance(origin, FromParameter | FromBuffer)
        return origin.name

    def _seen(self, target: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether others still read what a write would change."""
        return target not in inside or any(user in self.home and user not in inside for user in target.users)

    def _graph(self, nodes: Sequence[fx.Node], reads: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in reads}
        inside = set(nodes)
        modes = _Modes(graph)
        for node in nodes:
            modes.enter(self.recording.modes[node])
            fresh = {
                target: graph.call_method("clone", (copies[target],))
                for target in writes(node)
                if not self._state(target) and self._seen(target, inside)
            }
            copies[node] = graph.node_copy(node, lambda used, fresh=fresh: fresh.get(used) or copies[used])
            copies[node].meta = {"stack_trace": node.meta.get("stack_trace")}
            if relaxed_view(copies[node]):
                copies[node].target = "reshape"
        modes.enter(Mode())
        graph.output(tuple(copies[node] for node in results))
        return graph


class _Modes:
    """Writes the calls that change between modes into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.mode = Mode()
        self.open: list[fx.Node] = []

    def enter(self, mode: Mode) -> None:
        if mode == self.mode:
            return
        for _ in self.mode.autocast if mode.autocast != self.mode.autocast else ():
            self.graph.call_function(autocast_mode._exit_autocast, (self.open.pop(),))
        if mode.grad != self.mode.grad:
            self.graph.call_function(torch._C._set_grad_enabled, (mode.grad,))
        for arguments in mode.autocast if mode.autocast != self.mode.autocast else ():
            self.open.append(self.graph.call_function(autocast_mode._enter_autocast, arguments))  # type: ignore[arg-type]
        self.mode = mode


def _tensor(node: fx.Node) -> Tensor:
    result = value(node)
    assert isinstance(result, Tensor)
    return result


def _experts(chunk: Chunk) -> Experts | None:
    if chunk.kind != "expert":
        return None
    routed = [source for source in chunk.inputs if isinstance(source, Output)]
    assert len(routed) == len(chunk.inputs), "an expert region reads what `route` returns"
    return Experts(
        total=chunk.experts,
        rows=next(spec.shape[0] for spec in chunk.input_specs if spec.dynamic_rows),
        counts=tuple(source.index == 1 for source in routed),
    )


def _routed_sizes(regions: Regions, cuts: Sequence[Cut]) -> tuple[Sizes, Mapping[str, int]]:
    """The balanced size of every routed axis, and how many experts each marker and expert chunk has in all."""
    balanced: dict[str, int] = {}
    rows: set[str] = set()
    experts: dict[str, int] = {}
    areas: dict[fx.Node, int] = {}
    for cut in cuts:
        for node in cut.nodes:
            if marker(node) == "route":
                x, counts = (_tensor(source) for source in node.all_input_nodes[:2])
                routed, received = node.meta["example_value"]
                balanced[str(routed.shape[0])] = int(x.shape[0])
                balanced[str(received.shape[0])] = int(counts.shape[0])
                rows.add(str(routed.shape[0]))
                areas[node] = experts[cut.name] = int(counts.shape[0])
    for cut in cuts:
        if cut.kind == "expert":
            experts[cut.name] = areas[regions.experts[cut.nodes[0]]]
        elif cut.kind == "unroute":
            experts[cut.name] = areas[cut.nodes[0].args[1].args[0]]  # type: ignore[index,union-attr]
    return Sizes(balanced, frozenset(rows)), experts
