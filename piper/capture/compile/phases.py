"""Compiles the phases of chunks together: each distinct graph once, among them the layers that repeat."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from piper.capture.compile.cache import Cache
from piper.capture.compile.flat_gradients import flat_phase, source_in_place
from piper.capture.compile.inductor import Compiled, CompiledPhase, Source, compiled, loaded, name_of
from piper.capture.compile.repeats import PhasePiece, pieces_of
from piper.capture.compile.servers import CompileServers, start_kernel_compilers
from piper.ir.chunk import Phase

log = logging.getLogger("piper")
PhaseKey = tuple[str, Phase]  # the key of a chunk's code, and the phase


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
        self,
        pieces: Sequence[Compiled],
        calls: Sequence[PieceCall],
        results: Sequence[int],
        plain: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> None:
        """Keep compiled pieces and the order of their calls."""
        self.pieces, self.calls, self.results = tuple(pieces), tuple(calls), tuple(results)
        self.plain = plain

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
    meanwhile: Callable[[], None],
) -> dict[PhaseKey, CompiledPhase]:
    """Return the compiled forms of phases. Compile what is not in the cache yet, equal graphs once.

    meanwhile: is called while servers compile, or before anything is compiled here.
    """
    graphs: dict[str, Source] = {}
    cuts: dict[PhaseKey, tuple[Source, Sequence[PhasePiece], Sequence[str]]] = {}  # with names of code
    flat = {key: source_in_place(source) for key, source in asked.items() if source.in_place}
    for key, source in {**asked, **flat}.items():
        pieces = pieces_of(source.module)
        for node in source.module.graph.nodes:
            node.meta.pop("val", None)  # fakes, which are large
        known: dict[str, str] = {}  # the names of pieces by their keys: a name takes longer to find
        sources = [replace(source, module=piece.module, arguments=piece.arguments) for piece in pieces]
        for piece, own in zip(pieces, sources, strict=True):
            if piece.key not in known:
                known[piece.key] = name_of(own)
                graphs.setdefault(known[piece.key], own)
        names = [known[piece.key] for piece in pieces] or [name_of(source)]
        if not pieces:
            graphs.setdefault(names[0], source)
        cuts[key] = source, pieces, names
    codes = _compile_all(graphs, cache, servers, meanwhile)
    phases = {key: _phase_of(*cut, codes) for key, cut in cuts.items()}
    return {**phases, **{key: flat_phase(phases[key], asked[key], flat[key]) for key in flat}}


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
        compilation = servers.compile(missing, cache, report)
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
    used = list(dict.fromkeys(names))
    calls, results = _calls(source.module.graph, pieces, [used.index(name) for name in names])
    return CompiledPieces([codes[name] for name in used], calls, results, source.module)


def _calls(
    graph: fx.Graph, pieces: Sequence[PhasePiece], codes: Sequence[int]
) -> tuple[list[PieceCall], list[int]]:
    """Return the calls of a phase's pieces and its results. codes: the number of the code of each piece."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    numbers = {node: number for number, node in enumerate((*inputs, *(w for p in pieces for w in p.writes)))}
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    needed = set(results)
    calls: list[PieceCall] = []
    for piece, code in reversed([*zip(pieces, codes, strict=True)]):
        call = PieceCall(
            piece=code,
            reads=tuple(numbers[node] for node in piece.reads),
            ends=tuple(node not in needed for node in piece.reads),
            writes=tuple(numbers[node] for node in piece.writes),
        )
        calls.append(call)
        needed.update(piece.reads)
    return calls[::-1], [numbers[node] for node in results]
