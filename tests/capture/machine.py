"""Runs captured chunks by hand: forward in order, then backward in reverse, with nothing in between.

Several devices run in lockstep, each on its own slice, and exchange rows at `route` and `unroute`. What a phase
is given, and what becomes of what it returns, follows from its `PhaseSpec` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from piper.capture.autodiff.differentiate import Captured
from piper.ir.chunk import (
    AxisPosition,
    Batch,
    Chunk,
    Constant,
    Output,
    Phase,
    PhaseSpec,
    Source,
    TensorSpec,
)

Value = tuple[str, int]
Backward = Literal["whole", "split"]


class Exchange:
    """Which rows of one `route` go where, among the devices of one group."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        group = len(counts)
        sent = [count.view(group, -1) for count in counts]  # [to, expert]
        self.received = [
            torch.stack([sent[source][device] for source in range(group)]) for device in range(group)
        ]
        self.counts = [count.sum(0) for count in self.received]
        self.out = [count.sum(1).tolist() for count in sent]
        self.back = [count.sum(1).tolist() for count in self.received]

    def order(self, device: int) -> Tensor:
        """Rows arrive by sender; experts want them by expert."""
        experts = self.received[device].shape[1]
        owner = (
            torch.arange(experts).repeat(len(self.counts)).repeat_interleave(self.received[device].flatten())
        )
        return owner.argsort(stable=True)

    def there(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [moved[self.order(device)] for device, moved in enumerate(_swap(rows, self.out))]

    def home(self, rows: Sequence[Tensor]) -> list[Tensor]:
        unsorted = []
        for device, part in enumerate(rows):
            moved = torch.empty_like(part)
            moved[self.order(device)] = part
            unsorted.append(moved)
        return _swap(unsorted, self.back)


def _swap(rows: Sequence[Tensor], sizes: Sequence[list[int]]) -> list[Tensor]:
    parts = [part.split(size) for part, size in zip(rows, sizes, strict=True)]
    return [torch.cat([part[device] for part in parts]) for device in range(len(rows))]


@dataclass
class Device:
    """One device's tensors."""

    batch: Mapping[str, Tensor]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    values: dict[Value, Tensor] = field(default_factory=dict)
    grads: dict[Value, Tensor] = field(default_factory=dict)
    saved: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    carried: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    param_grads: dict[str, Tensor] = field(default_factory=dict)


class Machine:
    """Devices that run one captured model."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        exact_memory: bool = True,
    ) -> None:
        self.captured, self.exact_memory = captured, exact_memory
        self.chunks = captured.outline.chunks
        wide = {torch.float16, torch.float32, torch.bfloat16}
        self.sharded = {
            name
            for chunk in self.chunks
            if chunk.kind == "expert"
            for name in (*chunk.params, *chunk.buffers)
        }
        group = len(batches)
        state = {name: tensor.detach() for name, tensor in model.named_parameters()}
        floating = next(iter(state.values())).dtype
        self.devices = [
            Device(
                batch={name: t.to(floating) if t.dtype in wide else t for name, t in batch.items()},
                params={name: self._part(name, t, rank, group) for name, t in state.items()},
                buffers={name: self._part(name, t, rank, group).clone() for name, t in model.named_buffers()},
            )
            for rank, batch in enumerate(batches)
        ]
        self.exchanges: dict[str, Exchange] = {}

    def _part(self, name: str, tensor: Tensor, rank: int, group: int) -> Tensor:
        return tensor.chunk(group)[rank] if name in self.sharded and group > 1 else tensor

    @torch.no_grad()
    def step(self, backward: Backward = "whole", weight: float = 1.0) -> None:
        """Forward through every chunk, then back; split: all weight gradients at the very end."""
        for chunk in self.chunks:
            self._exchange_forward(chunk) if chunk.kind in ("route", "unroute") else self._each(chunk, "F")
        loss = self.captured.outline.loss
        for device in self.devices:
            found = device.values[loss.chunk, loss.index]
            device.grads[loss.chunk, loss.index] = torch.full_like(found, weight)
        for chunk in reversed(self.chunks):
            if "B" not in chunk.phases:
                continue
            if chunk.kind in ("route", "unroute"):
                self._exchange_backward(chunk)
            else:
                self._each(chunk, "B" if backward == "whole" else "BI")
        if backward == "split":
            for chunk in self.chunks:
                if "BW" in chunk.phases:
                    self._each(chunk, "BW")

    def loss(self) -> Tensor:
        return torch.stack(
            [self.value(self.captured.outline.loss, rank) for rank in range(len(self.devices))]
        )

    def value(self, output: Output, rank: int = 0) -> Tensor:
        return self.devices[rank].values[output.chunk, output.index]

    def gradients(self) -> dict[str, Tensor]:
        """Every parameter's gradient, summed over replicas, joined over shards."""
        names = {name for device in self.devices for name in device.param_grads}
        return {
            name: torch.cat([device.param_grads[name] for device in self.devices])
            if name in self.sharded
            else torch.stack([device.param_grads[name] for device in self.devices]).sum(0)
            for name in names
        }

    def _each(self, chunk: Chunk, phase: Phase) -> None:
        for device in self.devices:
            self._run(device, chunk, phase)

    def _run(self, device: Device, chunk: Chunk, phase: Phase) -> None:
        spec = chunk.phases[phase]
        reads = self._reads(device, chunk, spec)
        kept = [read.clone() if isinstance(read, Tensor) else read for read in reads]
        results = list(self.captured.phase(chunk.key, phase)(*reads))
        for read, before in zip(reads, kept, strict=True):
            assert read is before or _same(read, before), f"{phase}[{chunk.name}] changed what it read"
        if phase == "F":
            assert not _memory(reads) & _memory(results), f"F[{chunk.name}] returns what it read"
            self._keep(device, chunk, results)
            return
        given = [read for read in reads if not any(read is own for own in device.carried.get(chunk.name, ()))]
        assert not _memory(given) & _memory(results), f"{phase}[{chunk.name}] returns what it read"
        filled = [result for result in results if isinstance(result, Tensor) and result.numel()]
        assert len(_memory(filled)) == len(filled), f"two results of {phase}[{chunk.name}] share memory"
        self._add(device, chunk, spec, results)
        if phase == "BI":
            count = len(spec.grad_inputs)
            device.carried[chunk.name] = tuple(results[count:])
            check_specs(chunk.carried, results[count:])

    def _reads(self, device: Device, chunk: Chunk, spec: PhaseSpec) -> list[Tensor]:
        return [
            *(self._source(device, chunk.inputs[index]) for index in spec.inputs),
            *(device.params[name] for name in spec.params),
            *(device.buffers[name] for name in spec.buffers),
            *(device.saved[chunk.name][index] for index in spec.saved),
            *(device.carried[chunk.name][index] for index in spec.carried),
            *(device.grads[chunk.name, index] for index in spec.tangents),  # a KeyError: nobody made it
        ]

    def _source(self, device: Device, source: Source) -> Tensor:
        match source:
            case Batch(field=name):
                return device.batch[name]
            case Constant(name=name):
                return self.captured.constants[name]
            case Output(chunk=name, index=index):
                return device.values[name, index]
            case AxisPosition():
                raise AssertionError("this machine runs undivided models")

    def _keep(self, device: Device, chunk: Chunk, results: list[Tensor]) -> None:
        outputs, rest = results[: len(chunk.outputs)], results[len(chunk.outputs) :]
        saved, mutated = rest[: len(chunk.saved)], rest[len(chunk.saved) :]
        if self.exact_memory:
            check_specs([*chunk.outputs, *chunk.saved], [*outputs, *saved], chunk.storages)
        assert all(output.is_contiguous() for output in outputs)
        # Another device would receive a copy.
        device.values.update({(chunk.name, i): output.clone() for i, output in enumerate(outputs)})
        device.saved[chunk.name] = tuple(saved)
        for name, tensor in zip(chunk.mutated, mutated, strict=True):
            device.buffers[name].copy_(tensor)

    def _add(self, device: Device, chunk: Chunk, spec: PhaseSpec, results: list[Tensor]) -> None:
        for index, grad in zip(spec.grad_inputs, results, strict=False):
            source = chunk.inputs[index]
            assert isinstance(source, Output)
            assert grad.is_contiguous()
            assert tuple(grad.shape) == tuple(self._source(device, source).shape)
            _accumulate(device.grads, (source.chunk, source.index), grad)
        if spec.grad_params:
            for name, grad in zip(spec.grad_params, results[len(spec.grad_inputs) :], strict=True):
                assert grad.shape == device.params[name].shape
                assert grad.is_contiguous()
                _accumulate(device.param_grads, name, grad)

    def _exchange_forward(self, chunk: Chunk) -> None:
        rows, counts = ([self._source(device, source) for device in self.devices] for source in chunk.inputs)
        if chunk.kind == "route":
            exchange = self.exchanges[chunk.name] = Exchange(counts)
            results = zip(exchange.there(rows), exchange.counts, strict=True)
            for device, (moved, own) in zip(self.devices, results, strict=True):
                device.values[chunk.name, 0], device.values[chunk.name, 1] = moved, own
                assert tuple(own.shape) == chunk.outputs[1].shape
        else:
            for device, moved in zip(self.devices, self._exchange(chunk).home(rows), strict=True):
                device.values[chunk.name, 0] = moved

    def _exchange_backward(self, chunk: Chunk) -> None:
        assert chunk.phases["B"] == PhaseSpec(tangents=(0,), grad_inputs=(0,))
        grads = [device.grads[chunk.name, 0] for device in self.devices]
        exchange = self._exchange(chunk)
        moved = exchange.home(grads) if chunk.kind == "route" else exchange.there(grads)
        source = chunk.inputs[0]
        assert isinstance(source, Output)
        for device, grad in zip(self.devices, moved, strict=True):
            _accumulate(device.grads, (source.chunk, source.index), grad)

    def _exchange(self, chunk: Chunk) -> Exchange:
        if chunk.kind == "route":
            return self.exchanges[chunk.name]
        counts = chunk.inputs[1]
        assert isinstance(counts, Output)
        return self.exchanges[counts.chunk]


def _accumulate(grads: dict[Any, Tensor], key: object, grad: Tensor) -> None:
    """Add in place, as a runtime would: nobody else may hold this memory."""
    if key in grads:
        grads[key] += grad
    else:
        grads[key] = grad


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type have the same bits: also where these are no numbers."""
    first, second = (each.resolve_conj().flatten().view(torch.uint8) for each in (a, b))
    return torch.equal(first, second)


def _memory(tensors: Sequence[object]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor) and t.numel()}


def check_specs(specs: Sequence[TensorSpec], tensors: Sequence[Tensor], storages: Sequence[int] = ()) -> None:
    """The outline tells the truth about what a phase returned: shapes, bytes, and who shares memory with whom."""
    owners: dict[int, int] = {}
    for number, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if not isinstance(tensor, Tensor):  # an eager chunk's tape
            continue
        assert str(tensor.dtype).removeprefix("torch.") == spec.dtype
        memory = tensor.untyped_storage()
        if not spec.dynamic_rows:
            assert tuple(tensor.shape) == spec.shape
            assert tensor.numel() * tensor.element_size() == spec.nbytes
            wanted = storages[spec.storage] if spec.storage >= 0 else spec.nbytes
            # A kernel may reduce to a scalar inside the memory it worked in.
            assert memory.nbytes() == wanted or not tensor.dim(), (number, spec, memory.nbytes())
        group = spec.storage if spec.storage >= 0 else -1 - number
        if memory.nbytes():
            assert owners.setdefault(memory.data_ptr(), group) == group, f"{number} shares memory unannounced"
