"""The flow of values through a step: what each node reads and writes, for every microbatch."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from piper.ir.chunk import Chunk, Collective, Output, Phase, PhaseSpec, Tags, bundles
from piper.ir.chunk_options import block_rows
from piper.ir.devices import Devices, show
from piper.ir.ids import SEED, Pass, SlotId, buffer_slot, param_slot, show_part, term_slot
from piper.ir.mesh import groups_along
from piper.ir.node import Compute, Node, SlotNode, Transfer, compute_name
from piper.ir.sharding import UNSHARDED, shardings_on
from piper.lower.placements import layouts_of, placements_of
from piper.lower.state import LoweringState
from piper.lower.transfers import Flow, incoming, input_gradient, outgoing, output_slot, slot_of
from piper.plan.ops import Collecting, Routing
from piper.plan.plan import Slot

BACKWARD: tuple[Phase, ...] = ("B", "BI", "BW")


def bind_values(state: LoweringState) -> LoweringState:
    """Give every node its values, and put transfers, exchanges and sums where values need them.

    F[PP=0]@0 --h--> F[PP=1]@1
    -->
    F[PP=0]@0 --h--> transfer --h@1--> F[PP=1]@1
    """
    graph = state.graph
    holders = {chunk: placement.devices for chunk, placement in placements_of(graph).items()}
    residents = dict(state.residents)
    values: dict[SlotId, Slot] = {}
    nodes: list[Node] = []
    for layout in layouts_of(graph):
        flow = Flow(state=state, placements=layout.placements, holders=holders, chunks=graph.chunks)
        flow.residents[SEED] = Slot(nbytes=8)
        for chunk in graph.outline.chunks:
            if not flow.passes_on(chunk):
                forward(flow, chunk)
        for chunk in reversed(graph.outline.chunks):
            if not flow.passes_on(chunk, backward=True) and "B" in chunk.phases:
                backward(flow, chunk)
        residents |= flow.residents
        values |= flow.values
        nodes += instances(flow, layout.parts, residents)
    return replace(state, nodes=tuple(nodes), values=values, residents=residents)


def no_value_crosses_devices(state: LoweringState) -> Iterator[str]:
    """Yield each value that is not written exactly once, on the devices that read it."""
    written: dict[SlotId, Devices] = {}
    for node in state.nodes:
        for value in node.writes:
            if value in written and value not in state.residents:
                yield f"{value} is written twice"
            written[value] = node.target if isinstance(node, Transfer) else node.devices
    for node in state.nodes:
        here = node.source if isinstance(node, Transfer) else node.devices
        for value in node.reads:
            there = written.get(value)
            if there is here or value in state.residents or value.kind == "batch":
                continue
            if there != here:
                yield f"{node.name} on {show(here)} reads {value}, written on {there}"


def forward(flow: Flow, chunk: Chunk) -> None:
    """Add the forward of a chunk, after the transfers that bring its inputs."""
    inputs = [incoming(flow, chunk, position) for position in range(len(chunk.inputs))]
    for index, output in enumerate(chunk.outputs):
        flow.values[output_slot(chunk.name, index)] = slot_of(chunk, [output])
    if chunk.kind in ("route", "unroute"):
        exchange_forward(flow, chunk, inputs)
        return
    if chunk.collective is not None:
        collect(flow, chunk, "F", chunk.collective, inputs[0], output_slot(chunk.name, 0))
        return
    spec = chunk.phases["F"]
    reads = (*(inputs[i] for i in spec.inputs), *state_reads(flow, chunk, spec))
    writes = [output_slot(chunk.name, index) for index in range(len(chunk.outputs))]
    for kind, members in bundles(chunk).items():
        bundle = SlotId(kind, chunk.name)
        flow.values[bundle] = slot_of(chunk, [chunk.saved[i] for i in members])
        writes.append(bundle)
    for name in chunk.mutated:
        add_buffer(flow, chunk, name)  # a forward may overwrite a buffer that no phase reads
        writes.append(buffer_slot(name))
    node = Compute(
        chunk=chunk.name,
        phase="F",
        devices=flow.placements[chunk.name].devices,
        reads=reads,
        writes=tuple(writes),
    )
    flow.templates.append((node, chunk.name, "F"))


def state_reads(flow: Flow, chunk: Chunk, spec: PhaseSpec) -> Iterator[SlotId]:
    """Yield the slots of the buckets and buffers that a phase reads."""
    wanted = set(spec.params)
    for name in flow.state.chunk_buckets[chunk.name]:
        bucket = flow.state.buckets[name]
        if any(piece.name in wanted for piece in bucket.pieces):
            yield param_slot(bucket.name)
    for name in spec.buffers:
        add_buffer(flow, chunk, name)
        yield buffer_slot(name)


def add_buffer(flow: Flow, chunk: Chunk, name: str) -> None:
    """Add a buffer's slot on the chunk's devices. Where it is sharded, each device holds its slice."""
    placement = flow.placements[chunk.name]
    shardings = shardings_on(placement.mesh, placement.policy.placements(name))
    sharding = shardings[0] if shardings else replace(UNSHARDED, stride=placement.mesh.degree)
    size = next(buffer.nbytes for buffer in flow.graph.outline.buffers if buffer.name == name)
    placed = flow.holders[chunk.name] if shardings else ()
    flow.residents[buffer_slot(name)] = Slot(nbytes=size // sharding.degree, sharding=sharding, placed=placed)


def backward(flow: Flow, chunk: Chunk) -> None:
    """Add the backward of a chunk, whole and in halves, after its outputs' gradients are summed."""
    loss = flow.graph.outline.loss
    tangents = {
        index: SEED if (chunk.name, index) == (loss.chunk, loss.index) else outgoing(flow, chunk, index)
        for index in chunk.phases["B"].tangents
    }
    for position in chunk.phases["B"].grad_inputs:
        source = flow.resolve(chunk.inputs[position], backward=True)
        assert isinstance(source, Output), f"{chunk.name} differentiates {source}, which no chunk produced"
        name = input_gradient(chunk.name, position)
        spec = chunk.input_specs[position]
        flow.specs[name] = spec
        flow.values[name] = Slot(nbytes=spec.nbytes, dynamic=spec.dynamic_rows)
        flow.gradients.setdefault((source.chunk, source.index), []).append(
            (flow.placements[chunk.name], name)
        )
    if chunk.kind in ("route", "unroute"):
        for phase in IN_FRONT:  # gradients travel back along the path of their rows, by the forward's counts
            reads, given = [tangents[0], splits_slot(chunk)], [input_gradient(chunk.name, 0)]
            exchange(flow, chunk, phase, chunk.kind == "unroute", reads, given)
    elif chunk.collective is not None:
        for phase in IN_FRONT:
            collect(flow, chunk, phase, chunk.collective.adjoint, tangents[0], input_gradient(chunk.name, 0))
    else:
        for phase in BACKWARD:
            if phase in chunk.phases:
                compute_backward(flow, chunk, phase, tangents)


