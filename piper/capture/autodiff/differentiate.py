"""Gives every chunk of a captured model its phases: explicit forward and backward code."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor, fx

from piper.capture.autodiff.code import Code, EagerCode, GraphCode, PhaseCode
from piper.capture.autodiff.compose import Composer
from piper.capture.autodiff.joint import Joint, UntraceableError, trace_joint
from piper.capture.autodiff.partition import Partitioner
from piper.capture.autodiff.remat import Choice, Chooser
from piper.capture.compile.cache import Cache
from piper.capture.compile.hashing import Source, structural_key
from piper.capture.compile.servers import CompileServers
from piper.capture.precision.fp8 import in_fp8
from piper.capture.trace.assemble import Body, CapturedChunk
from piper.capture.trace.routed_rows import check_rows
from piper.capture.trace.sizes import SymbolicSizes
from piper.capture.trace.trace import Traced
from piper.errors import CaptureError
from piper.ir.chunk import CapturedModel, Chunk, Output, Phase, PhaseSpec, TensorSpec
from piper.ir.chunk_options import CodeOptions, block_rows
from piper.process.gc_pause import no_collection


class CodeCache:
    """The code of one captured model's chunks, made when first asked for."""

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self.device, self.compiled = device, compiled
        self.joints: dict[str, Joint] = {}  # of bodies, each distinct one traced once
        self.codes: dict[str, Code] = {}
        self.checked: set[str] = set()  # keys of experts whose rows have been checked

    def find(
        self,
        piece: CapturedChunk,
        *,
        trained: Sequence[bool],  # of each parameter, whether it has a gradient
        tangents: Sequence[int],  # outputs that have a gradient
        options: CodeOptions,
    ) -> tuple[str, Code]:
        """Return the key and the code of a piece. Trace it if no equal piece has been traced."""
        assert piece.body is not None, "a marker has no code"
        budget = options.budget
        variant = f"compiled {self.compiled} budget {budget}" if self.compiled or budget is not None else ""
        variant += " flat" if options.flat and self.compiled else ""
        key = structural_key(piece.body, trained, tangents, self.device, variant)
        if key not in self.codes:
            try:
                self.codes[key] = self._code_of(self._joint_of(piece, trained, tangents), options)
            except UntraceableError as error:
                self.codes[key] = EagerCode(piece, trained, tangents, str(error))
        return key, self.codes[key]

    def _joint_of(self, piece: CapturedChunk, trained: Sequence[bool], tangents: Sequence[int]) -> Joint:
        """Return a piece's joint graph, joined from those of its segments if it has any."""
        assert piece.body is not None
        if not piece.segments:
            return self._traced(piece.body, trained, tangents)
        joints: list[Joint] = []
        wanted = {piece.makes[index] for index in tangents}  # values whose gradient is asked for
        is_trained = dict(zip(piece.reads[1], trained, strict=True))
        for segment in reversed(piece.segments):
            asked = [index for index, node in enumerate(segment.makes) if node in wanted]
            joint = self._traced(segment.body, [is_trained[node] for node in segment.reads[1]], asked)
            wanted.update(segment.reads[0][index] for index in joint.grad_inputs)
            joints.append(joint)
        return Composer(piece, joints[::-1], tangents).run()

    def _traced(self, body: Body, trained: Sequence[bool], tangents: Sequence[int]) -> Joint:
        experts = body.experts
        any_rows = body if experts is None else replace(body, experts=replace(experts, rows=0))
        key = structural_key(any_rows, trained, tangents, self.device)
        if key not in self.joints:
            self.joints[key] = trace_joint(body, trained, tangents, self.device, decompose=self.compiled)
        joint = self.joints[key]
        if experts is None:
            return joint
        rows = joint.sizes.rows  # of an expert region the joint serves any number of them
        return replace(joint, sizes=SymbolicSizes(dict.fromkeys(rows, experts.rows), rows))

    def _code_of(self, joint: Joint, options: CodeOptions) -> GraphCode:
        plain = Partitioner(joint)
        if not self.compiled and options.budget is None:
            return GraphCode(plain.run())
        choice = Chooser(plain, compiled=self.compiled).run(options.budget)
        cut = Partitioner(joint, choice.keep, choice.writers).run()
        return GraphCode(cut, choice, compiled=self.compiled, flat=options.flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured model: what the compiler knows of it, and its code."""

    outline: CapturedModel
    constants: Mapping[str, Tensor]
    codes: Mapping[str, Code]
    cache: Cache | None = None  # stores compiled code; None: code is not compiled
    built: dict[tuple[str, Phase], PhaseCode] = field(default_factory=dict, repr=False)
    servers: CompileServers = field(default_factory=CompileServers, repr=False)  # which compile it too
    building: Lock = field(default_factory=Lock, repr=False)

    @property
    def fallbacks(self) -> dict[str, str]:
        """Return the chunks that run under eager autograd, and why."""
        codes = {chunk.name: self.codes.get(chunk.key) for chunk in self.outline.chunks}
        return {name: code.why for name, code in codes.items() if isinstance(code, EagerCode)}

    @property
    def choices(self) -> dict[str, Choice]:
        """Return what chunks with a budget save."""
        codes = {chunk.name: self.codes.get(chunk.key) for chunk in self.outline.chunks}
        choices = {name: code.choice for name, code in codes.items() if isinstance(code, GraphCode)}
        return {name: choice for name, choice in choices.items() if choice and choice.budget is not None}

    def phase(self, key: str, phase: Phase) -> PhaseCode:
        """Return the code of a phase, called as its `PhaseSpec` says. Build it on the first call."""
        self.build([(key, phase)])
        return self.built[key, phase]

    def build(
        self, wanted: Iterable[tuple[str, Phase]], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Build phases that have no code yet, together. meanwhile: done while other processes compile."""
        with self.building, no_collection():
            missing = [each for each in dict.fromkeys(wanted) if each not in self.built]
            phases = {(key, phase): self.codes[key].build(phase) for key, phase in missing}
            if self.cache is None or not phases:
                meanwhile()
            else:
                phases = self._compiled(phases, self.cache, meanwhile)
            self.built.update(phases)

    def reasons(self) -> list[str]:
        """Return lines on chunks that fall back to eager autograd, products in fp8, and recomputation."""
        lines = [f"{name}: runs under eager autograd, because {why}" for name, why in self.fallbacks.items()]
        lines += [
            f"{chunk.name}: the products of {len(chunk.products)} weights run in {chunk.precision}"
            for chunk in self.outline.chunks
            if chunk.precision
        ]
        for name, choice in self.choices.items():
            assert choice.budget is not None
            kept = f"{name}: keeps {choice.kept_bytes} of {choice.all_bytes} bytes from F to its backward"
            if choice.kept_bytes <= choice.budget * choice.all_bytes:
                lines.append(f"{kept} (budget {choice.budget:g})")
            else:
                lines.append(f"{kept}, not {choice.budget:g} of them: the rest may not be made again")
        return lines

    def _compiled(
        self, phases: Mapping[tuple[str, Phase], PhaseCode], cache: Cache, meanwhile: Callable[[], None]
    ) -> dict[tuple[str, Phase], PhaseCode]:
        """Return the compiled form of phases, except of those that are no graph or compute nothing."""
        from piper.capture.compile.phases import compile_phases  # it takes a second to import

        chunks = {chunk.key: chunk.name for chunk in reversed(self.outline.chunks)}
        sources: dict[tuple[str, Phase], Source] = {}
        for (key, phase), built in phases.items():
            code = self.codes[key]
            if not isinstance(code, GraphCode) or not isinstance(built, fx.GraphModule):
                continue
            if any(node.op == "call_function" for node in built.graph.nodes):
                sources[key, phase] = Source(
                    module=built,
                    arguments=code.examples(phase),
                    chunk=chunks[key],
                    phase=phase,
                    in_place=code.in_place(phase),
                )
        return {**phases, **compile_phases(sources, cache, self.servers, meanwhile)}


@no_collection()
def differentiate(
    traced: Traced,
    options: Mapping[str, CodeOptions] | None = None,  # by chunk; others have none
    cache: Cache | None = None,  # of compiled code, of a trace with `compiled`; None: not compiled
    known: CodeCache | None = None,  # the code of chunks that are differentiated already, which grows
) -> Captured:
    """Split every chunk into F, B, BI and BW."""
    known = known or CodeCache(traced.device, compiled=traced.compiled)
    return replace(_Differentiator(traced, options or {}, known).run(), cache=cache)


class _Differentiator:
    """Goes through the chunks of a traced model once, from the last to the first."""

    def __init__(self, traced: Traced, options: Mapping[str, CodeOptions], known: CodeCache) -> None:
        self.traced, self.known = traced, known
        self.options = _options_by_chunk(traced.outline, options)
        self.parameters = {parameter.name: parameter for parameter in traced.outline.parameters}
        self.wanted: dict[str, set[int]] = {chunk.name: set() for chunk in traced.outline.chunks}
        self.routes = {chunk.name: chunk for chunk in traced.outline.chunks if chunk.kind == "route"}
        self.codes: dict[str, Code] = {}

    def run(self) -> Captured:
        """Differentiate chunks from the last to the first: each then knows which outputs need a gradient."""
        outline = self.traced.outline
        self.wanted[outline.loss.chunk].add(outline.loss.index)
        done: list[Chunk] = []
        for piece in reversed(self.traced.pieces):
            chunk = self._on_one_device(piece.chunk)
            chunk = self._marker(piece, chunk) if piece.body is None else self._compute(piece, chunk)
            for index in chunk.phases["B"].grad_inputs if "B" in chunk.phases else ():
                source = chunk.inputs[index]
                assert isinstance(source, Output), "only what a chunk computes has a gradient"
                self.wanted[source.chunk].add(source.index)
            done.append(chunk)
        return Captured(
            outline=replace(outline, chunks=tuple(reversed(done))),
            constants=self.traced.recording.constants,
            codes=self.codes,
        )

    def _on_one_device(self, chunk: Chunk) -> Chunk:
        """Return the chunk on one of the devices that share its experts, with the counts of those only."""
        options = self.options[chunk.name]
        if chunk.kind == "route":
            rows, counts = chunk.outputs
            return replace(chunk, outputs=(_received(rows, options), _fewer(counts, options)))
        specs = (
            _fewer(spec, options)
            if isinstance(source, Output) and source.chunk in self.routes and source.index == 1
            else _received(spec, options)
            for spec, source in zip(chunk.input_specs, chunk.inputs, strict=True)
        )
        return replace(chunk, input_specs=tuple(specs))

    def _marker(self, piece: CapturedChunk, chunk: Chunk) -> Chunk:
        """Give a marker its phases: it moves values forward and their gradients back, and has no code."""
        phases: dict[Phase, PhaseSpec] = {"F": PhaseSpec(inputs=tuple(range(len(chunk.inputs))))}
        if 0 in self.wanted[chunk.name] and piece.inputs[0].requires_grad:
            phases["B"] = PhaseSpec(tangents=(0,), grad_inputs=(0,))
        return replace(chunk, phases=phases)

    def _compute(self, piece: CapturedChunk, chunk: Chunk) -> Chunk:
        options = self.options[chunk.name]
        if chunk.kind == "expert":
            self._check_rows(piece, options)
            piece = _with_own_experts(piece, options)
        if options.products is not None:
            piece, chunk = in_fp8(piece), replace(chunk, precision=options.products)
        key, code = self.known.find(
            piece,
            trained=[self.parameters[name].trainable for name in chunk.params],
            tangents=sorted(self.wanted[chunk.name]),
            options=options,
        )
        self.codes[key] = code
        return replace(code.complete(chunk), key=key)

    def _check_rows(self, piece: CapturedChunk, experts: CodeOptions) -> None:
        """Refuse experts whose results depend on which rows and experts their device has, once if equal."""
        assert piece.body is not None, "experts have code"
        routes = {each.chunk for each in piece.chunk.inputs if isinstance(each, Output)} & self.routes.keys()
        own_rows = any(self.routes[name].own_rows for name in routes)
        if experts.ways == 1 and not own_rows:
            return
        apart = own_rows or experts.clones > 0 or experts.capacity is not None
        sharded = experts.ways > 1
        key = structural_key(piece.body, (), (), self.known.device, f"sharded {sharded} apart {apart}")
        if key not in self.known.checked:
            check_rows(piece.body, piece.chunk.name, sharded=sharded, apart=apart)
            self.known.checked.add(key)


def _options_by_chunk(outline: CapturedModel, options: Mapping[str, CodeOptions]) -> dict[str, CodeOptions]:
    """Return the options of each chunk: markers have those of the experts between them."""
    by_chunk = {chunk.name: options.get(chunk.name, CodeOptions()) for chunk in outline.chunks}
    for chunk in outline.chunks:
        if chunk.kind == "expert":
            _check_experts(outline, chunk, by_chunk[chunk.name].ways)
            for source in chunk.inputs:
                assert isinstance(source, Output)
                by_chunk[source.chunk] = by_chunk[chunk.name]
    for chunk in outline.chunks:
        if chunk.kind == "unroute":
            route = chunk.inputs[1]
            assert isinstance(route, Output)
            by_chunk[chunk.name] = by_chunk[route.chunk]
    return by_chunk


def _check_experts(outline: CapturedModel, chunk: Chunk, ways: int) -> None:
    assert chunk.experts % ways == 0, f"{chunk.experts} experts do not divide by {ways}"
    shapes = {parameter.name: parameter.shape for parameter in outline.parameters}
    shapes |= {buffer.name: buffer.shape for buffer in outline.buffers}
    for name in (*chunk.params, *chunk.buffers):
        if ways > 1 and shapes[name][:1] != (chunk.experts,):
            raise CaptureError(
                f"{name} cannot be sharded by expert",
                by=chunk.name,
                facts={"shape": str(list(shapes[name])), "experts": str(chunk.experts)},
                hint="between route and unroute use weights of shape [experts, ...]; use others outside",
            )


def _of_length(spec: TensorSpec, length: int) -> TensorSpec:
    """Return the spec of a tensor with another first axis."""
    nbytes = spec.nbytes // max(spec.shape[0], 1) * length
    return replace(spec, shape=(length, *spec.shape[1:]), nbytes=nbytes)


def _fewer(spec: TensorSpec, experts: CodeOptions) -> TensorSpec:
    """Return what one device has of a tensor with one entry for each expert: its share, and clones."""
    return _of_length(spec, spec.shape[0] // experts.ways + experts.clones) if spec.shape else spec


def _received(spec: TensorSpec, experts: CodeOptions) -> TensorSpec:
    """Return the rows that one device receives: as many as are sent evenly, or a block from each device."""
    block = block_rows(spec.shape[0], experts.ways, experts.capacity) if spec.dynamic_rows else 0
    return _of_length(spec, block * experts.ways) if block else spec


def _with_own_experts(piece: CapturedChunk, options: CodeOptions) -> CapturedChunk:
    """Return an expert chunk with the experts that one device has, its clones too, and the rows it gets."""
    body, ways = piece.body, options.ways
    assert body is not None and body.experts is not None, "only expert chunks receive rows"

    def own(tensor: Tensor, clones: int) -> Tensor:
        return tensor.new_empty(tensor.shape[0] // ways + clones, *tensor.shape[1:])

    params, buffers = body.params, body.buffers
    if ways > 1 or options.clones:
        params = tuple(own(param, options.clones) for param in params)
        buffers = tuple(own(buffer, 0) for buffer in buffers)
    rows = block_rows(body.experts.rows, ways, options.capacity) * ways or body.experts.rows
    experts = replace(body.experts, total=body.experts.total // ways + options.clones, rows=rows)
    return replace(piece, body=replace(body, params=params, buffers=buffers, experts=experts))
