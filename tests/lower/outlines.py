"""Outlines drawn by hand: each chunk says what it reads, and the drawing works out who needs a gradient."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from piper.ir.chunk import (
    AxisPosition,
    Batch,
    Buffer,
    CapturedModel,
    Chunk,
    Constant,
    Output,
    Parameter,
    Phase,
    PhaseSpec,
    Source,
    Tags,
    TensorSpec,
)
from piper.ir.graph import Graph
from piper.lower.validate import parts_of

ROWS = 1009  # stands for the samples of a slice: a prime that nothing else is
WIDTH = 6
EXPERTS = 4


def tensor(*shape: int, dtype: str = "float32") -> TensorSpec:
    """A value of some shape."""
    size = 8 if dtype == "int64" else 4
    for axis in shape:
        size *= axis
    return TensorSpec(shape=shape, dtype=dtype, nbytes=size)


HIDDEN = tensor(ROWS, WIDTH)
SCALAR = tensor()
TABLE = tensor(3, WIDTH, dtype="int64")  # the same for all samples
COUNTS = tensor(EXPERTS, dtype="int64")


@dataclass(slots=True)
class Drawing:
    """An outline under construction, without gradients yet."""

    chunks: list[Chunk] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    unreached: set[tuple[str, str]] = field(
        default_factory=set
    )  # (chunk, parameter): used, without a gradient

    def param(self, name: str, *lead: int, frozen: bool = False) -> str:
        """A parameter, once."""
        made = Parameter(name=name, shape=(*lead, WIDTH), dtype="float32", trainable=not frozen)
        self.parameters.setdefault(name, made)
        return name

    def buffer(self, name: str, lead: int = 1) -> str:
        """A buffer, once."""
        self.buffers[name] = Buffer(name=name, shape=(lead, WIDTH), dtype="float32", nbytes=4 * lead * WIDTH)
        return name

    def chunk(
        self,
        name: str,
        tags: Tags,
        reads: Iterable[Source],
        params: Iterable[str] = (),
        outputs: Iterable[TensorSpec] = (HIDDEN,),
        buffers: Iterable[str] = (),
        mutated: Iterable[str] = (),
        kind: str = "compute",
    ) -> Output:
        """A chunk; its first output."""
        reads, outputs = tuple(reads), tuple(outputs)
        self.chunks.append(
            Chunk(
                name=name,
                tags=tags,
                kind=kind,  # type: ignore[arg-type]
                fixed=tuple(index for index, spec in enumerate(outputs) if spec == TABLE),
                key=name,
                inputs=reads,
                input_specs=tuple(map(self.spec, reads)),
                params=tuple(params),
                buffers=tuple(buffers),
                mutated=tuple(mutated),
                outputs=outputs,
                experts=0 if kind == "compute" else EXPERTS,
            )
        )
        return Output(chunk=name, index=0)

    def spec(self, source: Source) -> TensorSpec:
        """What a source gives."""
        match source:
            case Batch():
                return HIDDEN
            case Constant():
                return TABLE
            case Output():
                return next(c for c in self.chunks if c.name == source.chunk).outputs[source.index]
            case AxisPosition():
                raise AssertionError("these outlines are not divided")

    def region(self, owner: Output, tags: Tags, params: Iterable[str], buffers: Iterable[str] = ()) -> Output:
        """An expert region, route to unroute; the owner's second output is the counts."""
        name = f"{owner.chunk} EP={tags[-1][1]}"
        counts = Output(chunk=owner.chunk, index=1)
        rows = replace(HIDDEN, dynamic_rows=True)
        self.chunk(f"{name} route", tags, [owner, counts], outputs=[rows, COUNTS], kind="route")
        routed, arrived = Output(chunk=f"{name} route", index=0), Output(chunk=f"{name} route", index=1)
        out = self.chunk(name, tags, [routed, arrived], params, [rows], buffers, kind="expert")
        return self.chunk(f"{name} unroute", tags, [out, arrived], kind="unroute")

    def outline(self, loss: Output, weight: Output | None = None, halves: str = "carried") -> CapturedModel:
        """The outline, with every phase; `halves` says how input gradients hand over to weight gradients."""
        return CapturedModel(
            chunks=tuple(differentiated(self, loss, halves)),
            loss=loss,
            weight=weight,
            parameters=tuple(self.parameters.values()),
            buffers=tuple(self.buffers.values()),
            batch={"x": HIDDEN, "y": HIDDEN},
            rows=ROWS,
        )


