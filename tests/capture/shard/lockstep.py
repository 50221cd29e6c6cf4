"""Runs a divided forward on every device of a group at once, with the collectives' backwards as they are written."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from piper.capture.shard.layout import CopiedShard
from piper.capture.trace.effects import draws
from piper.capture.trace.recording import FromBuffer, FromParameter, Origin, Recording, how_of, is_collective
from piper.ir.chunk import AxisPosition, Batch, Collective, Constant
from piper.ir.sharding import Shard


def cut(value: Tensor, how: Shard, degree: int) -> list[Tensor]:
    """Return each device's part of a tensor."""
    if isinstance(how, CopiedShard):
        slices = cut(value, Shard(how.dim), degree // how.copies)
        return [part.clone() for part in slices for _ in range(how.copies)]
    apart = value.unflatten(how.dim, (how.blocks, -1))
    if how.zigzag:
        pieces = apart.chunk(2 * degree, how.dim + 1)
        parts = [torch.cat([pieces[i], pieces[2 * degree - 1 - i]], how.dim + 1) for i in range(degree)]
    else:
        parts = list(apart.chunk(degree, how.dim + 1))
    return [part.flatten(how.dim, how.dim + 1).clone() for part in parts]


def join(parts: Sequence[Tensor], how: Shard) -> Tensor:
    """Put the parts of a tensor together; of gradients, those of devices that hold the same slice are summed."""
    n = len(parts)
    if isinstance(how, CopiedShard):
        runs = [parts[i : i + how.copies] for i in range(0, n, how.copies)]
        return join([torch.stack(list(run)).sum(0) for run in runs], Shard(how.dim))
    apart = [part.unflatten(how.dim, (how.blocks, -1)) for part in parts]
    if how.zigzag:
        halves = [part.chunk(2, how.dim + 1) for part in apart]
        apart = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        assert len(apart) == 2 * n
    return torch.cat(list(apart), how.dim + 1).flatten(how.dim, how.dim + 1)


def perform(how: Collective, given: Sequence[Tensor]) -> list[Tensor]:
    """Do what a group does with a value."""
    n = how.degree
    match how.op:
        case "none":
            return [value.clone() for value in given]
        case "all_reduce":
            return [sum(given[1:], given[0]).clone() for _ in given]
        case "max":
            return [torch.stack(list(given)).amax(0) for _ in given]
        case "shift":
            return [given[i - 1].clone() for i in range(n)]
        case "shift_back":
            return [given[(i + 1) % n].clone() for i in range(n)]
        case "all_gather":
            assert how.joined is not None
            return [join(given, how.joined) for _ in given]
        case "slice":
            assert how.cut is not None
            return [cut(value, how.cut, n)[i] for i, value in enumerate(given)]
        case "reduce_scatter":
            assert how.cut is not None
            return cut(sum(given[1:], given[0]), how.cut, n)
        case "all_to_all":
            assert how.cut is not None and how.joined is not None
            return cut(join(given, how.joined), how.cut, n)


class Exchange(torch.autograd.Function):
    """One collective over the values of all devices."""

    @staticmethod
    def forward(ctx: object, how: Collective, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how  # type: ignore[attr-defined]
        return tuple(perform(how, given))

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *perform(ctx.how.adjoint, [g.to_dense().contiguous() for g in grads]))  # type: ignore[attr-defined]


def run(
    recording: Recording,
    degree: int,
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Tensor]],
) -> tuple[list[Tensor], Counter[str]]:
    """Run a forward on every device of one group; returns the losses and how often each collective ran."""
    return run_on_axes(recording, [("", degree)], params, buffers, batches)


def run_on_axes(
    recording: Recording,
    axes: Sequence[tuple[str, int]],
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Tensor]],
) -> tuple[list[Tensor], Counter[str]]:
    """Run a forward on a grid of devices. axes: name and degree, the innermost first; a lone one has any name."""
    env, ran = evaluate(recording, axes, params, buffers, batches)
    return env[recording.results[0]], ran  # type: ignore[return-value]


def evaluate(
    recording: Recording,
    axes: Sequence[tuple[str, int]],
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Tensor]],
) -> tuple[dict[fx.Node, list[object]], Counter[str]]:
    """Run a forward on a grid of devices; returns every value and how often each collective ran.

    Each device draws random numbers from a generator of its own, in the state that torch's has at the start.
    """
    env: dict[fx.Node, list[object]] = {}
    ran: Counter[str] = Counter()
    count = math.prod(degree for _, degree in axes)
    generators = [torch.get_rng_state()] * count
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            env[node] = given(recording, recording.origins[node], axes, params, buffers, batches)
        elif node.op == "get_attr":
            env[node] = [getattr(recording.root, str(node.target))] * count
        elif is_collective(node):
            how = how_of(node)
            source = node.args[0]
            assert isinstance(source, fx.Node)
            env[node] = [None] * count
            for members in groups(axes, how.axis):
                made = Exchange.apply(how, *(env[source][i] for i in members))  # type: ignore[no-untyped-call]
                for i, value in zip(members, made, strict=True):
                    env[node][i] = value
            ran[how.op] += 1
            if node.meta["example_value"].requires_grad:
                ran["back " + how.back] += 1
        else:
            with torch.set_grad_enabled(recording.modes[node].grad):
                env[node] = _on_each(node, env, generators)
    return env, ran


def _on_each(
    node: fx.Node, env: Mapping[fx.Node, Sequence[object]], generators: list[Tensor]
) -> list[object]:
    """Run one operation on every device; one that draws advances the device's generator."""
    results = []
    for i, state in enumerate(generators):
        if draws(node):
            torch.set_rng_state(state)
        results.append(call(node, {used: env[used][i] for used in node.all_input_nodes}))
        if draws(node):
            generators[i] = torch.get_rng_state()
    return results


def stride(axes: Sequence[tuple[str, int]], axis: str) -> tuple[int, int]:
    """Return how far apart neighbours along an axis are, and how many they are."""
    apart = 1
    for name, degree in axes:
        if name == axis or len(axes) == 1:
            return apart, degree
        apart *= degree
    raise AssertionError(f"no axis {axis} among {axes}")


def groups(axes: Sequence[tuple[str, int]], axis: str) -> list[list[int]]:
    """Return the devices of each group along an axis, in order."""
    apart, degree = stride(axes, axis)
    count = math.prod(size for _, size in axes)
    firsts = [i for i in range(count) if i // apart % degree == 0]
    return [[first + apart * j for j in range(degree)] for first in firsts]


def given(
    recording: Recording,
    origin: Origin,
    axes: Sequence[tuple[str, int]],
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Tensor]],
) -> list[object]:
    """Return what every device gives for an input."""
    degree = math.prod(size for _, size in axes)
    match origin:
        case FromParameter(name=name):
            return [p[name] for p in params]
        case FromBuffer(name=name):
            return [buffers[name]] * degree
        case Batch(field=name):
            return [batch[name] for batch in batches]
        case Constant(name=name):
            return [recording.constants[name]] * degree
        case AxisPosition(axis=axis):
            apart, ways = stride(axes, axis)
            return [torch.tensor([i // apart % ways]) for i in range(degree)]
    raise AssertionError(origin)


def call(node: fx.Node, env: Mapping[fx.Node, object]) -> object:
    """Run one operation on one device."""
    args = map_arg(node.args, env.__getitem__)  # type: ignore[arg-type]
    kwargs = map_arg(node.kwargs, env.__getitem__)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]
