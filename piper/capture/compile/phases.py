"""Compiles the phases of chunks together: each distinct graph once, among them the layers that repeat.

The pieces of a phase's graph run one after the other and together are the graph. A cut lies behind a product
where it can: products are kernels of their own, so that no fusion is lost there.
"""

import itertools
import logging
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from piper.capture.compile.cache import Cache
from piper.capture.compile.flat_gradients import FlatPhase, source_in_place
from piper.capture.compile.hashing import Source, digest_of, node_lines
from piper.capture.compile.inductor import Compiled, CompiledPhase, compiled, loaded, name_of
from piper.capture.compile.operators import mm_into
from piper.capture.compile.servers import Compilation, CompileServers, start_kernel_compilers
from piper.capture.trace.graph_walks import interval_sums, repeated_runs
from piper.ir.chunk import Phase

log = logging.getLogger("piper")
PhaseKey = tuple[str, Phase]  # the key of a chunk's code, and the phase
FEWEST = 3  # layers that are equal
SMALLEST = 8  # operations of a layer
WORTH = 200  # operations that need not be compiled again, for which a phase is cut
PERIODS = 16  # lengths of a layer that are tried
_PRODUCTS = re.compile(  # operations that Inductor does not fuse with what follows
    r"piper::mm_into|aten::(mm|addmm|bmm|baddbmm|_scaled_mm|convolution|"
    r"_scaled_dot_product_(flash_attention(_for_cpu)?|efficient_attention|cudnn_attention))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePiece:
    """A run of a graph's operations as a module of its own."""

    module: fx.GraphModule
    arguments: tuple[Tensor, ...]  # fakes
    reads: tuple[fx.Node, ...]  # of the whole graph, in the order of the arguments
    writes: tuple[fx.Node, ...]  # in the order of its results
    key: str  # equal for pieces that do the same


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCall:
    """One call of a compiled piece. Values go by number: first the phase's arguments, then the results."""

    piece: int
    reads: tuple[int, ...]
    ends: tuple[bool, ...]  # whether nothing reads that value later
    writes: tuple[int, ...]


class CompiledPieces(CompiledPhase):
    """A phase whose repeated layers are compiled once, and called as a `Compiled` one is."""

    def __init__(
        self, pieces: Sequence[Compiled], calls: Sequence[PieceCall], results: Sequence[int]
    ) -> None:
        """Keep compiled pieces and the order of their calls."""
        self.pieces, self.calls, self.results = tuple(pieces), tuple(calls), tuple(results)

    def boxed(self, arguments: list[Tensor]) -> list[Tensor]:
        """Call the pieces in order. Values are let go with their last use, arguments as well."""
        values = dict(enumerate(arguments))
        arguments.clear()
        for call in self.calls:
            given = [
                values.pop(number) if ends else values[number]
                for number, ends in zip(call.reads, call.ends, strict=True)
            ]
            values.update(zip(call.writes, self.pieces[call.piece].boxed(given), strict=True))
        return [values[number] for number in self.results]

    def __reduce__(self) -> tuple[type["CompiledPieces"], tuple[object, ...]]:
        return CompiledPieces, (self.pieces, self.calls, self.results)


def compile_phases(
    asked: Mapping[PhaseKey, Source],
    cache: Cache,
    servers: CompileServers,
    meanwhile: Callable[[], None],  # called while servers compile, before anything is compiled here
) -> dict[PhaseKey, CompiledPhase]:
    """Return the compiled forms of phases. Compile what is not in the cache yet, equal graphs once."""
    graphs: dict[str, Source] = {}
    cuts: dict[PhaseKey, tuple[Source, Sequence[PhasePiece], Sequence[str]]] = {}  # with names of code
    for key, plain in asked.items():
        source = source_in_place(plain) if plain.in_place else plain
        pieces = pieces_of(source.module)
        for node in source.module.graph.nodes:
            node.meta.pop("val", None)  # fakes, which are large
        distinct = {  # by key: a name takes longer to find
            piece.key: replace(source, module=piece.module, arguments=piece.arguments) for piece in pieces
        } or {"": source}
        names = {piece_key: name_of(own) for piece_key, own in distinct.items()}
        for piece_key, own in distinct.items():
            graphs.setdefault(names[piece_key], own)
        cuts[key] = source, pieces, [names[piece.key] for piece in pieces] or [names[""]]
    codes = _compile_all(graphs, cache, servers, meanwhile)
    phases: dict[PhaseKey, CompiledPhase] = {}
    for key, plain in asked.items():
        phase = _phase_of(*cuts[key], codes)
        if plain.in_place:
            targets = cuts[key][0].arguments[len(plain.arguments) : -1]
            like = [(target.shape, target.dtype) for target in targets]
            phase = FlatPhase(phase, plain.in_place, like, targets[0].device)
        phase.plain = plain.module
        phases[key] = phase
    return phases


def _compile_all(
    graphs: Mapping[str, Source], cache: Cache, servers: CompileServers, meanwhile: Callable[[], None]
) -> dict[str, Compiled]:
    """Return the compiled forms of graphs by their names. Servers, if there are any, compile some of them."""
    log.debug("Loading compiled code")
    codes = {name: code for name, source in graphs.items() if (code := loaded(name, source, cache))}
    missing = {name: source for name, source in graphs.items() if name not in codes}
    numbers = itertools.count(1)
    if any(argument.is_cuda for source in missing.values() for argument in source.arguments):
        start_kernel_compilers()

    def report(name: str) -> None:
        number, source = next(numbers), missing[name]
        what = f"Compiling graph {number} of {len(missing)}: {source.phase} of {source.chunk}"
        log.info(what, extra={"done": number - 1, "total": len(missing)})

    try:
        compilation = Compilation(servers.processes, missing, cache, report)
        meanwhile()
        for name in compilation.take():
            codes[name] = compiled(name, missing[name], cache)
        compilation.wait()
    finally:
        servers.close()
    for name, source in missing.items():
        if name not in codes:  # a server has it, or failed: then the error is found here
            codes[name] = loaded(name, source, cache) or compiled(name, source, cache)
    return codes


def _phase_of(
    source: Source, pieces: Sequence[PhasePiece], names: Sequence[str], codes: Mapping[str, Compiled]
) -> CompiledPhase:
    """Return a phase's code, made of the code of its pieces. No pieces: it stays whole."""
    if not pieces:
        return codes[names[0]]
    used, graph = list(dict.fromkeys(names)), source.module.graph
    inputs = graph.find_nodes(op="placeholder")
    numbers = {node: number for number, node in enumerate((*inputs, *(w for p in pieces for w in p.writes)))}
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    needed = set(results)
    calls: list[PieceCall] = []
    for piece, name in reversed([*zip(pieces, names, strict=True)]):
        call = PieceCall(
            piece=used.index(name),
            reads=tuple(numbers[node] for node in piece.reads),
            ends=tuple(node not in needed for node in piece.reads),
            writes=tuple(numbers[node] for node in piece.writes),
        )
        calls.append(call)
        needed.update(piece.reads)
    ordered, returned = calls[::-1], [numbers[node] for node in results]
    return CompiledPieces([codes[name] for name in used], ordered, returned)


def pieces_of(module: fx.GraphModule) -> list[PhasePiece]:
    """Return the pieces of a graph, whose nodes have their values; none where cutting it is not worth it."""
    body = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if len(body) < WORTH or not all(map(plain, body)) or not all(map(fixed, module.graph.nodes)):
        return []
    literals = [fx.node.map_arg((node.args, node.kwargs), lambda argument: "%") for node in body]
    labels = [  # what an operation does, wherever it stands
        f"{node.target} {given} {described(node.meta.get('val'))}"
        for node, given in zip(body, literals, strict=True)
    ]
    cuts = sorted({0, len(body), *cuts_of(body, labels)})
    runs = [body[start:stop] for start, stop in itertools.pairwise(cuts)]
    known: dict[str, fx.GraphModule] = {}
    pieces = [piece_of(module, run, known) for run in runs]
    distinct = {piece.key: len(run) for piece, run in zip(pieces, runs, strict=True)}
    return pieces if len(body) - sum(distinct.values()) >= WORTH else []


def plain(node: fx.Node) -> bool:
    """Return whether an operation can move into a module of its own: a call that changes no value."""
    if node.op != "call_function":
        return False
    if node.target is mm_into:
        return not node.users
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def fixed(node: fx.Node) -> bool:
    """Return whether all sizes of a value are known."""
    value = node.meta.get("val")
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def described(value: object) -> str:
    """Return the type and layout of a value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, tuple | list):
        return " ".join(map(described, value))
    return repr(value)


def cuts_of(body: Sequence[fx.Node], labels: Sequence[str], offset: int = 0) -> Iterator[int]:
    """Yield the places between layers, of the longest run of equal layers and then of what lies around it."""
    run = longest_run(labels)
    if run is None:
        return
    start, stop, period = run.start, run.stop, run.step
    nbytes, others = crossing(body)

    def cost(place: int) -> tuple[bool, bool, bool, int]:
        """Return what a cut costs: it is impossible, loses layers or fusions, and the bytes that cross it."""
        lost = (stop - start) // period - (stop - place) // period
        inside = place + period  # a place with layers on both sides
        fused = not ends_kernel(body[inside - 1])
        return others[inside] > 0, lost > 1, fused, nbytes[inside]

    first = min(range(start, start + period), key=cost)
    places = list(range(first, stop + 1, period))
    yield from (offset + place for place in places)
    yield from cuts_of(body[: places[0]], labels[: places[0]], offset)
    yield from cuts_of(body[places[-1] :], labels[places[-1] :], offset + places[-1])


def longest_run(labels: Sequence[str]) -> range | None:
    """Return the longest run of labels; of nearly equal ones that of the shortest period."""
    best: range | None = None
    for run in repeated_runs(labels, likely_periods(labels)):
        longer = best is None or run.stop - run.start > best.stop - best.start + run.step
        if run.stop - run.start >= FEWEST * run.step and longer:
            best = run
    return best


def likely_periods(labels: Sequence[str]) -> list[int]:
    """Return the most common distances between equal operations, the shortest first."""
    last: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for place, label in enumerate(labels):
        distances[place - last.get(label, place)] += 1
        last[label] = place
    return sorted([period for period, _ in distances.most_common() if period >= SMALLEST][:PERIODS])


def crossing(body: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """Return what goes on past each place of a run of operations: bytes of tensors, values that are none."""
    places = {node: place for place, node in enumerate(body)}
    nbytes, others = [], []
    for node, place in places.items():
        last = max((places[user] for user in node.users if user in places), default=place)
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            nbytes.append((place + 1, last, value.nbytes))
        else:
            others.append((place + 1, last, 1))
    return interval_sums(len(body), nbytes), interval_sums(len(body), others)


def ends_kernel(node: fx.Node) -> bool:
    """Return whether an operation, or the one whose result it takes, is a kernel of its own."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    called = node.target.name().partition(".")[0] if isinstance(node.target, torch._ops.OpOverload) else ""
    return _PRODUCTS.fullmatch(called) is not None


def piece_of(module: fx.GraphModule, run: Sequence[fx.Node], known: dict[str, fx.GraphModule]) -> PhasePiece:
    """Return a run of operations as a module of its own, or as an equal one that is known already."""
    inside = set(run)
    reads = list(dict.fromkeys(read for node in run for read in node.all_input_nodes if read not in inside))
    writes = [node for node in run if any(user not in inside for user in node.users)]
    arguments = tuple(node.meta["val"] for node in reads)
    numbers = {node: number for number, node in enumerate(reads)}
    lines = [*map(described, arguments), *node_lines(run, module, numbers)]
    key = digest_of([*lines, " ".join(str(numbers[node]) for node in writes)])
    if key not in known:
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"read_{number}") for number, node in enumerate(reads)}
        for node in run:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
        graph.output(tuple(copies[node] for node in writes))
        known[key] = fx.GraphModule(module, graph)
    return PhasePiece(
        module=known[key], arguments=arguments, reads=tuple(reads), writes=tuple(writes), key=key
    )
