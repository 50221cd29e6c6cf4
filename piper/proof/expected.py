"""What each phase of each chunk must read and gives on each program, once for all microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from piper.ir.chunk import AxisPosition, Batch, Chunk, Constant, HostPlace, Output, Phase, Tags, bundles
from piper.ir.ids import show_part
from piper.plan.plan import Bucket, Plans
from piper.proof.amounts import NOTHING, Amount, Amounts
from piper.proof.covers import Cover, Covers
from piper.proof.meshes import numbering
from piper.proof.specification import PartMeshes, Specification
from piper.proof.symbolic_values import Kind, SymbolicValue, SymbolTable, Terms, places_along, shown_cuts

Entry = tuple[int, str | None, int]  # a symbol, its state or None for the microbatch, its amount


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGradients:
    """The gradients that a backward computes for one bucket."""

    symbol: int
    cover: Cover
    suffix: str  # of the contribution's label: which parameters, where not all of the bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The values that an instruction on a chunk must read, and those that it writes."""

    chunk: str
    reads: tuple[Entry, ...]
    writes: tuple[Entry, ...]
    sample_independent: frozenset[int] = (
        frozenset()
    )  # reads that are the same for all samples: any slice will do
    buffers: frozenset[int] = frozenset()  # reads of buffers that change during the step
    weights: tuple[BucketGradients, ...] = ()
    mutated: tuple[str, ...] = ()


