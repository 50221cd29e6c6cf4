"""The flow of values under construction, and the transfers that bring values to their readers' devices."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from piper.errors import ScheduleError
from piper.ir.chunk import ROUTED, AxisPosition, Batch, Chunk, Constant, Output, Phase, Source, TensorSpec
from piper.ir.devices import Devices, show
from piper.ir.graph import Graph
from piper.ir.ids import SlotId, SlotKind
from piper.ir.node import Node, SlotNode, Transfer
from piper.ir.sharding import AxisPlacement
from piper.lower.placements import ChunkPlacement
from piper.lower.state import LoweringState
from piper.plan.plan import Slot

# A node that exists once per microbatch of a chunk, where the chunk has this phase. None: always.
Template = tuple[Node, str, Phase | None]


@dataclass(slots=True, kw_only=True)
class Flow:
    """The flow of values through a step, computed once per chunk: microbatches differ only in a suffix."""

    state: LoweringState
    placements: dict[str, ChunkPlacement]  # of the microbatches that this flow is of
    holders: dict[str, Devices]  # the devices that hold the parameters and buffers of each chunk
    chunks: dict[str, Chunk]
    templates: list[Template] = field(default_factory=list)  # with values that have no microbatch yet
    values: dict[SlotId, Slot] = field(default_factory=dict)
    residents: dict[SlotId, Slot] = field(default_factory=dict)
    specs: dict[SlotId, TensorSpec] = field(default_factory=dict)  # of the gradients
    gradients: dict[tuple[str, int], list[tuple[ChunkPlacement, SlotId]]] = field(default_factory=dict)
    loads: dict[SlotId, tuple[AxisPlacement, ...]] = field(default_factory=dict)  # how each field is sharded
    arrivals: dict[SlotId, tuple[Devices, int]] = field(default_factory=dict)  # `ChunkPlacement.samples` of
    # the readers that each value is brought to

    @property
    def graph(self) -> Graph:
        return self.state.graph

    def size(self, value: SlotId) -> int:
        """Return the bytes of a value, including the storages it shares."""
        slot = self.values.get(value) or self.residents[value]
        return slot.nbytes + sum(nbytes for _, nbytes in slot.shares)

    def passes_on(self, chunk: Chunk, *, backward: bool = False) -> bool:
        """Return whether a chunk does nothing but pass its inputs on or, with `backward`, its gradients."""
        if chunk.collective is not None:
            return (chunk.collective.back if backward else chunk.collective.op) == "none"
        return chunk.kind in ("route", "unroute") and self.graph.policy(chunk.name).ways == 1

    def is_routed(self, chunk: Chunk, source: Source) -> bool:
        """Return whether a value that a chunk reads lies in the order of its experts on the way to it."""
        kinds = [chunk.kind]
        while isinstance(source, Output):
            producer = self.chunks[source.chunk]
            kinds.append(producer.kind)
            if not self.passes_on(producer):
                break
            source = producer.inputs[source.index]
        return any(kind in ROUTED for kind in kinds)

    def resolve(self, source: Source, *, backward: bool = False) -> Source:
        """Return the source of a value, or of its gradient, past the chunks that only pass it on."""
        while isinstance(source, Output) and self.passes_on(self.chunks[source.chunk], backward=backward):
            source = self.chunks[source.chunk].inputs[source.index]
        return source


def output_slot(chunk: str, index: int) -> SlotId:
    return SlotId("output", chunk, index)


def input_gradient(chunk: str, position: int) -> SlotId:
    """Return the slot of the gradient that a chunk computes for one of its inputs."""
    return SlotId("input_gradient", chunk, position)


def slot_of(chunk: Chunk, specs: Iterable[TensorSpec]) -> Slot:
    """Return the slot of values held together. Its own bytes exclude those of shared storages."""
    specs = tuple(specs)
    shared = sorted({spec.storage for spec in specs if spec.storage >= 0})
    return Slot(
        nbytes=sum(spec.nbytes for spec in specs if spec.storage < 0),
        shares=tuple((SlotId("storage", chunk.name, i), chunk.storages[i]) for i in shared),
        dynamic=any(spec.dynamic_rows for spec in specs),
    )


def incoming(flow: Flow, chunk: Chunk, position: int) -> SlotId:
    """Return the slot of a chunk's input on the chunk's devices, after adding the transfer that brings it."""
    here = flow.placements[chunk.name]
    placement = here.devices
    spec = chunk.input_specs[position]
    source = flow.resolve(chunk.inputs[position])
    match source:
        case Batch(field=batch_field):
            shared = here.mesh.degree  # neighbours that load the same samples
            loaded = SlotId(
                "batch", batch_field, devices=(placement, placement[:shared]) if shared > 1 else (placement,)
            )
            sharded = here.policy.field_placements(batch_field)
            while flow.loads.setdefault(loaded, sharded) != sharded:
                loaded = loaded.brought_to(placement[:shared])  # another region here loads other shards
            flow.values[loaded] = Slot(nbytes=spec.nbytes)
            return loaded
        case Constant(name=constant):
            resident = SlotId("constant", constant)
            flow.residents[resident] = Slot(nbytes=spec.nbytes)
            return resident
        case AxisPosition(axis=axis, on_host=on_host):
            kind: SlotKind = "host_place" if on_host else "place"
            resident = SlotId(kind, axis, devices=(placement, here.mesh.groups(axis)[0]))
            flow.residents[resident] = Slot(nbytes=spec.nbytes)
            return resident
    value = output_slot(source.chunk, source.index)
    there = flow.placements[source.chunk]
    if there.samples == here.samples:
        return value
    arrived = value.brought_to(placement)
    while flow.arrivals.setdefault(arrived, here.samples) != here.samples:
        arrived = arrived.brought_to(placement[: here.mesh.degree])  # another region here has other samples
    if arrived not in flow.values:
        producer = flow.chunks[source.chunk]
        routed = flow.is_routed(chunk, chunk.inputs[position])
        left, fixed = producer.outputs[source.index], source.index in producer.fixed
        send(flow, value, arrived, chunk, there, left, spec, routed=routed, fixed=fixed)
    return arrived


def outgoing(flow: Flow, chunk: Chunk, index: int) -> SlotId:
    """Return the gradient of a chunk's output on its devices."""
    # Gradients are summed on each set of readers, and each sum is sent once.
    placement = flow.placements[chunk.name]
    given = flow.gradients.get((chunk.name, index))
    assert given, f"no reader of {output_slot(chunk.name, index)} gives a gradient"
    by_set: dict[tuple[Devices, int], tuple[ChunkPlacement, list[SlotId]]] = {}
    for reader, gradient in given:
        by_set.setdefault(reader.samples, (reader, []))[1].append(gradient)
    spec = chunk.outputs[index]
    arrived: list[SlotId] = []
    for samples, (reader, gradients) in by_set.items():
        total = summed(flow, chunk, index, reader.devices, gradients)
        if samples != placement.samples:
            here = total.brought_to(placement.devices)
            send(flow, total, here, chunk, reader, flow.specs[total], spec)
            flow.specs[here] = spec
            total = here
        arrived.append(total)
    return summed(flow, chunk, index, placement.devices, arrived)


