"""Judges one sharded operation: equal to eager in fp64, refused with a message, wrong, or a raw error.

The operation is written in ATen operations as a model is, sharded, and run on every device of a group in this
process. Its operands are copies of the inputs, so that whole ones are activations and not parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.shard.aten import as_aten
from piper.capture.shard.axis_sharding import AxisSharding, Request
from piper.capture.shard.layout import divides
from piper.capture.shard.request import regions_of, shard_forward
from piper.capture.shard.sharder import Sharder
from piper.capture.trace.recording import FromParameter, Mode, Origin, Recording
from piper.errors import CaptureError
from piper.ir.chunk import Batch
from piper.ir.mesh import mesh_of
from piper.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard
from tests.capture.shard import lockstep

Call = Callable[..., Sequence[Tensor]]
SEED = 42  # that torch's own samples of random operations set


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An operation as a function of tensors, and values for them."""

    name: str
    call: Call
    tensors: tuple[Tensor, ...]
    direct: bool = False  # the operation reads parameters, not copies of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a sharded operation."""

    kind: Literal["equal", "refused", "wrong", "raw"]
    text: str = ""


def recorded(sample: Sample) -> Recording:
    """Record an operation as a forward in ATen operations."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    graph = fx.Graph()
    origins: dict[fx.Node, Origin] = {}
    operands = []
    for i, tensor in enumerate(sample.tensors):
        node = graph.placeholder(f"x{i}")
        with mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)
        node.meta["example_value"] = fake
        origins[node] = FromParameter(name=f"x{i}") if tensor.requires_grad else Batch(field=f"x{i}")
        operands.append(node)
    if not sample.direct:
        operands = [graph.call_function(torch.clone, (node,)) for node in operands]
    count = len(sample.call(*sample.tensors))
    both = graph.call_function(lambda *given: tuple(sample.call(*given)), tuple(operands))
    results = tuple(
        graph.call_function(torch.clone, (graph.call_function(lambda all, i: all[i], (both, i)),))
        for i in range(count)
    )
    modes = {node: Mode() for node in graph.nodes if node.op == "call_function"}
    recording = Recording(
        graph=graph,
        root=torch.nn.Module(),
        origins=origins,
        results=results,
        tags={node: () for node in graph.nodes},
        modes=modes,
        bundles={},
    )
    return as_aten(recording)


def targets_of(recording: Recording) -> set[str]:
    """Return the names of the operations of a recording."""
    return {str(node.target) for node in recording.graph.nodes if node.op == "call_function"}


def layouts_of(tensor: Tensor, degree: int, *, short: bool = False) -> list[Placement]:
    """Return every way in which a group can hold a tensor; short: without blocks and zigzag."""
    found: list[Placement] = [REPLICATE]
    for dim, size in enumerate(tensor.shape):
        ways = [Shard(dim), Shard(dim, 2), Shard(dim, 3), Shard(dim, zigzag=True)]
        found += [way for way in ways[: 1 if short else None] if divides(size, way, degree)]
    if tensor.dtype is not torch.bool and bool(torch.isfinite(tensor).all()):
        found.append(Partial())
    return found


def parts_of(tensor: Tensor, layout: Placement, degree: int) -> list[Tensor]:
    """Return what each device holds. Terms of a sum are multiples by powers of two, so that none is rounded."""
    match layout:
        case Shard():
            return lockstep.cut(tensor, layout, degree)
        case Partial():
            return [tensor * 2 ** (degree - 1), *(-tensor * 2**i for i in reversed(range(degree - 1)))]
        case Replicate():
            return [tensor.clone() for _ in range(degree)]


def sharding_of(recording: Recording, layouts: Sequence[Placement], degree: int) -> AxisSharding:
    """Return how to shard a recorded operation with its operands in some layouts."""
    weights: dict[str, Any] = {}
    batch: dict[str, Any] = {}
    for origin, layout in zip(recording.origins.values(), layouts, strict=True):
        if layout != REPLICATE:
            if isinstance(origin, FromParameter):
                weights[origin.name] = layout
            else:
                assert isinstance(origin, Batch)
                batch[origin.field] = layout
    return AxisSharding(request=request_of(degree), weights=weights, batch=batch)


def request_of(
    degree: int, between: int | None = None, attention: str = "gather", zigzag: bool = False
) -> Request:
    """Return what a directive asks that shards all operations of a recording without regions."""
    return Request(
        by="shard #0",
        axis="TP",
        degree=degree,
        stream="tp",
        origin=0,
        between=between,
        attention=attention,
        zigzag=zigzag,
        regions={(): mesh_of(tuple(range(degree)), ())},
    )


def sharded(recording: Recording, layouts: Sequence[Placement], degree: int) -> Sharder:
    """Shard a recorded operation with its operands in some layouts."""
    sharding = sharding_of(recording, layouts, degree)
    return shard_forward(recording, sharding, regions_of(recording))


def judge(sample: Sample, recording: Recording, layouts: Sequence[Placement], degree: int) -> Verdict:
    """Shard an operation, run it forward and backward on every device, and compare it with eager."""
    try:
        made = sharded(recording, layouts, degree)
    except CaptureError as error:
        return Verdict(kind="refused", text=str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001  the suite counts raw errors
        return Verdict(kind="raw", text=f"{type(error).__name__}: {str(error)[:300]}")
    held = made.sharding.weights | made.sharding.batch  # type: ignore[operator]
    layouts = [held.get(f"x{i}", REPLICATE) for i in range(len(layouts))]
    devices = [
        parts_of(t.detach(), layout, degree) for t, layout in zip(sample.tensors, layouts, strict=True)
    ]
    for parts, tensor in zip(devices, sample.tensors, strict=True):
        for part in parts:
            part.requires_grad_(tensor.requires_grad)
    given = [{f"x{i}": parts[rank] for i, parts in enumerate(devices)} for rank in range(degree)]
    with _comparable():
        wanted = [result.clone() for result in sample.call(*(t.clone() for t in sample.tensors))]
    try:
        with _comparable():
            values, _ = lockstep.evaluate(made.recorded(), [("TP", degree)], given, {}, given)
        got = [values[result] for result in made.recorded().results]
        return _compared(sample, made, layouts, devices, wanted, got)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001  the suite counts raw errors
        return Verdict(kind="raw", text=f"at run time: {type(error).__name__}: {str(error)[:300]}")


@contextmanager
def _comparable() -> Iterator[None]:
    """Draw the same numbers each time, and fill memory that nothing wrote (`torch.empty`) with NaN."""
    torch.manual_seed(SEED)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _compared(
    sample: Sample,
    made: Sharder,
    layouts: Sequence[Placement],
    devices: Sequence[Sequence[Tensor]],
    wanted: Sequence[Tensor],
    got: Sequence[Sequence[Tensor]],
) -> Verdict:
    for i, (want, each) in enumerate(zip(wanted, got, strict=True)):
        for value in each:
            if why := unlike(value, want):
                return Verdict(kind="wrong", text=f"result {i}: {why}")
    trained = [i for i, want in enumerate(wanted) if want.requires_grad]
    inputs = [i for i, tensor in enumerate(sample.tensors) if tensor.requires_grad]
    if not trained or not inputs:
        return Verdict(kind="equal")
    generator = torch.Generator().manual_seed(7)
    tangents = [torch.randn(wanted[i].shape, generator=generator, dtype=torch.float64) for i in trained]
    tangents = [t.to(wanted[i].dtype) for t, i in zip(tangents, trained, strict=True)]
    expected = _gradients([wanted[i] for i in trained], tangents, [sample.tensors[i] for i in inputs])
    pairs = [
        (value, tangent)
        for i, tangent in zip(trained, tangents, strict=True)
        for value in got[i]
        if value.requires_grad
    ]
    flat = [part for i in inputs for part in devices[i]]
    found = _gradients([value for value, _ in pairs], [tangent for _, tangent in pairs], flat)
    degree = len(devices[0])
    for n, i in enumerate(inputs):
        each = found[n * degree : (n + 1) * degree]
        for value in _joined(each, layouts[i], f"x{i}" in made.summed):
            if why := unlike(value, expected[n]):
                return Verdict(kind="wrong", text=f"gradient of input {i}: {why}")
    return Verdict(kind="equal")


def _joined(grads: Sequence[Tensor], layout: Placement, summed: bool) -> Sequence[Tensor]:
    """Return the gradients of the whole value that the devices' gradients stand for."""
    if isinstance(layout, Shard):
        return [lockstep.join(grads, layout)]
    return [sum(grads[1:], grads[0])] if summed else grads