def compute_backward(flow: Flow, chunk: Chunk, phase: Phase, tangents: dict[int, SlotId]) -> None:
    """Add one phase of a chunk's backward."""
    spec = chunk.phases[phase]
    saved = set(spec.saved)
    names = [incoming(flow, chunk, position) for position in range(len(chunk.inputs))]
    reads = [names[i] for i in spec.inputs]
    reads += state_reads(flow, chunk, spec)
    reads += [SlotId(kind, chunk.name) for kind, members in bundles(chunk).items() if saved & set(members)]
    writes = [input_gradient(chunk.name, position) for position in spec.grad_inputs]
    carried = SlotId("carried", chunk.name)
    if chunk.carried and phase == "BI":
        flow.values[carried] = slot_of(chunk, chunk.carried)
        writes.append(carried)
    if spec.carried and phase == "BW":
        reads.append(carried)
    reads += [tangents[index] for index in spec.tangents]
    if phase != "BI":
        writes += weight_gradients(flow, chunk, spec)
    node = Compute(
        chunk=chunk.name,
        phase=phase,
        devices=flow.placements[chunk.name].devices,
        reads=tuple(reads),
        writes=tuple(writes),
        keeps=tuple(names[i] for i in chunk.kept_inputs.get(phase, ())),
    )
    flow.templates.append((node, chunk.name, phase))


