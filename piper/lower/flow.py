"""The flow of values through a step: what each node reads and writes, and how values reach other devices.

The flow is worked out once per chunk, not per part: parts differ only in the suffix of their values' names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from piper.errors import ScheduleError
from piper.ir.chunk import Batch, Chunk, Constant, Output, Phase, PhaseSpec, Source, Tags, TensorSpec
from piper.ir.devices import Devices, show
from piper.ir.graph import Graph
from piper.ir.node import Add, Compute, Counts, Exchange, Node, Transfer, compute_name, show_part
from piper.lower.buckets import param_slot
from piper.lower.work import Work
from piper.plan.plan import Slot

SEED = "seed"  # the gradient that each part's loss starts from
BACKWARD: tuple[Phase, ...] = ("B", "BI", "BW")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A node of every part, with the names of its values still without a part."""

    node: Node
    chunk: str  # whose parts it follows
    phases: tuple[Phase, ...] = ()  # it exists where the chunk has one of these; none: always


@dataclass(slots=True)
class Flow:
    """The flow under construction."""

    work: Work
    homes: dict[str, Devices]
    chunks: dict[str, Chunk]
    origins: dict[str, tuple[int, ...]]
    templates: list[Template] = field(default_factory=list)
    values: dict[str, Slot] = field(default_factory=dict)
    residents: dict[str, Slot] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    specs: dict[str, TensorSpec] = field(default_factory=dict)  # of the gradients
    gradients: dict[tuple[str, int], list[tuple[Devices, str]]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.work.graph

    def ways(self, chunk: str) -> int:
        return self.graph.policy(chunk).ways

    def is_marker(self, chunk: Chunk) -> bool:
        """A route or unroute that moves nothing: its outputs are its inputs."""
        return chunk.kind in ("route", "unroute") and self.ways(chunk.name) == 1

    def resolve(self, source: Source) -> Source:
        """Where a value really comes from, seen through markers."""
        while isinstance(source, Output) and self.is_marker(self.chunks[source.chunk]):
            source = self.chunks[source.chunk].inputs[source.index]
        return source


def bind_values(work: Work) -> Work:
    """Give every node its values, and put transfers, exchanges and sums where values need them.

    F[PP=0]@0 --h--> F[PP=1]@1
    -->
    F[PP=0]@0 --h--> transfer --h@1--> F[PP=1]@1
    """
    graph = work.graph
    homes = {node.chunk: node.devices for node in graph.nodes.values()}
    origins = {node.chunk: node.origin for node in graph.nodes.values() if node.phase == "F"}
    flow = Flow(work, homes, graph.chunks, origins, residents={SEED: Slot(nbytes=8)})
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
            if value in written:
                yield f"{value} is written twice"
            written[value] = node.target if isinstance(node, Transfer) else node.devices
    for node in work.nodes:
        here = node.source if isinstance(node, Transfer) else node.devices
        for value in node.reads:
            if value not in work.residents and not value.startswith("batch.") and written.get(value) != here:
                yield f"{node.name} on {show(here)} reads {value}, written on {written.get(value)}"


def forward(flow: Flow, chunk: Chunk) -> None:
    """The forward of a chunk, after the transfers that bring its inputs."""
    home = flow.homes[chunk.name]
    inputs = [incoming(flow, chunk, position) for position in range(len(chunk.inputs))]
    for index, spec in enumerate(chunk.outputs):
        flow.values[f"{chunk.name}.out{index}"] = slot_of(chunk, [spec])
    if chunk.kind in ("route", "unroute"):
        exchange_forward(flow, chunk, inputs)
        return
    spec = chunk.phases["F"]
    writes = [f"{chunk.name}.out{index}" for index in range(len(chunk.outputs))]
    for bundle, members in bundles(chunk).items():
        flow.values[f"{chunk.name}.{bundle}"] = slot_of(chunk, [chunk.saved[i] for i in members])
        writes.append(f"{chunk.name}.{bundle}")
    writes += [buffer_slot(name) for name in chunk.mutated]
    node = Compute(
        chunk=chunk.name,
        phase="F",
        devices=home,
        reads=(*(inputs[i] for i in spec.inputs), *state_reads(flow, chunk, spec)),
        writes=tuple(writes),
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phases=("F",)))