def differentiated(drawing: Drawing, loss: Output, halves: str) -> list[Chunk]:
    """The chunks with phases: gradients flow from the loss to what trains, and nowhere else."""
    moving: set[tuple[str, int]] = set()  # the outputs that depend on something trained
    for chunk in drawing.chunks:
        trains = any(
            drawing.parameters[p].trainable and (chunk.name, p) not in drawing.unreached for p in chunk.params
        )
        if trains or any((s.chunk, s.index) in moving for s in chunk.inputs if isinstance(s, Output)):
            moving |= {(chunk.name, i) for i, spec in enumerate(chunk.outputs) if spec.dtype == "float32"}
    wanted = {(loss.chunk, loss.index)} & moving
    done: list[Chunk] = []
    for chunk in reversed(drawing.chunks):
        grads = tuple(
            i for i, s in enumerate(chunk.inputs) if isinstance(s, Output) and (s.chunk, s.index) in moving
        )
        tangents = tuple(i for i in range(len(chunk.outputs)) if (chunk.name, i) in wanted)
        finished = with_phases(drawing, chunk, grads if tangents else (), tangents, halves)
        if "B" in finished.phases:
            sources = [chunk.inputs[i] for i in finished.phases["B"].grad_inputs]
            wanted |= {(s.chunk, s.index) for s in sources if isinstance(s, Output)}
        done.append(finished)
    return done[::-1]


def with_phases(
    drawing: Drawing, chunk: Chunk, grads: tuple[int, ...], tangents: tuple[int, ...], halves: str
) -> Chunk:
    """One chunk with its phases."""
    read = tuple(range(len(chunk.inputs)))
    phases: dict[Phase, PhaseSpec] = {
        "F": PhaseSpec(inputs=read, params=chunk.params, buffers=chunk.buffers, flops=10**12)
    }
    if chunk.kind in ("route", "unroute"):
        if tangents:
            phases["B"] = PhaseSpec(tangents=(0,), grad_inputs=(0,))
        return replace(chunk, phases=phases)
    trained = tuple(
        p
        for p in chunk.params
        if drawing.parameters[p].trainable and (chunk.name, p) not in drawing.unreached
    )
    if not tangents or not (grads or trained):
        return replace(chunk, phases=phases)
    common = PhaseSpec(
        params=chunk.params, buffers=chunk.buffers, saved=(0,), tangents=tangents, flops=10**12
    )
    phases["B"] = replace(common, inputs=read, saved=(0, 1), grad_inputs=grads, grad_params=trained)
    if halves == "inputs":  # nothing is saved: a backward starts from the inputs, as if all were made again
        common = replace(common, inputs=read, saved=())
        phases["B"] = replace(common, grad_inputs=grads, grad_params=trained)
        phases["BI"] = replace(common, grad_inputs=grads) if grads else PhaseSpec()
        phases["BW"] = replace(common, grad_params=trained)
        return replace(chunk, phases=phases)
    if halves == "carried":  # BI does the work and hands it on
        phases["BI"] = replace(common, grad_inputs=grads)
        phases["BW"] = PhaseSpec(inputs=read, saved=(1,), carried=(0,), grad_params=trained, flops=10**12)
        carried: tuple[TensorSpec, ...] = (HIDDEN,)
    else:  # each half starts from the gradients of the outputs; where no input has one, BI has nothing to do
        phases["BI"] = replace(common, grad_inputs=grads) if grads else PhaseSpec()
        phases["BW"] = replace(common, inputs=read, saved=(0, 1), grad_params=trained)
        carried = ()
    return replace(chunk, phases=phases, saved=(HIDDEN, HIDDEN), carried=carried)


def fitted(graph: Graph, samples: int = 720720) -> CapturedModel:
    """The graph's outline with each chunk as it would be captured for its own slice of the samples."""
    homes = {node.chunk: max(1, graph.mesh(node).slices) for node in graph.nodes.values()}

    def sized(spec: TensorSpec, rows: int) -> TensorSpec:
        return replace(spec, shape=tuple(rows if axis == ROWS else axis for axis in spec.shape))

    chunks = []
    for chunk in graph.outline.chunks:
        rows = samples // (homes[chunk.name] * parts_of(graph, chunk.name))
        chunks.append(
            replace(
                chunk,
                input_specs=tuple(sized(spec, rows) for spec in chunk.input_specs),
                outputs=tuple(sized(spec, rows) for spec in chunk.outputs),
            )
        )
    return replace(graph.outline, chunks=tuple(chunks))