def weight_gradients(flow: Flow, chunk: Chunk, spec: PhaseSpec) -> Iterator[SlotId]:
    """Yield the slots of the weight gradients that a backward writes, one for each bucket."""
    wanted = set(spec.grad_params)
    for name in flow.state.chunk_buckets[chunk.name]:
        bucket = flow.state.buckets[name]
        if any(piece.name in wanted for piece in bucket.pieces):
            slot = SlotId("gradient", name, reader=chunk.name if len(bucket.chunks) > 1 else "")
            flat = any(piece.name in spec.in_place for piece in bucket.pieces)  # it is given a sum's memory
            size = bucket.precision.sum_itemsize if flat else bucket.itemsize
            flow.values[slot] = Slot(nbytes=bucket.numel * size)
            yield slot


class OfPart:
    """The slots of one microbatch, each created once."""

    def __init__(self, part: Tags, residents: Collection[SlotId]) -> None:
        self.part, self.residents = part, residents
        self.slots: dict[SlotId, SlotId] = {}

    def __call__(self, values: tuple[SlotId, ...]) -> tuple[SlotId, ...]:
        slots = self.slots
        for value in values:
            if value not in slots:  # what outlives the step is the same for all
                slots[value] = value if value in self.residents else value.at(self.part)
        return tuple([slots[value] for value in values])


def instances(flow: Flow, among: Collection[Tags], residents: dict[SlotId, Slot]) -> Iterator[Node]:
    """Yield every template node once per microbatch `among` those of its chunk, with its values."""
    known = {part: OfPart(part, residents) for part in among}
    parts = {
        chunk: [(part, known[part]) for part in flow.graph.microbatches(chunk) if part in known]
        for chunk in flow.chunks
    }
    nodes = flow.graph.nodes
    for node, chunk, phase in flow.templates:
        for part, of_part in parts[chunk]:
            placed = nodes.get(compute_name(chunk, phase, part)) if phase else None
            if placed is None and phase:
                continue
            reads, writes = of_part(node.reads), of_part(node.writes)
            match node:
                case Compute():
                    assert placed is not None
                    yield replace(placed, reads=reads, writes=writes, keeps=of_part(node.keeps))
                case Transfer():
                    where = map(show, writes[0].devices[len(reads[0].devices) :])
                    name = f"transfer[{reads[0]} @{show(node.source)} -> @{'@'.join(where)}]"
                    yield replace(node, name=name, reads=reads, writes=writes)
                case SlotNode(payload=Routing() | Collecting() as payload):
                    name = placed.name if placed else f"counts[{chunk}{show_part(part)}]"
                    payload = replace(payload, run=replace(payload.run, part=part))
                    origin = placed.origin if placed else node.origin
                    yield replace(node, name=name, payload=payload, origin=origin, reads=reads, writes=writes)
                case SlotNode():
                    yield replace(node, name=f"add[{writes[0]}]", reads=reads, writes=writes)


IN_FRONT: tuple[Phase, ...] = ("B", "BI")  # whichever the graph has: values travel in the first half


def splits_slot(chunk: Chunk) -> SlotId:
    """Return the slot of the row counts that a route computes. Its unroute reads the same slot."""
    if chunk.kind == "route":
        return SlotId("splits", chunk.name)
    source = chunk.inputs[1]
    assert isinstance(source, Output), "an unroute takes the counts of its route"
    return SlotId("splits", source.chunk)


