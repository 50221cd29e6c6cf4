"""The flow of values through a step: what each node reads and writes, on every part."""

from collections.abc import Iterator
from dataclasses import replace

from piper.devices import Devices, show
from piper.ir.chunk import Chunk, Output, Phase, PhaseSpec, Tags, bundles
from piper.ir.node import Add, Compute, Counts, Exchange, Node, Transfer, compute_name, show_part
from piper.lower.buckets import homes_of, param_slot
from piper.lower.exchanges import exchange_backward, exchange_forward
from piper.lower.transfers import incoming, outgoing
from piper.lower.values import (
    SEED,
    Flow,
    Template,
    buffer_slot,
    gradient_slot,
    input_gradient,
    output_slot,
    slot_of,
)
from piper.lower.work import Work
from piper.plan.plan import Slot

BACKWARD: tuple[Phase, ...] = ("B", "BI", "BW")


def bind_values(work: Work) -> Work:
    """Give every node its values, and put transfers, exchanges and sums where values need them.

    F[PP=0]@0 --h--> F[PP=1]@1
    -->
    F[PP=0]@0 --h--> transfer --h@1--> F[PP=1]@1
    """
    graph = work.graph
    flow = Flow(work=work, homes=homes_of(graph), chunks=graph.chunks, residents={SEED: Slot(nbytes=8)})
    for chunk in graph.outline.chunks:
        if not flow.is_marker(chunk):
            forward(flow, chunk)
    for chunk in reversed(graph.outline.chunks):
        if not flow.is_marker(chunk) and "B" in chunk.phases:
            backward(flow, chunk)
    residents = {**work.residents, **flow.residents}
    return replace(work, nodes=tuple(instances(flow, residents)), values=flow.values, residents=residents)


def no_value_crosses_devices(work: Work) -> Iterator[str]:
    """Every value is written exactly once, on the very devices that read it."""
    written: dict[str, Devices] = {}
    for node in work.nodes:
        for value in node.writes:
            if value in written and value not in work.residents:
                yield f"{value} is written twice"
            written[value] = node.target if isinstance(node, Transfer) else node.devices
    for node in work.nodes:
        here = node.source if isinstance(node, Transfer) else node.devices
        for value in node.reads:
            if value not in work.residents and not value.startswith("batch.") and written.get(value) != here:
                yield f"{node.name} on {show(here)} reads {value}, written on {written.get(value)}"


def forward(flow: Flow, chunk: Chunk) -> None:
    """The forward of a chunk, after the transfers that bring its inputs."""
    inputs = [incoming(flow, chunk, position) for position in range(len(chunk.inputs))]
    for index, output in enumerate(chunk.outputs):
        flow.values[output_slot(chunk.name, index)] = slot_of(chunk, [output])
    if chunk.kind in ("route", "unroute"):
        exchange_forward(flow, chunk, inputs)
        return
    spec = chunk.phases["F"]
    reads = (*(inputs[i] for i in spec.inputs), *state_reads(flow, chunk, spec))
    writes = [output_slot(chunk.name, index) for index in range(len(chunk.outputs))]
    for bundle, members in bundles(chunk).items():
        flow.values[f"{chunk.name}.{bundle}"] = slot_of(chunk, [chunk.saved[i] for i in members])
        writes.append(f"{chunk.name}.{bundle}")
    for name in chunk.mutated:
        add_buffer(flow, chunk, name)  # a forward may overwrite a buffer that no phase reads
        writes.append(buffer_slot(name))
    node = Compute(
        chunk=chunk.name,
        phase="F",
        devices=flow.homes[chunk.name].devices,
        reads=reads,
        writes=tuple(writes),
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phase="F"))


def state_reads(flow: Flow, chunk: Chunk, spec: PhaseSpec) -> Iterator[str]:
    """The buckets and buffers that a phase reads."""
    wanted = set(spec.params)
    for name in flow.work.chunk_buckets[chunk.name]:
        bucket = flow.work.buckets[name]
        if any(piece.name in wanted for piece in bucket.pieces):
            yield param_slot(bucket)
    for name in spec.buffers:
        add_buffer(flow, chunk, name)
        yield buffer_slot(name)