X, Y = Batch(field="x"), Batch(field="y")


def pp(stage: int) -> Tags:
    """The tags of a pipeline stage."""
    return (("PP", stage),)


def skips(halves: str = "carried") -> CapturedModel:
    """Three stages: a skip edge, a value with readers on every stage, tied and frozen parameters, labels."""
    d = Drawing()
    first = d.chunk(
        "PP=0", pp(0), [X], [d.param("a"), d.param("tied"), d.param("cold", frozen=True)], [HIDDEN, TABLE]
    )
    table = Output(chunk="PP=0", index=1)
    aside = d.chunk("PP=0 #1", pp(0), [first, first], [d.param("b")])
    second = d.chunk("PP=1", pp(1), [first, aside], [d.param("c"), d.param("idle")])
    d.unreached.add(("PP=1", "idle"))
    third = d.chunk("PP=1 #1", pp(1), [first, second], [d.param("tied")])
    last = d.chunk("PP=2", pp(2), [third, first, table, second, Y], [d.param("e"), d.param("tied")], [SCALAR])
    d.unreached.add(("PP=2", "tied"))
    return d.outline(last, halves=halves)


def normed(halves: str = "tangents") -> CapturedModel:
    """Two stages with buffers, one written, a frozen first stage, and a loss that is a sum and a weight."""
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X, Constant(name="mask")], [d.param("cold", frozen=True)])
    second = d.chunk(
        "PP=1", pp(1), [first, Constant(name="mask")], [d.param("a"), d.param("b")], [HIDDEN, SCALAR],
        [d.buffer("mean"), d.buffer("fixed")], ["mean"],
    )  # fmt: skip
    third = d.chunk("PP=2", pp(2), [second, Y], [d.param("c")], [SCALAR, SCALAR])
    return d.outline(third, weight=Output(chunk="PP=2", index=1), halves=halves)


def mixture(tied: bool = False, halves: str = "carried") -> CapturedModel:
    """Two stages, each with an expert region between two dense pieces; tied: both regions share their experts."""
    d = Drawing()
    source: Source = X
    for stage in range(2):
        owner = d.chunk(f"PP={stage}", pp(stage), [source], [d.param(f"pre.{stage}")], [HIDDEN, COUNTS])
        params = [
            d.param("experts" if tied else f"experts.{stage}", EXPERTS),
            d.param(f"bias.{stage}", EXPERTS, 2),
        ]
        used = d.buffer(f"used.{stage}", EXPERTS)
        out = d.region(owner, (*pp(stage), ("EP", stage)), params, [used])
        outputs = [HIDDEN] if stage == 0 else [SCALAR]
        source = d.chunk(f"PP={stage} #1", pp(stage), [out, owner], [d.param(f"post.{stage}")], outputs)
    assert isinstance(source, Output)
    return d.outline(source, halves=halves)


def layered(halves: str = "carried") -> CapturedModel:
    """Two stages of layers in regions of their own, which share a value of their stage and skip one another."""
    d = Drawing()
    source: Output | Batch = X
    early: list[Output] = []
    for stage in range(2):
        table = d.chunk(f"PP={stage}", pp(stage), [source], [d.param(f"first.{stage}")], [HIDDEN, TABLE])
        before: list[Source] = [table]
        for layer in range(2 * stage, 2 * stage + 2):
            reads = [*before[-2:], Output(chunk=f"PP={stage}", index=1), *early[:1]]
            tags = (*pp(stage), ("LAYER", layer))
            before.append(d.chunk(f"PP={stage} LAYER={layer}", tags, reads, [d.param(f"layer.{layer}")]))
        early.append(table)
        outputs = [HIDDEN] if stage == 0 else [SCALAR]
        source = d.chunk(
            f"PP={stage} #1", pp(stage), [before[-1], before[0]], [d.param(f"last.{stage}")], outputs
        )
    assert isinstance(source, Output)
    return d.outline(source, halves=halves)


def frozen() -> CapturedModel:
    """Two stages in which nothing trains."""
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a", frozen=True)])
    last = d.chunk("PP=1", pp(1), [first, Y], [d.param("b", frozen=True)], [SCALAR])
    return d.outline(last)