def exchange_forward(flow: Flow, chunk: Chunk, inputs: list[SlotId]) -> None:
    """Add the forward exchange of rows: to their experts, after the counts, or back from them."""
    splits = splits_slot(chunk)
    if chunk.kind == "route":
        policy, sent = flow.placements[chunk.name].policy, chunk.input_specs[0].shape[0]
        block = block_rows(sent, policy.ways, policy.capacity)
        places = 8 * sent + 25 * block * policy.ways  # where each row lies on its way: see `Blocks`
        flow.values[splits] = Slot(nbytes=places if block else 16 * chunk.experts)
        written = [splits, output_slot(chunk.name, 1)]
        if policy.may_overflow:
            written.append(term_slot("overflows", chunk.name))
            flow.values[written[-1]] = Slot(nbytes=1)
        exchange(flow, chunk, None, True, inputs[1:2], written)
    exchange(flow, chunk, "F", chunk.kind == "route", [inputs[0], splits], [output_slot(chunk.name, 0)])


def exchange(
    flow: Flow, chunk: Chunk, phase: Phase | None, outward: bool, reads: list[SlotId], writes: list[SlotId]
) -> None:
    """Add one all-to-all within each expert group: of rows or, without a phase, of how many there will be."""
    placement = flow.placements[chunk.name]
    axis, policy = placement.mesh.experts, placement.policy
    assert axis is not None, f"{chunk.name} holds all experts"
    rows = (chunk.outputs if chunk.kind == "unroute" else chunk.input_specs)[0].shape[0]
    block = block_rows(rows, axis.degree, policy.capacity)
    travels = flow.size(writes[0 if phase else 1])  # counts write where rows lie, then how many there are
    if phase and block:  # as many rows travel both ways, filled up before they leave and put in order behind
        travels = max(travels, flow.size(reads[0]))
    run = Pass(phase=phase or "F", chunk=chunk.name)
    node = SlotNode(
        op="exchange" if phase else "counts",
        name="",  # that of a microbatch
        payload=Routing(run=run, outward=outward, rows=rows if block else 0, block=block),
        devices=placement.devices,
        groups=groups_along(placement.devices, (axis,)),
        reads=tuple(reads),
        writes=tuple(writes),
        stream=policy.exchange_stream,
        nbytes=travels * (axis.degree - 1) // axis.degree,
        workspace=2 * travels if phase and block else 0,
        origin=placement.origin,
    )
    flow.templates.append((node, chunk.name, phase))


def collect(flow: Flow, chunk: Chunk, phase: Phase, how: Collective, read: SlotId, written: SlotId) -> None:
    """Add one phase of a collective: it reads one value and writes one."""
    placement = flow.placements[chunk.name]
    devices, axis = placement.devices, placement.mesh.axis(how.axis)
    run, alone = Pass(phase=phase, chunk=chunk.name), how.op == "slice"
    node = SlotNode(
        op="slice" if alone else "collect",
        name="",
        payload=Collecting(run=run, how=how, devices=devices, stride=axis.stride)
        if alone
        else Collecting(run=run, how=how),
        devices=devices,
        groups=() if alone else groups_along(devices, (axis,)),
        reads=(read,),
        writes=(written,),
        nbytes=moved(how, flow.size(read), flow.size(written)),
        stream=next(held.stream for held in placement.policy.axes if held.axis == how.axis),
    )
    flow.templates.append((node, chunk.name, phase))


def moved(how: Collective, read: int, written: int) -> int:
    """Return the bytes that a device sends for a collective."""
    n = how.degree
    match how.op:
        case "all_gather":
            return written * (n - 1) // n
        case "reduce_scatter" | "all_to_all":
            return read * (n - 1) // n
        case "all_reduce" | "max":
            return 2 * read * (n - 1) // n
        case "shift" | "shift_back":
            return read
        case "slice" | "none":
            return 0