def summed(flow: Flow, chunk: Chunk, index: int, devices: Devices, given: list[SlotId]) -> SlotId:
    """Return the sum of several gradients of one value on one set of devices, in the order they appear."""
    total = given[0]
    for gradient in given[1:]:
        count = 1
        while (result := SlotId("gradient_sum", chunk.name, index, count, devices=(devices,))) in flow.values:
            count += 1
        flow.values[result], flow.specs[result] = flow.values[total], flow.specs[total]
        node = SlotNode(
            op="add",
            name=f"add[{result}]",
            devices=devices,
            reads=(total, gradient),
            writes=(result,),
            origin=flow.placements[chunk.name].origin,
        )
        flow.templates.append((node, chunk.name, None))
        total = result
    return total


def send(
    flow: Flow,
    value: SlotId,
    arrived: SlotId,
    chunk: Chunk,
    there: ChunkPlacement,
    left: TensorSpec,
    spec: TensorSpec,
    *,
    routed: bool = False,
    fixed: bool = False,
) -> None:
    """Add a transfer of a value to a chunk's devices. It reslices between sets of different sizes."""
    placement = flow.placements[chunk.name]
    sliced = True
    slices = (there.mesh.slices, placement.mesh.slices)
    if slices[0] != slices[1]:
        # The first axis follows the samples if its total length is the same on both sides.
        sliced = (
            len(left.shape) > 0
            and left.shape[1:] == spec.shape[1:]
            and left.shape[0] * slices[0] == spec.shape[0] * slices[1]
        )
        # A value without a samples axis that depends on samples, such as a mean, is only valid for its slice.
        if routed or not (sliced or fixed):
            source, target = (f"on {show(each.devices)}" for each in (there, placement))
            order = ", rows in the order of their experts" if routed else ""
            raise ScheduleError(
                f"{value} cannot be resliced by samples",
                by=placement.by,
                facts={
                    there.chunk if source == target else source: f"{left.shape}{order}",
                    target: f"{spec.shape}, for {chunk.name}",
                },
                hint="shard both regions along axes of the same degrees"
                if len(there.devices) == len(placement.devices)
                else "place both regions on sets of devices of the same size",
            )
    flow.values[arrived] = Slot(nbytes=spec.nbytes, dynamic=spec.dynamic_rows)
    node = Transfer(
        name="",  # that of a microbatch
        devices=tuple(dict.fromkeys((*there.devices, *placement.devices))),
        source=there.devices,
        target=placement.devices,
        degrees=(there.mesh.degree, placement.mesh.degree),
        reads=(value,),
        writes=(arrived,),
        sliced=sliced,
        stream=flow.graph.options[chunk.name].transfer_stream or "",
        origin=placement.origin,
    )
    flow.templates.append((node, chunk.name, None))
