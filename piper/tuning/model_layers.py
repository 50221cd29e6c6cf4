"""What each layer of a captured model costs and holds, for one microbatch size: the numbers behind bounds.

Every number is a lower bound of what a plan will show: seconds of compute alone, bytes that must be live.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

from piper.ir.chunk import PHASES, CapturedModel, Chunk, Output, Phase, TensorSpec, bundles
from piper.ir.dtypes import MixedPrecision
from piper.schedules.grid import Grid
from piper.simulate.costs import Costs

WEIGHTS: tuple[Phase, ...] = ("B", "BW")  # phases that may add gradients to a sum
CHAINED: tuple[Phase, ...] = ("F", "B", "BI")  # phases that pass on what the next stage waits for
Storage = tuple[str, str, int]  # chunk, kind, number
Walk = tuple[tuple[tuple[int, ...], int], ...]  # stages of which a backward has run, and activations at most
K = TypeVar("K")
V = TypeVar("V")


class LayerParameters(NamedTuple):
    """The parameters of a layer, as one device of a rank holds them before ZeRO."""

    nbytes: int = 0
    trained: int = 0  # elements that are trained
    trained_bytes: int = 0  # of those parameters
    sum_bytes: int = 0  # of a sum of their gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer on one microbatch."""

    work: Mapping[Phase, float]  # seconds of each phase, over all its chunks
    path: Mapping[Phase, float]  # seconds from what it reads of the layer before to what the next one reads
    parameters: Mapping[str, LayerParameters]  # by name
    saved: Mapping[Storage, int]  # bytes from its forward to its backward (B or BI)
    late: Mapping[Storage, int]  # bytes from its BI to its BW
    extra: Mapping[Phase, int]  # more bytes that are live at some time in a phase
    sends: int  # bytes of the largest value that the next layer reads
    adds: float  # seconds to add its gradients to those of other microbatches

    def divided(self, tensor: int, context: int) -> "Layer":
        """Return the layer with its costs and bytes divided; only tensor parallelism divides parameters."""
        degree = tensor * context
        return Layer(
            work={phase: spent / degree for phase, spent in self.work.items()},
            path={phase: spent / degree for phase, spent in self.path.items()},
            parameters={
                name: LayerParameters(*(amount // tensor for amount in sizes))
                for name, sizes in self.parameters.items()
            },
            saved={storage: nbytes // degree for storage, nbytes in self.saved.items()},
            late={storage: nbytes // degree for storage, nbytes in self.late.items()},
            extra={phase: nbytes // degree for phase, nbytes in self.extra.items()},
            sends=self.sends // degree,
            adds=self.adds / tensor,
        )


class ModelLayers:
    """The layers of one captured model at one microbatch size, with sums over ranges of them."""

    def __init__(
        self,
        outline: CapturedModel,
        costs: Costs,
        tag: str,
        *,
        across: bool,
        experts: int,
        optimizer_bytes: int,
    ) -> None:
        """Read a differentiated outline. across: only inputs are saved. experts: devices that divide them."""
        self.outline, self.costs, self.across = outline, costs, across
        self.experts, self.optimizer_bytes = experts, optimizer_bytes
        self.numbers = {chunk.name: dict(chunk.tags)[tag] for chunk in outline.chunks}
        self.by_name = {chunk.name: chunk for chunk in outline.chunks}
        self.chunks: list[list[Chunk]] = [[] for _ in range(1 + max(self.numbers.values()))]
        for chunk in outline.chunks:
            self.chunks[self.numbers[chunk.name]].append(chunk)
        self.known = {parameter.name: parameter for parameter in outline.parameters}
        self.layers = [self._layer(number) for number in range(len(self.chunks))]
        self._stages: dict[range, Stage] = {}
        self._sums: dict[tuple[range, ...], LayerParameters] = {}
        self.walks: dict[tuple[object, ...], tuple[Grid | None, Walk]] = {}  # by the identity of a grid
        self.orders: dict[object, float] = {}  # by candidate: of passes and transfers, seconds

    def divided(self, tensor: int, context: int) -> "ModelLayers":
        """Return the layers as one of the devices that divide them has them: at least so much of all."""
        share = copy(self)
        share.layers = [layer.divided(tensor, context) for layer in self.layers]
        share._stages, share._sums, share.walks, share.orders = {}, {}, {}, {}
        return share

    def stage(self, layers: range) -> "Stage":
        """Return the sums over a range of layers."""
        if layers not in self._stages:
            self._stages[layers] = stage_of(tuple(self.layers[number] for number in layers))
        return self._stages[layers]

    def sums(self, stages: tuple[range, ...]) -> LayerParameters:
        """Return the sums over the parameters of some stages; a tied one counts once."""
        if stages not in self._sums:
            parameters = union(self.stage(stage).parameters for stage in stages).values()
            self._sums[stages] = LayerParameters(*map(sum, zip(*parameters, strict=True)))
        return self._sums[stages]

    def _layer(self, number: int) -> Layer:
        chunks = self.chunks[number]
        work = {phase: sum(self._seconds(chunk, phase) for chunk in chunks) for phase in PHASES}
        path: dict[Phase, float] = {"BW": 0.0, **{phase: self._path(number, phase) for phase in CHAINED}}
        if self.across:
            again = sum(self._seconds(chunk, "F") for chunk in chunks if chunk.saved and "B" in chunk.phases)
            work = {**work, "B": work["B"] + again, "BI": work["BI"] + again}
        saved: dict[Storage, int] = {}
        late: dict[Storage, int] = {}
        extra = dict.fromkeys(PHASES, 0)
        for chunk in chunks:
            if chunk.has_code:
                saved |= self._saved(chunk, number)
                late |= self._late(chunk)
                for phase, spec in chunk.phases.items():  # bytes beyond what is held for backwards
                    gradients = sum(chunk.input_specs[place].nbytes for place in spec.grad_inputs)
                    extra[phase] = max(extra[phase], spec.workspace + gradients)
        return Layer(
            work=work,
            path=path,
            parameters=self._parameters(chunks),
            saved=saved,
            late=late,
            extra=extra,
            sends=max(
                (self.by_name[n].outputs[i].nbytes for n, i in self._read_next(number, "F")), default=0
            ),
            adds=self._adds(chunks),
        )

    def _seconds(self, chunk: Chunk, phase: Phase) -> float:
        if phase not in chunk.phases or not chunk.has_code:
            return 0.0
        return self.costs.compute(chunk, phase)

    def _path(self, number: int, phase: Phase) -> float:
        """Return the longest chain of chunks from the layer before to the next one; 0 where there is none."""
        reached: dict[str, float] = {}
        for chunk in self.chunks[number]:
            before = [0.0] if not number else []
            for place, source in enumerate(chunk.inputs):
                if not isinstance(source, Output) or (phase != "F" and not differentiates(chunk, place)):
                    continue
                if self.numbers[source.chunk] == number - 1:
                    before.append(0.0)
                elif source.chunk in reached:
                    before.append(reached[source.chunk])
            if before:
                reached[chunk.name] = max(before) + self._seconds(chunk, phase)
        if number + 1 == len(self.chunks):
            return reached.get(self.outline.loss.chunk, 0.0)
        return max((reached.get(name, 0.0) for name, _ in self._read_next(number, phase)), default=0.0)

    def _read_next(self, number: int, phase: Phase) -> list[tuple[str, int]]:
        """Return the outputs of a layer that the next one reads, or gives gradients of in a backward."""
        if number + 1 >= len(self.chunks):
            return []
        return [
            (source.chunk, source.index)
            for chunk in self.chunks[number + 1]
            for place, source in enumerate(chunk.inputs)
            if isinstance(source, Output) and self.numbers[source.chunk] == number
            if phase == "F" or differentiates(chunk, place)
        ]

    def _saved(self, chunk: Chunk, number: int) -> dict[Storage, int]:
        """Return what a chunk's forward leaves for its backward: saved values, and inputs that it reads."""
        if "B" not in chunk.phases:
            return {}
        reading = {*chunk.phases["B"].inputs, *chunk.kept_inputs.get("B", ())}
        if self.across:
            reading |= {*chunk.phases["F"].inputs} if chunk.saved else set()
            return self._inputs(chunk, reading, outside=number)
        storages = self._inputs(chunk, reading)
        for kind, members in bundles(chunk).items():
            storages |= self._storages(chunk, kind, [chunk.saved[place] for place in members])
        return storages

    def _late(self, chunk: Chunk) -> dict[Storage, int]:
        """Return what stays until BW: what it reads of the forward and of BI, and gradients of outputs."""
        if "BW" not in chunk.phases:
            return {}
        spec = chunk.phases["BW"]
        storages = self._storages(chunk, "carried", chunk.carried)
        for place in spec.tangents:
            storages[chunk.name, f"gradient{place}", -1] = chunk.outputs[place].nbytes
        if not self.across:
            kept = [chunk.saved[place] for place in bundles(chunk).get("kept", [])]
            storages |= self._storages(chunk, "kept", kept)
            storages |= self._inputs(chunk, {*spec.inputs, *chunk.kept_inputs.get("BW", ())})
        return storages

    def _inputs(self, chunk: Chunk, places: Iterable[int], outside: int = -1) -> dict[Storage, int]:
        """Return the storages of inputs that other chunks make; of a layer, if any, only those outside it."""
        storages: dict[Storage, int] = {}
        for place in places:
            source = chunk.inputs[place]
            if isinstance(source, Output) and self.numbers[source.chunk] != outside:
                maker = self.by_name[source.chunk]
                storages |= self._storages(maker, f"out{source.index}", [maker.outputs[source.index]])
        return storages

    def _storages(self, chunk: Chunk, kind: str, specs: Sequence[TensorSpec]) -> dict[Storage, int]:
        """Return the bytes of values by the storage that holds them; one that is shared counts once."""
        own = sum(spec.nbytes for spec in specs if spec.storage < 0)
        shared = {spec.storage for spec in specs if spec.storage >= 0}
        return {
            **({(chunk.name, kind, -1): own} if own else {}),
            **{(chunk.name, "storage", storage): chunk.storages[storage] for storage in shared},
        }

    def _adds(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds to add gradients to those of other microbatches."""
        # A compiled backward that adds them itself only reads the sum in addition.
        adding = [
            chunk for chunk in chunks if any(chunk.phases[p].in_place for p in WEIGHTS if p in chunk.phases)
        ]
        flat = self._parameters(adding)
        read = sum(one.sum_bytes for one in flat.values())
        every = self._parameters(chunks).items()
        apart = sum(one.trained_bytes + 2 * one.sum_bytes for name, one in every if name not in flat)
        added = self.costs.touch("accumulate", apart) if apart else 0.0
        return added + (self.costs.touch("compute", read) if read else 0.0)

    def _parameters(self, chunks: Sequence[Chunk]) -> dict[str, LayerParameters]:
        parameters: dict[str, LayerParameters] = {}
        for chunk in chunks:
            reached = set(chunk.phases["B"].grad_params) if "B" in chunk.phases else set()
            share = self.experts if chunk.kind == "expert" else 1
            for name in chunk.params:
                elements = prod(self.known[name].local_shape) // share
                precision = MixedPrecision(dtype=self.known[name].dtype)
                trained = elements if name in reached else 0
                parameters[name] = LayerParameters(
                    nbytes=elements * precision.itemsize,
                    trained=trained,
                    trained_bytes=trained * precision.itemsize,
                    sum_bytes=trained * precision.sum_itemsize,
                )
        return parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers that one rank runs as a unit."""

    layers: tuple[Layer, ...]
    work: Mapping[Phase, float]  # seconds of each phase on its device
    path: Mapping[Phase, float]  # seconds of each phase from what it receives to what it passes on
    adds: float  # seconds to add its gradients to those of other microbatches
    activations: int  # bytes that a microbatch holds from its forward to its backward
    late: int  # bytes of them that a microbatch holds from its BI to its BW
    extra: Mapping[Phase, int]  # live beyond `activations` at the worst moment of a phase; below 0: fewer
    parameters: Mapping[str, LayerParameters]  # by name; a tied one counts once
    trained_bytes: int  # of a gradient of all its parameters


def stage_of(layers: tuple[Layer, ...]) -> Stage:
    """Add up consecutive layers."""
    activations = sum(union(layer.saved for layer in layers).values())
    parameters = union(layer.parameters for layer in layers)
    extra: dict[Phase, int] = {"BW": max(layer.extra["BW"] for layer in layers)}
    before: dict[Storage, int] = {}
    live = 0
    for layer in layers:  # a forward grows towards `activations`, a backward shrinks from it
        live += sum(nbytes for storage, nbytes in layer.saved.items() if storage not in before)
        before |= layer.saved
        for phase in CHAINED:
            worst = live - activations + layer.extra[phase]
            extra[phase] = max(extra.get(phase, worst), worst)
    return Stage(
        layers=layers,
        work={phase: sum(layer.work[phase] for layer in layers) for phase in PHASES},
        path={phase: sum(layer.path[phase] for layer in layers) for phase in PHASES},
        adds=sum(layer.adds for layer in layers),
        activations=activations,
        late=min(activations, sum(union(layer.late for layer in layers).values())),
        extra=extra,
        parameters=parameters,
        trained_bytes=sum(each.trained_bytes for each in parameters.values()),
    )


def union(mappings: Iterable[Mapping[K, V]]) -> dict[K, V]:
    """Return all entries of several mappings."""
    return {key: value for one in mappings for key, value in one.items()}


def differentiates(chunk: Chunk, place: int) -> bool:
    """Return whether a chunk's backward gives the gradient of one of its inputs."""
    return "B" in chunk.phases and place in chunk.phases["B"].grad_inputs