def bundles(chunk: Chunk) -> dict[str, list[int]]:
    """The saved values in two bundles: those the weight gradients need live longer than the others."""
    late = set(chunk.phases["BW"].saved) if "BW" in chunk.phases else set()
    early = [i for i in range(len(chunk.saved)) if i not in late]
    return {name: members for name, members in (("saved", early), ("kept", sorted(late))) if members}


def state_reads(flow: Flow, chunk: Chunk, spec: PhaseSpec) -> Iterator[str]:
    """The buckets and buffers that a phase reads."""
    wanted = set(spec.params)
    for name in flow.work.chunk_buckets[chunk.name]:
        bucket = flow.work.buckets[name]
        if any(piece.name in wanted for piece in bucket.pieces):
            yield param_slot(bucket)
    sizes = {buffer.name: buffer.nbytes for buffer in flow.graph.outline.buffers}
    for name in spec.buffers:
        flow.residents[buffer_slot(name)] = Slot(nbytes=sizes[name])
        yield buffer_slot(name)


def buffer_slot(name: str) -> str:
    """The slot of a buffer of the model."""
    return f"buffer.{name}"


def incoming(flow: Flow, chunk: Chunk, position: int) -> str:
    """The name of a chunk's input where the chunk lives, once a transfer has brought it there."""
    home = flow.homes[chunk.name]
    spec = chunk.input_specs[position]
    source = flow.resolve(chunk.inputs[position])
    match source:
        case Batch(field=batch_field):
            name = f"batch.{batch_field}@{show(home)}"
            flow.values[name] = Slot(nbytes=spec.nbytes)
            return name
        case Constant(name=constant):
            flow.residents[f"constant.{constant}"] = Slot(nbytes=spec.nbytes)
            return f"constant.{constant}"
    value = f"{source.chunk}.out{source.index}"
    there = flow.homes[source.chunk]
    if there == home:
        return value
    arrived = f"{value}@{show(home)}"
    if arrived not in flow.sent:
        flow.sent.add(arrived)
        send(flow, value, arrived, there, home, flow.chunks[source.chunk].outputs[source.index], spec, chunk)
    return arrived


def send(
    flow: Flow,
    value: str,
    arrived: str,
    there: Devices,
    home: Devices,
    left: TensorSpec,
    spec: TensorSpec,
    chunk: Chunk,
    gradient: bool = False,
) -> None:
    """A transfer of a value to the devices of a chunk; between sets of different sizes it re-slices the samples."""
    flow.values[arrived] = Slot(nbytes=spec.nbytes, dynamic=spec.dynamic_rows)
    sliced = True
    if len(there) != len(home):
        sliced = is_sliced(left, spec, len(there), len(home))
        routed = chunk.kind in ("route", "unroute", "expert")
        if routed or not (sliced or (left.shape == spec.shape and not gradient)):
            raise ScheduleError(
                f"{value} cannot be sliced anew by samples",
                by="strategy",
                facts={
                    f"on {show(there)}": f"{left.shape}" + (", rows in the order of their experts" if routed else ""),
                    f"on {show(home)}": f"{spec.shape}, for {chunk.name}",
                },
                hint="place both regions on sets of devices of the same size",
            )
    node = Transfer(
        value=value,
        source=there,
        target=home,
        reads=(value,),
        writes=(arrived,),
        sliced=sliced,
        stream=flow.graph.transfer_streams.get(chunk.name, ""),
        origin=flow.origins[chunk.name],
    )
    flow.templates.append(Template(node=node, chunk=chunk.name))


def is_sliced(left: TensorSpec, right: TensorSpec, devices_left: int, devices_right: int) -> bool:
    """Whether a value's first axis follows the samples: the whole has the same length on both sides."""
    return (
        len(left.shape) > 0
        and left.shape[1:] == right.shape[1:]
        and left.shape[0] * devices_left == right.shape[0] * devices_right
    )