def add_buffer(flow: Flow, chunk: Chunk, name: str) -> None:
    """Let a buffer live on the chunk's devices; where experts are divided, each holds its experts' part."""
    ways = flow.homes[chunk.name].policy.ways if chunk.kind == "expert" else 1
    size = next(buffer.nbytes for buffer in flow.graph.outline.buffers if buffer.name == name)
    flow.residents[buffer_slot(name)] = Slot(nbytes=size // ways)


def backward(flow: Flow, chunk: Chunk) -> None:
    """The backward of a chunk, whole and in halves, once its outputs' gradients are summed where it lives."""
    loss = flow.graph.outline.loss
    tangents = {
        index: SEED if (chunk.name, index) == (loss.chunk, loss.index) else outgoing(flow, chunk, index)
        for index in chunk.phases["B"].tangents
    }
    if chunk.kind in ("route", "unroute"):
        exchange_backward(flow, chunk, tangents[0])
    else:
        for phase in BACKWARD:
            if phase in chunk.phases:
                compute_backward(flow, chunk, phase, tangents)
    for position in chunk.phases["B"].grad_inputs:
        source = flow.resolve(chunk.inputs[position])
        assert isinstance(source, Output), f"{chunk.name} differentiates {source}, which no chunk produced"
        name = input_gradient(chunk.name, position)
        spec = chunk.input_specs[position]
        flow.specs[name] = spec
        flow.values[name] = Slot(nbytes=spec.nbytes, dynamic=spec.dynamic_rows)
        home = flow.homes[chunk.name].devices
        flow.gradients.setdefault((source.chunk, source.index), []).append((home, name))


def compute_backward(flow: Flow, chunk: Chunk, phase: Phase, tangents: dict[int, str]) -> None:
    """One phase of a chunk's backward."""
    spec = chunk.phases[phase]
    saved = set(spec.saved)
    names = [incoming(flow, chunk, position) for position in range(len(chunk.inputs))]
    reads = [names[i] for i in spec.inputs]
    reads += state_reads(flow, chunk, spec)
    reads += [f"{chunk.name}.{bundle}" for bundle, members in bundles(chunk).items() if saved & set(members)]
    writes = [input_gradient(chunk.name, position) for position in spec.grad_inputs]
    if chunk.carried and phase == "BI":
        flow.values[f"{chunk.name}.carried"] = slot_of(chunk, chunk.carried)
        writes.append(f"{chunk.name}.carried")
    if spec.carried and phase == "BW":
        reads.append(f"{chunk.name}.carried")
    reads += [tangents[index] for index in spec.tangents]
    if phase != "BI":
        writes += weight_gradients(flow, chunk, spec)
    node = Compute(
        chunk=chunk.name,
        phase=phase,
        devices=flow.homes[chunk.name].devices,
        reads=tuple(reads),
        writes=tuple(writes),
        keeps=tuple(names[i] for i in chunk.kept_inputs.get(phase, ())),
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phase=phase))


def weight_gradients(flow: Flow, chunk: Chunk, spec: PhaseSpec) -> Iterator[str]:
    """The slots, one for each bucket, of the gradients that a backward gives for its parameters."""
    wanted = set(spec.grad_params)
    for name in flow.work.chunk_buckets[chunk.name]:
        bucket = flow.work.buckets[name]
        if any(piece.name in wanted for piece in bucket.pieces):
            slot = gradient_slot(name, bucket.chunks, chunk.name)
            flow.values[slot] = Slot(nbytes=bucket.numel * bucket.itemsize)
            yield slot


def instances(flow: Flow, residents: dict[str, Slot]) -> Iterator[Node]:
    """Every template on every part where it exists, its values named for that part."""
    parts: dict[str, list[tuple[Tags, str]]] = {}
    for cell in flow.graph.index.cells:
        suffix = f"[{show_part(cell.part)[1:]}]" if cell.part else ""
        parts.setdefault(cell.chunk, []).append((cell.part, suffix))

    def named(values: tuple[str, ...], suffix: str) -> tuple[str, ...]:
        return tuple([value if value in residents else value + suffix for value in values])

    nodes = flow.graph.nodes
    for template in flow.templates:
        node = template.node
        for part, suffix in parts[template.chunk]:
            placed = nodes.get(compute_name(template.chunk, template.phase, part)) if template.phase else None
            if placed is None and template.phase:
                continue
            reads, writes = named(node.reads, suffix), named(node.writes, suffix)
            match node:
                case Compute():
                    assert placed is not None
                    yield replace(placed, reads=reads, writes=writes, keeps=named(node.keeps, suffix))
                case Exchange():
                    assert placed is not None
                    yield replace(node, part=part, origin=placed.origin, reads=reads, writes=writes)
                case Counts():
                    yield replace(node, part=part, reads=reads, writes=writes)
                case Transfer() | Add():
                    yield replace(node, value=node.value + suffix, reads=reads, writes=writes)
