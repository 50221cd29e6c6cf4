"""What each phase of each chunk must read and gives on each program, once for all microbatches."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import assert_never

from piper.ir.chunk import AxisPosition, Batch, Chunk, Constant, Output, Phase, Tags, bundles
from piper.ir.ids import show_part
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans
from piper.proof.covers import Cover, Covers, once
from piper.proof.specification import Layout, Specification, numbering
from piper.proof.symbolic_values import (
    NOTHING,
    Amount,
    Kind,
    SymbolicValue,
    SymbolTable,
    Terms,
    places_along,
    shown_cuts,
)

Entry = tuple[int, str | None, int]  # a symbol, its state or None for the microbatch, its amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The values that an instruction on a chunk must read, and those that it writes."""

    chunk: str
    reads: tuple[Entry, ...]
    writes: tuple[Entry, ...]
    sample_independent: frozenset[int] = frozenset()  # reads that are the same for all samples
    buffers: frozenset[int] = frozenset()  # reads of buffers that change during the step
    weights: tuple[tuple[int, Cover, str], ...] = ()
    # ^ of a backward, by bucket: the symbol of its gradients, their samples, and the suffix of their label
    mutated: tuple[str, ...] = ()


class Expectations:
    """Derives what instructions on the microbatches of a layout must read and write, by the specification."""

    def __init__(
        self, plans: Plans, spec: Specification, layout: Layout, covers: Covers, symbols: SymbolTable
    ) -> None:
        self.plans, self.spec, self.covers, self.amounts = plans, spec, covers, symbols.amounts
        self._number = symbols.number
        self.parts, self.meshes = layout
        self._parameters = {param.name: param for param in spec.outline.parameters}
        self._buckets = defaultdict[str, list[Bucket]](list)
        for bucket in plans.buckets.values():
            for name in bucket.chunks:
                self._buckets[name].append(bucket)

    @once
    def of_phase(self, program: int, name: str, phase: Phase) -> Expected | None:
        """Return what a phase of a chunk must read and write on a program. None: it must not run there."""
        chunk = self.spec.chunks.get(name)
        if chunk is None or chunk.kind in ("route", "unroute", "collective") or phase not in chunk.phases:
            return None
        cover = self.own_cover(program, chunk.name)
        if cover is None:
            return None
        spec = chunk.phases[phase]
        reads = [self._input(program, chunk, position) for position in spec.inputs]
        inputs = enumerate(spec.inputs)
        independent = [i for i, place in inputs if self.spec.is_sample_independent(chunk.name, place)]
        for bucket in self._buckets[chunk.name]:
            if any(piece.name in spec.params for piece in bucket.pieces):
                reads.append((self._number(SymbolicValue("param", bucket.name)), "old", NOTHING))
        buffers = [len(reads) + i for i, name in enumerate(spec.buffers) if name in self.spec.mutated]
        reads += [(self._number(SymbolicValue("buffer", name)), "own", NOTHING) for name in spec.buffers]
        used = [name for name, members in bundles(chunk).items() if set(members) & set(spec.saved)]
        reads += [self._of_chunk("saved", f"{chunk.name}.{name}", 0, cover) for name in used]
        reads += [self._of_chunk("carried", chunk.name, 0, cover)] if spec.carried else []
        reads += [self._tangent(program, chunk.name, index) for index in spec.tangents]
        found = Expected(
            chunk=chunk.name,
            reads=tuple(reads),
            writes=tuple(self._given(program, chunk, position) for position in spec.grad_inputs),
            sample_independent=frozenset(independent),
            buffers=frozenset(buffers),
            weights=tuple(
                (self.weights(bucket.name), cover, suffix)
                for bucket in self._buckets[chunk.name]
                if (suffix := suffix_of(bucket, spec.grad_params)) is not None
            ),
        )
        if phase == "F":
            outputs = (self._output(program, chunk.name, i, chunk.name) for i in range(len(chunk.outputs)))
            saved = (self._of_chunk("saved", f"{chunk.name}.{name}", 0, cover) for name in bundles(chunk))
            return replace(found, writes=(*outputs, *saved), mutated=chunk.mutated)
        if phase == "BI" and chunk.carried:
            return replace(found, writes=(*found.writes, self._of_chunk("carried", chunk.name, 0, cover)))
        return found

    @once
    def of_move(self, program: int, name: str, rows: bool, backward: bool) -> Expected | None:
        """Return what the exchange of a chunk's rows, or its collective, must read and write.

        None: there must be none.
        """
        chunk = self.spec.chunks.get(name)
        if chunk is None or chunk.has_code or rows != (chunk.collective is None):
            return None
        if self.spec.moves_nothing(name, backward=backward) or self.own_cover(program, name) is None:
            return None
        if backward and "B" not in chunk.phases:
            return None
        reads = [self._tangent(program, name, 0) if backward else self._input(program, chunk, 0)]
        reads += [self._splits(program, chunk)] if rows else []
        given = self._given(program, chunk, 0) if backward else self._output(program, name, 0, name)
        return Expected(chunk=name, reads=tuple(reads), writes=(given,))

    @once
    def of_counts(self, program: int, name: str) -> Expected | None:
        """Return what the counting of a route's rows must read and write. None: there must be no counts."""
        chunk = self.spec.chunks.get(name)
        if chunk is None or chunk.kind != "route" or self.spec.degree(name) == 1:
            return None
        if self.own_cover(program, name) is None:
            return None
        writes = [self._splits(program, chunk), self._output(program, name, 1, name)]
        if self.spec.graph.policy(name).may_overflow:
            writes.append(self._output(program, name, 2, name))
        return Expected(chunk=name, reads=(self._input(program, chunk, 1),), writes=tuple(writes))

    def own_cover(self, program: int, chunk: str) -> Cover | None:
        """Return the samples that a chunk works on, and which shards of them. None: it does not run there."""
        mesh = self.meshes[chunk]
        if not self.spec.routed(chunk):
            return self.covers.of_set(program, mesh.devices, mesh.degree, numbering(mesh))
        numbered, experts = numbering(mesh.by_expert), self.spec.experts(chunk)
        return self.covers.of_set(program, mesh.devices, mesh.degree, numbered, experts)

    def output_cover(
        self, program: int, producer: str, index: int, reader: str, *, backward: bool = False
    ) -> Cover:
        """Return the samples of an output, or of its gradient, that a reader's devices must hold."""
        numbered = self.spec.numbering_at(producer, index, reader, backward=backward)
        routed = self.spec.routed(producer)
        mesh = self.meshes[producer if routed else reader]
        experts = self.spec.experts(producer) if routed else None
        cover = self.covers.of_set(program, mesh.devices, mesh.degree, numbered, experts)
        assert cover is not None, f"{producer} and {reader} lie apart"
        return cover

    @once
    def weights(self, bucket: str) -> int:
        """Return the symbolic value of a bucket's gradients."""
        names = tuple(piece.name for piece in self.plans.buckets[bucket].pieces)
        return self._number(SymbolicValue("weights", names=names))

    @once
    def final_gradient(self, program: int, name: str) -> Terms:
        """Return the gradient that an update of a bucket must apply: each chunk, part and sample once."""
        bucket, sums = self.plans.buckets[name], dict[Cover, Amount]()
        pieces = [piece.name for piece in bucket.pieces]
        for chunk in dict.fromkeys(c for piece in pieces for c in self.spec.contributors.get(piece, ())):
            cover = self._complete(program, bucket, chunk)
            suffix = suffix_of(bucket, self.spec.chunks[chunk].phases["B"].grad_params)
            assert suffix is not None, f"{chunk} contributes to {name}"
            amount = self._over(chunk, suffix, everywhere=True)
            sums[cover] = self.amounts.add(sums.get(cover, NOTHING), amount)
        return tuple(sorted(sums.items()))

    def _complete(self, program: int, bucket: Bucket, chunk: str) -> Cover:
        """Return the samples and the shards over which a chunk's gradients of a bucket must be summed."""
        holding = self.spec.holding(chunk, self._parameters[bucket.pieces[0].name])
        experts = self.spec.experts(chunk) if self.spec.routed(chunk) else None
        every_share = holding.experts == 1
        return self.covers.own_share(
            program, bucket.devices, experts, holding.own, holding.summed, every_share=every_share
        )

    def sum_of(self, program: int, source: Output) -> Terms | None:
        """Return the sum of losses or weights of this layout that a program holds. None: it has none."""
        if self.own_cover(program, source.chunk) is None:
            return None
        cover = self.output_cover(program, source.chunk, source.index, source.chunk)
        return ((cover, self._over(source.chunk, "", everywhere=False)),)

    @once
    def _over(self, chunk: str, suffix: str, everywhere: bool) -> Amount:
        """Return the contributions of a chunk on the microbatches of this layout, or on all of them."""
        total = NOTHING
        for microbatch in self.spec.microbatches[chunk]:
            if everywhere or microbatch in self.parts:
                total = self.amounts.add(total, self.single(chunk, microbatch, suffix))
        return total

    def single(self, chunk: str, microbatch: Tags, suffix: str = "") -> Amount:
        """Return the contribution of a chunk on one microbatch."""
        return self.amounts.single(f"{chunk}{show_part(microbatch)}{suffix}")

    def _of_chunk(self, kind: Kind, name: str, index: int, cover: Cover) -> Entry:
        return self._number(SymbolicValue(kind, name, index, cover)), None, NOTHING

    def _output(self, program: int, producer: str, index: int, reader: str) -> Entry:
        """Return an output as a reader's devices hold it, or the devices of its own chunk."""
        cover = self.output_cover(program, producer, index, reader)
        return self._of_chunk("output", producer, index, cover)

    def _input(self, program: int, chunk: Chunk, position: int) -> Entry:
        """Return the value that a chunk must read at one of its inputs."""
        source = self.spec.resolve(chunk.inputs[position])
        mesh = self.meshes[chunk.name]
        devices = self.plans.plans[program].devices
        match source:
            case Constant(name=name):
                return self._number(SymbolicValue("constant", name)), "", NOTHING
            case AxisPosition(axis=axis, on_host=on_host):
                places = places_along(mesh.devices, mesh.axis(axis), devices)
                kind: Kind = "host_place" if on_host else "place"
                return self._number(SymbolicValue(kind, names=places)), "", NOTHING
            case Batch(field=field):
                cover = self.covers.of_set(program, mesh.devices, mesh.degree)
                assert cover is not None, f"{chunk.name} does not run here"
                cuts = shown_cuts(self.spec.cuts(chunk.name, field), mesh.devices, devices)
                return self._number(SymbolicValue("batch", field, 0, cover, cuts)), None, NOTHING
            case Output():
                return self._output(program, source.chunk, source.index, chunk.name)
            case _:
                assert_never(source)

    def _given(self, program: int, chunk: Chunk, position: int) -> Entry:
        """Return the gradient that a chunk computes for one of its inputs."""
        source = self.spec.resolve(chunk.inputs[position], backward=True)
        assert isinstance(source, Output), f"{chunk.name} differentiates {source}, which no chunk produced"
        cover = self.output_cover(program, source.chunk, source.index, chunk.name, backward=True)
        giver = self.amounts.single(f"input {position} of {chunk.name}")
        return self._number(SymbolicValue("gradient", source.chunk, source.index, cover)), None, giver

    def _tangent(self, program: int, chunk: str, index: int) -> Entry:
        """Return the whole gradient of an output: the sum over its readers."""
        if Output(chunk=chunk, index=index) == self.spec.outline.loss:
            return self._number(SymbolicValue("seed")), "", NOTHING
        total = NOTHING
        for reader, position in self.spec.readers.get((chunk, index), ()):
            total = self.amounts.add(total, self.amounts.single(f"input {position} of {reader}"))
        cover = self.output_cover(program, chunk, index, chunk, backward=True)
        return self._number(SymbolicValue("gradient", chunk, index, cover)), None, total

    def _splits(self, program: int, chunk: Chunk) -> Entry:
        """Return the row counts by which a route or its unroute moves rows."""
        source = chunk.inputs[1]
        route = chunk.name
        if chunk.kind == "unroute":
            assert isinstance(source, Output), "an unroute takes the counts of its route"
            route = source.chunk
        mesh = self.meshes[route]
        cover = self.covers.of_set(program, mesh.devices, mesh.degree, numbering(mesh))
        assert cover is not None, f"{route} and {chunk.name} lie apart"
        return self._of_chunk("splits", route, 0, cover)


def suffix_of(bucket: Bucket, grad_params: tuple[str, ...]) -> str | None:
    """Return what distinguishes contributions to some parameters of a bucket from those to all.

    None: a phase, which computes gradients for `grad_params`, contributes to none of them.
    """
    names = [piece.name for piece in bucket.pieces if piece.name in grad_params]
    if not names:
        return None
    return "" if len(names) == len(bucket.pieces) else f" for {', '.join(names)}"