def backward(flow: Flow, chunk: Chunk) -> None:
    """The backward of a chunk, whole and in halves, once its outputs' gradients are summed where it lives."""
    home = flow.homes[chunk.name]
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
        name = f"{chunk.name}.din{position}"
        spec = chunk.input_specs[position]
        flow.specs[name] = spec
        flow.values[name] = Slot(nbytes=spec.nbytes, dynamic=spec.dynamic_rows)
        flow.gradients.setdefault((source.chunk, source.index), []).append((home, name))


def compute_backward(flow: Flow, chunk: Chunk, phase: Phase, tangents: dict[int, str]) -> None:
    """One phase of a chunk's backward."""
    spec = chunk.phases[phase]
    saved = set(spec.saved)
    names = [incoming(flow, chunk, position) for position in range(len(chunk.inputs))]
    reads = [names[i] for i in spec.inputs]
    reads += state_reads(flow, chunk, spec)
    reads += [f"{chunk.name}.{bundle}" for bundle, members in bundles(chunk).items() if saved & set(members)]
    writes = [f"{chunk.name}.din{position}" for position in spec.grad_inputs]
    if chunk.carried and phase == "BI":
        flow.values[f"{chunk.name}.carried"] = slot_of(chunk, chunk.carried)
        writes.append(f"{chunk.name}.carried")
    if spec.carried and phase == "BW":
        reads.append(f"{chunk.name}.carried")
    reads += [tangents[index] for index in spec.tangents]
    if phase != "BI":
        wanted = set(spec.grad_params)
        for name in flow.work.chunk_buckets[chunk.name]:
            bucket = flow.work.buckets[name]
            if any(piece.name in wanted for piece in bucket.pieces):
                slot = gradient_slot(name, bucket.chunks, chunk.name)
                flow.values[slot] = Slot(nbytes=bucket.numel * bucket.itemsize)
                writes.append(slot)
    node = Compute(
        chunk=chunk.name,
        phase=phase,
        devices=flow.homes[chunk.name],
        reads=tuple(reads),
        writes=tuple(writes),
        keeps=tuple(names[i] for i in chunk.kept_inputs.get(phase, ())),
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phases=(phase,)))


def gradient_slot(bucket: str, readers: tuple[str, ...], chunk: str) -> str:
    """The slot of the gradients that one backward of a chunk gives for a bucket."""
    return f"{bucket}.g" if len(readers) == 1 else f"{bucket}.g<{chunk}>"


def outgoing(flow: Flow, chunk: Chunk, index: int) -> str:
    """The gradient of a chunk's output where the chunk lives: summed over its readers, each set's sum sent once."""
    home = flow.homes[chunk.name]
    given = flow.gradients.get((chunk.name, index))
    assert given, f"no reader of {chunk.name}.out{index} gives a gradient"
    by_set: dict[Devices, list[str]] = {}
    for devices, name in given:
        by_set.setdefault(devices, []).append(name)
    arrived: list[str] = []
    for devices, names in by_set.items():
        total = summed(flow, chunk, index, devices, names)
        if devices != home:
            here = f"{total}@{show(home)}"
            send(flow, total, here, devices, home, flow.specs[total], chunk.outputs[index], chunk, gradient=True)
            flow.specs[here] = chunk.outputs[index]
            total = here
        arrived.append(total)
    return summed(flow, chunk, index, home, arrived)


def summed(flow: Flow, chunk: Chunk, index: int, devices: Devices, names: list[str]) -> str:
    """The sum of several gradients of one value on one set of devices, in the order they appear."""
    total = names[0]
    for count, name in enumerate(names[1:], 1):
        result = f"{chunk.name}.grad{index}.{count}@{show(devices)}"
        flow.values[result], flow.specs[result] = flow.values[total], flow.specs[total]
        node = Add(
            value=f"{chunk.name}.out{index}",
            devices=devices,
            reads=(total, name),
            writes=(result,),
            origin=flow.origins[chunk.name],
        )
        flow.templates.append(Template(node=node, chunk=chunk.name))
        total = result
    return total