def _gradients(outputs: list[Tensor], tangents: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    if not outputs:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(outputs, inputs, tangents, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(found, inputs, strict=True)]


def unlike(value: Tensor, want: Tensor) -> str:
    """Return how two values differ; nothing if only by the order of sums in fp64."""
    if value.shape != want.shape or value.dtype != want.dtype:
        return f"{value.dtype}{list(value.shape)} for {want.dtype}{list(want.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(value, want) else "other integers"
    value, want = value.detach(), want.detach()
    finite = want[torch.isfinite(want)]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    rounding = 1e-10 if want.dtype is torch.float64 else 1e-3
    if torch.allclose(value, want, rtol=rounding, atol=rounding * scale, equal_nan=True):
        return ""
    return f"differs by {float((value - want).abs().max()):.3g} where values reach {scale:.3g}"


def combinations(tensors: Sequence[Tensor], degree: int, limit: int) -> list[tuple[Placement, ...]]:
    """Return layouts for all operands: each by itself, each two together, then some of all; not all whole.

    limit: how many at most; 0: each operand by itself, in the simplest ways.
    """
    choices = [layouts_of(tensor, degree, short=not limit) for tensor in tensors]
    plain: list[Placement] = [REPLICATE] * len(tensors)
    found: dict[tuple[Placement, ...], None] = {}
    for i, options in enumerate(choices):
        for option in options[1:]:
            found[(*plain[:i], option, *plain[i + 1 :])] = None
    for i in range(len(choices)):
        for j in range(i + 1, len(choices)):
            for a in choices[i][1:]:
                for b in choices[j][1:]:
                    made: list[Placement] = list(plain)
                    made[i], made[j] = a, b
                    found[tuple(made)] = None
    if len(tensors) > 2:
        for n in range(max(map(len, choices))):
            found[tuple(options[min(n, len(options) - 1)] for options in choices)] = None
    found.pop(tuple(plain), None)
    every = list(found)
    alone = sum(len(options) - 1 for options in choices)
    rest = every[alone:]
    step = max(1, -(-len(rest) // max(1, limit - alone)))
    return [*every[:alone], *(rest[::step] if limit else [])]
