"""Runs a divided forward on every device of a group at once, with the collectives' backwards as they are written."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from piper.capture.divide.collective import how_of, is_collective
from piper.capture.trace.recording import FromBuffer, FromParameter, Origin, Recording
from piper.ir.chunk import AxisPosition, Batch, Collective, Constant, HostPlace
from piper.sharding import Slicing


def cut(value: Tensor, how: Slicing, degree: int) -> list[Tensor]:
    """Return each device's part of a tensor."""
    apart = value.unflatten(how.dim, (how.blocks, -1))
    if how.zigzag:
        pieces = apart.chunk(2 * degree, how.dim + 1)
        parts = [torch.cat([pieces[i], pieces[2 * degree - 1 - i]], how.dim + 1) for i in range(degree)]
    else:
        parts = list(apart.chunk(degree, how.dim + 1))
    return [part.flatten(how.dim, how.dim + 1).clone() for part in parts]


def join(parts: Sequence[Tensor], how: Slicing) -> Tensor:
    """Put the parts of a tensor together."""
    n = len(parts)
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
        return (None, *perform(ctx.how.adjoint, [g.contiguous() for g in grads]))  # type: ignore[attr-defined]


def run(
    recording: Recording,
    degree: int,
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Tensor]],
) -> tuple[list[Tensor], Counter[str]]:
    """Run a forward on every device; returns the losses and how often each collective ran."""
    env: dict[fx.Node, list[object]] = {}
    ran: Counter[str] = Counter()
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            env[node] = given(recording, recording.origins[node], degree, params, buffers, batches)
        elif node.op == "get_attr":
            env[node] = [getattr(recording.root, str(node.target))] * degree
        elif is_collective(node):
            how = how_of(node)
            source = node.args[0]
            assert isinstance(source, fx.Node)
            env[node] = list(Exchange.apply(how, *env[source]))  # type: ignore[no-untyped-call]
            ran[how.op] += 1
            if node.meta["example_value"].requires_grad:
                ran["back " + how.back] += 1
        else:
            with torch.set_grad_enabled(recording.modes[node].grad):
                env[node] = [
                    call(node, {used: env[used][i] for used in node.all_input_nodes}) for i in range(degree)
                ]
    return env[recording.results[0]], ran  # type: ignore[return-value]


def given(
    recording: Recording,
    origin: Origin,
    degree: int,
    params: Sequence[Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Tensor]],
) -> list[object]:
    """Return what every device gives for an input."""
    match origin:
        case FromParameter(name=name):
            return [p[name] for p in params]
        case FromBuffer(name=name):
            return [buffers[name]] * degree
        case Batch(field=name):
            return [batch[name] for batch in batches]
        case Constant(name=name):
            return [recording.constants[name]] * degree
        case AxisPosition() | HostPlace():
            return [torch.tensor([i]) for i in range(degree)]
    raise AssertionError(origin)


def call(node: fx.Node, env: Mapping[fx.Node, object]) -> object:
    """Run one operation on one device."""
    args = map_arg(node.args, env.__getitem__)  # type: ignore[arg-type]
    kwargs = map_arg(node.kwargs, env.__getitem__)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]