def exchange_forward(flow: Flow, chunk: Chunk, inputs: list[str]) -> None:
    """Rows to their experts, after the counts; or back."""
    policy = flow.graph.policy(chunk.name)
    common = {
        "chunk": chunk.name,
        "part": (),
        "devices": flow.homes[chunk.name],
        "ways": policy.ways,
        "stream": policy.exchange_stream,
    }
    outward = chunk.kind == "route"
    splits = splits_of(chunk)
    if outward:
        flow.values[splits] = Slot(nbytes=16 * chunk.experts)
        counts = Counts(**common, reads=(inputs[1],), writes=(splits, f"{chunk.name}.out1"))  # type: ignore[arg-type]
        flow.templates.append(Template(node=counts, chunk=chunk.name))
    rows = Exchange(
        **common, phase="F", outward=outward, reads=(inputs[0], splits), writes=(f"{chunk.name}.out0",)  # type: ignore[arg-type]
    )
    flow.templates.append(Template(node=rows, chunk=chunk.name, phases=("F",)))


def exchange_backward(flow: Flow, chunk: Chunk, tangent: str) -> None:
    """Gradients travel the way of their rows, in reverse, by the forward's counts."""
    policy = flow.graph.policy(chunk.name)
    for phase in ("B", "BI"):
        node = Exchange(
            chunk=chunk.name,
            phase=phase,  # type: ignore[arg-type]
            part=(),
            devices=flow.homes[chunk.name],
            ways=policy.ways,
            stream=policy.exchange_stream,
            outward=chunk.kind == "unroute",
            reads=(tangent, splits_of(chunk)),
            writes=(f"{chunk.name}.din0",),
        )
        flow.templates.append(Template(node=node, chunk=chunk.name, phases=(phase,)))  # type: ignore[arg-type]


def splits_of(chunk: Chunk) -> str:
    """The slot that says how many rows go where: made by the route, used by its unroute too."""
    if chunk.kind == "route":
        return f"{chunk.name}.splits"
    source = chunk.inputs[1]
    assert isinstance(source, Output)
    return f"{source.chunk}.splits"


def slot_of(chunk: Chunk, specs: list[TensorSpec] | tuple[TensorSpec, ...]) -> Slot:
    """The bytes of values held together, those of shared storages apart."""
    shared = sorted({spec.storage for spec in specs if spec.storage >= 0})
    return Slot(
        nbytes=sum(spec.nbytes for spec in specs if spec.storage < 0),
        shares=tuple((f"{chunk.name}.storage{i}", chunk.storages[i]) for i in shared),
        dynamic=any(spec.dynamic_rows for spec in specs),
    )


def instances(flow: Flow, residents: dict[str, Slot]) -> Iterator[Node]:
    """Every template on every part where it exists, its values named for that part."""
    parts: dict[str, list[Tags]] = {}
    for cell in flow.graph.index.cells:
        parts.setdefault(cell.chunk, []).append(cell.part)
    nodes = flow.graph.nodes
    for template in flow.templates:
        node = template.node
        reads = [(value, value in residents) for value in node.reads]
        writes = [(value, value in residents) for value in node.writes]
        keeps = [(value, value in residents) for value in getattr(node, "keeps", ())]
        for part in parts[template.chunk]:
            suffix = f"[{show_part(part)[1:]}]" if part else ""
            named = {
                "reads": tuple([value if fixed else value + suffix for value, fixed in reads]),
                "writes": tuple([value if fixed else value + suffix for value, fixed in writes]),
            }
            if isinstance(node, Compute | Exchange):
                placed = nodes.get(compute_name(template.chunk, template.phases[0], part))
                if placed is None:
                    continue
                if isinstance(node, Compute):
                    named["keeps"] = tuple([value if fixed else value + suffix for value, fixed in keeps])
                    yield replace(placed, **named)
                else:
                    yield replace(node, part=part, origin=placed.origin, **named)
            elif isinstance(node, Transfer | Add):
                yield replace(node, value=node.value + suffix, **named)
            else:
                yield replace(node, part=part, **named)
