"""Code before it is compiled, and names for it by what it does: identical stages are compiled once."""

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from piper.capture.trace.assemble import Body
from piper.ir.chunk import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A phase or a piece of it as a graph, with example arguments."""

    module: fx.GraphModule
    arguments: Sequence[Tensor]  # fakes of any mode
    chunk: str
    phase: Phase
    in_place: tuple[int, ...] = ()  # results that are to be written into further arguments


def structural_key(
    body: Body,
    trained: Sequence[bool],
    tangents: Sequence[int],
    device: torch.device,
    variant: str = "",  # the settings by which the code is made from the body
) -> str:
    """Return a hash of all that decides a body's code. Parameters count by shape, not by name."""
    lines = [f"{body.experts} / 1 on {device}"]  # " / 1" is in the keys of profiles that are on disk
    for group, tensors in (("input", body.inputs), ("param", body.params), ("buffer", body.buffers)):
        for tensor in tensors:
            grad = tensor.requires_grad if group == "input" else ""
            # The names of symbols differ between otherwise equal layers.
            shape = ",".join("?" if isinstance(size, torch.SymInt) else str(size) for size in tensor.shape)
            lines.append(f"{group} {shape} {tensor.dtype} {grad}")
    lines.append(f"trained {list(trained)} tangents {list(tangents)}")
    lines += node_lines(body.graph.nodes, body.root, {})
    return digest_of([*lines, variant] if variant else lines)[:16]


def digest_of(lines: Iterable[str]) -> str:
    """Return a hash of lines of text."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def node_lines(nodes: Iterable[fx.Node], root: nn.Module, numbers: dict[fx.Node, int]) -> Iterator[str]:
    """Yield operations as text, without names that the trace chose, and add them to numbered values."""
    for node in nodes:
        numbers[node] = len(numbers)
        shown = [_text(argument, numbers) for argument in node.args]
        named = [f"{key}={_text(argument, numbers)}" for key, argument in sorted(node.kwargs.items())]
        yield f"{node.op} {_target(node, root)} {' '.join(shown + named)}"


def _target(node: fx.Node, root: nn.Module) -> str:
    if node.op == "placeholder":
        return ""
    if node.op == "get_attr":  # the body of a higher-order operation
        match value := operator.attrgetter(str(node.target))(root):
            case fx.GraphModule():
                return str(value.graph)
            case Tensor() if not isinstance(value, FakeTensor):
                return f"{value.dtype} {list(value.shape)} {value.tolist()}"
            case _:
                return f"{type(value)} {id(value)}"
    target = node.target
    if isinstance(target, str):
        return target
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return f"{name} {str(target).split(' at 0x')[0]}"  # an address is no part of what it does


def _text(argument: object, numbers: Mapping[fx.Node, int]) -> str:
    match argument:
        case fx.Node():
            return f"%{numbers[argument]}"
        case tuple() | list():
            return "[" + " ".join(_text(item, numbers) for item in argument) + "]"
        case dict():
            return "{" + " ".join(f"{key}:{_text(item, numbers)}" for key, item in argument.items()) + "}"
        case slice():
            return f"slice{_text((argument.start, argument.stop, argument.step), numbers)}"
        case _:
            return repr(argument)