class Expectations:
    """Derives what instructions on the microbatches of a layout must read and write, by the specification."""

    def __init__(
        self,
        plans: Plans,
        spec: Specification,
        layout: PartMeshes,
        covers: Covers,
        amounts: Amounts,
        symbols: SymbolTable,
    ) -> None:
        self.plans, self.spec, self.covers, self.amounts, self.symbols = plans, spec, covers, amounts, symbols
        self.parts, self.meshes = layout.parts, layout.meshes
        self._phases: dict[tuple[int, str, str], Expected | None] = {}
        self._finals: dict[tuple[int, str], Terms] = {}
        self._sums: dict[tuple[str, int, str], Amount] = {}
        self._weights: dict[str, int] = {}  # by bucket
        self._parameters = {param.name: param for param in spec.outline.parameters}
        self._buckets: dict[str, list[Bucket]] = {name: [] for name in spec.chunks}
        for bucket in plans.buckets.values():
            for name in bucket.chunks:
                self._buckets.setdefault(name, []).append(bucket)

    def of_phase(self, program: int, chunk: str, phase: Phase) -> Expected | None:
        """Return what a phase must read and write on a program. None: it must not run there."""
        key = (program, chunk, phase)
        if key not in self._phases:
            self._phases[key] = self._of_phase(program, self.spec.chunks.get(chunk), phase)
        return self._phases[key]

    def _of_phase(self, program: int, chunk: Chunk | None, phase: Phase) -> Expected | None:
        if chunk is None or chunk.kind in ("route", "unroute", "collective") or phase not in chunk.phases:
            return None
        cover = self.own_cover(program, chunk.name)
        if cover is None:
            return None
        spec = chunk.phases[phase]
        reads = [self._input(program, chunk, position) for position in spec.inputs]
        independent = [
            i
            for i, position in enumerate(spec.inputs)
            if self.spec.is_sample_independent(chunk.name, position)
        ]
        for bucket in self._buckets[chunk.name]:
            if any(piece.name in spec.params for piece in bucket.pieces):
                reads.append((self._number(SymbolicValue("param", bucket.name)), "old", NOTHING))
        buffers = [len(reads) + i for i, name in enumerate(spec.buffers) if name in self.spec.mutated]
        reads += [(self._number(SymbolicValue("buffer", name)), "own", NOTHING) for name in spec.buffers]
        used = [name for name, members in bundles(chunk).items() if set(members) & set(spec.saved)]
        reads += [self._of_chunk("saved", f"{chunk.name}.{name}", 0, cover) for name in used]
        reads += [self._of_chunk("carried", chunk.name, 0, cover)] if spec.carried else []
        reads += [self._tangent(program, chunk.name, index) for index in spec.tangents]
        forward = phase == "F"
        return Expected(
            chunk=chunk.name,
            reads=tuple(reads),
            writes=tuple(
                self._forward(program, chunk, cover)
                if forward
                else self._backward(program, chunk, phase, cover)
            ),
            sample_independent=frozenset(independent),
            buffers=frozenset(buffers),
            weights=() if forward else tuple(self._given_weights(chunk, phase, cover)),
            mutated=chunk.mutated if forward else (),
        )

    def _forward(self, program: int, chunk: Chunk, cover: Cover) -> Iterator[Entry]:
        """Yield what a forward writes, except buffers."""
        for index in range(len(chunk.outputs)):
            yield self._output(program, chunk.name, index, chunk.name)
        for name in bundles(chunk):
            yield self._of_chunk("saved", f"{chunk.name}.{name}", 0, cover)

    def _backward(self, program: int, chunk: Chunk, phase: Phase, cover: Cover) -> Iterator[Entry]:
        """Yield what a backward writes, except the gradients of parameters."""
        for position in chunk.phases[phase].grad_inputs:
            yield self._given(program, chunk, position)
        if phase == "BI" and chunk.carried:
            yield self._of_chunk("carried", chunk.name, 0, cover)

    def _given_weights(self, chunk: Chunk, phase: Phase, cover: Cover) -> Iterator[BucketGradients]:
        """Yield the gradients of parameters that a backward computes, bucket by bucket."""
        for bucket in self._buckets[chunk.name]:
            names = given_names(bucket, chunk.phases[phase].grad_params)
            if names:
                yield BucketGradients(symbol=self.weights(bucket), cover=cover, suffix=partial(bucket, names))

    def of_exchange(self, program: int, chunk: str, outward: bool) -> Expected | None:
        """Return what an exchange of rows must read and write. None: there must be no exchange."""
        key = (program, chunk, "out" if outward else "back")
        if key not in self._phases:
            captured = self.spec.chunks.get(chunk)
            sharded = (
                captured is not None and captured.kind in ("route", "unroute") and self.spec.degree(chunk) > 1
            )
            self._phases[key] = (
                self._of_exchange(program, captured, outward) if captured and sharded else None
            )
        return self._phases[key]

    def _of_exchange(self, program: int, chunk: Chunk, outward: bool) -> Expected | None:
        if self.own_cover(program, chunk.name) is None:
            return None
        splits = self._splits(program, chunk)
        if outward == (chunk.kind == "route"):  # the forward of a route goes out, that of an unroute back
            reads = (self._input(program, chunk, 0), splits)
            return Expected(
                chunk=chunk.name, reads=reads, writes=(self._output(program, chunk.name, 0, chunk.name),)
            )
        if "B" not in chunk.phases:
            return None
        reads = (self._tangent(program, chunk.name, 0), splits)
        return Expected(chunk=chunk.name, reads=reads, writes=(self._given(program, chunk, 0),))

    def of_collective(self, program: int, chunk: str, *, backward: bool) -> Expected | None:
        """Return what a collective inside a region must read and write. None: there must be none."""
        key = (program, chunk, "gradient" if backward else "value")
        if key not in self._phases:
            captured = self.spec.chunks.get(chunk)
            self._phases[key] = self._of_collective(program, captured, backward) if captured else None
        return self._phases[key]

    def _of_collective(self, program: int, chunk: Chunk, backward: bool) -> Expected | None:
        moves = chunk.collective is not None and not self.spec.moves_nothing(chunk.name, backward=backward)
        if not moves or self.own_cover(program, chunk.name) is None or (backward and "B" not in chunk.phases):
            return None
        if backward:
            read, written = self._tangent(program, chunk.name, 0), self._given(program, chunk, 0)
        else:
            read, written = self._input(program, chunk, 0), self._output(program, chunk.name, 0, chunk.name)
        return Expected(chunk=chunk.name, reads=(read,), writes=(written,))

    def of_counts(self, program: int, chunk: str) -> Expected | None:
        """Return what the counting of a route's rows must read and write. None: there must be no counts."""
        key = (program, chunk, "counts")
        if key not in self._phases:
            captured = self.spec.chunks.get(chunk)
            route = captured is not None and captured.kind == "route" and self.spec.degree(chunk) > 1
            cover = self.own_cover(program, chunk) if route else None
            self._phases[key] = None
            if captured is not None and cover is not None:
                self._phases[key] = Expected(
                    chunk=chunk,
                    reads=(self._input(program, captured, 1),),
                    writes=(self._splits(program, captured), self._output(program, chunk, 1, chunk)),
                )
        return self._phases[key]

    def own_cover(self, program: int, chunk: str) -> Cover | None:
        """Return the samples that a chunk works on, and which shards of them. None: it does not run there."""
        mesh = self.meshes[chunk]
        degree = self.spec.degree(chunk) if self.spec.routed(chunk) else 1
        return self.covers.of_set(program, mesh.devices, degree, mesh.degree, numbering(mesh))

    def output_cover(
        self, program: int, producer: str, index: int, reader: str, *, backward: bool = False
    ) -> Cover:
        """Return the samples of an output, or of its gradient, that a reader's devices must hold."""
        numbered = self.spec.numbering_at(producer, index, reader, backward=backward)
        routed = self.spec.routed(producer)
        mesh = self.meshes[producer if routed else reader]
        degree = self.spec.degree(producer) if routed else 1
        cover = self.covers.of_set(program, mesh.devices, degree, mesh.degree, numbered)
        assert cover is not None, f"{producer} and {reader} lie apart"
        return cover

    def weights(self, bucket: Bucket) -> int:
        """Return the symbolic value of a bucket's gradients."""
        number = self._weights.get(bucket.name)
        if number is None:
            symbol = SymbolicValue("weights", names=tuple(piece.name for piece in bucket.pieces))
            number = self._weights[bucket.name] = self._number(symbol)
        return number

    def final_gradient(self, program: int, bucket: Bucket) -> Terms:
        """Return the gradient that an update must apply: each chunk, microbatch and sample once."""
        key = (program, bucket.name)
        if key not in self._finals:
            sums: dict[Cover, Amount] = {}
            pieces = [piece.name for piece in bucket.pieces]
            chunks = dict.fromkeys(c for name in pieces for c in self.spec.contributors.get(name, ()))
            for chunk in chunks:
                cover = self._complete(program, bucket, chunk)
                names = given_names(bucket, self.spec.chunks[chunk].phases["B"].grad_params)
                amount = self._over(chunk, self.spec.microbatches[chunk], partial(bucket, names))
                sums[cover] = self.amounts.add(sums.get(cover, NOTHING), amount)
            self._finals[key] = tuple(sorted(sums.items()))
        return self._finals[key]

    def _complete(self, program: int, bucket: Bucket, chunk: str) -> Cover:
        """Return the samples and the shards over which a chunk's gradients of a bucket must be summed."""
        degree = self.spec.degree(chunk) if self.spec.routed(chunk) else 1
        holding = self.spec.holding(chunk, self._parameters[bucket.pieces[0].name])
        if not holding.own and not holding.summed and holding.experts == 1:
            return self.covers.everything(program, degree)
        return self.covers.own_share(
            program,
            bucket.devices,
            max(degree, holding.experts),
            holding.shared,
            holding.own,
            holding.summed,
            every_share=holding.experts == 1,
        )

    def sum_of(self, program: int, source: Output) -> Terms | None:
        """Return the sum of losses or weights of this layout that a program holds. None: it has none."""
        if self.own_cover(program, source.chunk) is None:
            return None
        cover = self.output_cover(program, source.chunk, source.index, source.chunk)
        mine = tuple(part for part in self.spec.microbatches[source.chunk] if part in self.parts)
        return ((cover, self._over(source.chunk, mine, "")),)

    def _over(self, chunk: str, microbatches: Sequence[Tags], suffix: str) -> Amount:
        key = (chunk, len(microbatches), suffix)  # those of this layout, or all of them
        if key not in self._sums:
            total = NOTHING
            for microbatch in microbatches:
                total = self.amounts.add(total, self.single(chunk, microbatch, suffix))
            self._sums[key] = total
        return self._sums[key]

    def single(self, chunk: str, microbatch: Tags, suffix: str = "") -> Amount:
        """Return the contribution of a chunk on one microbatch."""
        return self.amounts.single(f"{chunk}{show_part(microbatch)}{suffix}")

    def _number(self, symbol: SymbolicValue) -> int:
        return self.symbols.number(symbol)

    def _of_chunk(self, kind: str, name: str, index: int, cover: Cover) -> Entry:
        return self._number(SymbolicValue(kind, name, index, cover)), None, NOTHING  # type: ignore[arg-type]

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
            case AxisPosition(axis=axis) | HostPlace(axis=axis):
                places = places_along(mesh.devices, mesh.axis(axis), devices)
                kind: Kind = "place" if isinstance(source, AxisPosition) else "host_place"
                return self._number(SymbolicValue(kind, names=places)), "", NOTHING
            case Batch(field=field):
                cover = self.covers.of_set(program, mesh.devices, 1, mesh.degree)
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
        if self.spec.is_loss(chunk, index):
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
        cover = self.covers.of_set(program, mesh.devices, 1, mesh.degree, numbering(mesh))
        assert cover is not None, f"{route} and {chunk.name} lie apart"
        return self._of_chunk("splits", route, 0, cover)


def given_names(bucket: Bucket, grad_params: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters of a bucket for which a phase computes gradients."""
    return tuple(piece.name for piece in bucket.pieces if piece.name in grad_params)


def partial(bucket: Bucket, names: tuple[str, ...]) -> str:
    """Return a label that distinguishes contributions to some parameters of a bucket from those to all."""
    return "" if len(names) == len(bucket.pieces) else f" for {', '.join(names)}"
