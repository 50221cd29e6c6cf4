"""Calls of operations as a small model: their tensors come from parameters, their results become gradients.

Each result is multiplied by a parameter of its own shape, and the loss is the sum. So that parameter's gradient is
the result, element for element, and the gradient of an operand is weighted differently in each element.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import piper

BATCH = {"x": torch.ones(2, dtype=torch.float64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An operation and the arguments of one call of it.

    differentiable: gradients flow to its operands. values: False for an operation like `empty`, of which only
    the shape is known. inside: the operands, as the call leaves them, are results too. marked: of the operands, only
    those that require a gradient get one.
    """

    name: str
    call: Callable[..., Any]  # or a function that returns a module, if `is_module`
    args: Sequence[object]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    differentiable: bool = True
    values: bool = True
    inside: bool = False
    marked: bool = False
    is_module: bool = False


class Calls(nn.Module):
    """A model of several samples, each in a region of its own. Their sum is the loss, each one a metric."""

    def __init__(self, calls: Sequence["Called"]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for call in self.calls:
            with piper.annotate("OP"):
                found.append(call(x))
        return found


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    parts = model(batch["x"])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total, {str(number): (part, 1) for number, part in enumerate(parts)}


def operands(sample: Sample) -> list[Tensor]:
    """Return the tensors among a sample's arguments, in order."""
    leaves = pytree.tree_leaves((tuple(sample.args), dict(sample.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class _Operand:
    """Stands for a tensor among the arguments, by its number."""

    number: int


class Called(nn.Module):
    """A model of one sample, whose results have these shapes."""

    def __init__(self, sample: Sample, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.sample = sample
        self.module = sample.call() if sample.is_module else None
        numbers = count()
        self.args, self.options = pytree.tree_map_only(
            Tensor, lambda _: _Operand(next(numbers)), (tuple(sample.args), dict(sample.kwargs))
        )
        self.tensors = [
            self._kept(f"operand{number}", tensor, tensor.requires_grad or not sample.marked)
            for number, tensor in enumerate(operands(sample))
        ]
        for number, shape in enumerate(shapes):
            self._kept(f"result{number}", torch.empty(shape, dtype=torch.float64))

    def _kept(self, name: str, tensor: Tensor, trained: bool = True) -> tuple[str, bool]:
        """Hold a tensor as a parameter, or as a buffer. Return its name, and whether it is complex."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        made = torch.empty(real.shape, dtype=real.dtype)
        if real.is_floating_point() and trained:
            self.register_parameter(name, nn.Parameter(made))
        else:
            self.register_buffer(name, made)
        return name, tensor.is_complex()

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for number, result in enumerate(self.results(x)):
            total = total + (result * getattr(self, f"result{number}")).sum()
        return total

    def results(self, x: Tensor) -> list[Tensor]:
        """Return what the call gives, as tensors of real numbers in fp64."""
        one = x.mean()
        taken = [self._operand(getattr(self, name), one, is_complex) for name, is_complex in self.tensors]
        args = [_with(entry, taken) for entry in self.args]
        call = self.sample.call if self.module is None else self.module
        made = call(*args, **{key: _with(entry, taken) for key, entry in self.options.items()})
        found = _flat([made, *taken] if self.sample.inside else made)
        return [self._real(result, one) for result in found]

    def _operand(self, kept: Tensor, one: Tensor, is_complex: bool) -> Tensor:
        """Return a value that is computed, so that it may be written: equal to the parameter or buffer."""
        if not kept.is_floating_point():
            return kept.clone()
        value = (kept if self.sample.differentiable else kept.detach()) * one
        return torch.view_as_complex(value) if is_complex else value

    def _real(self, result: object, one: Tensor) -> Tensor:
        if not isinstance(result, Tensor):
            return torch.mul(one, float(result))  # type: ignore[arg-type]
        if not self.sample.values:
            return torch.zeros_like(result, dtype=torch.float64)
        return (torch.view_as_real(result.resolve_conj()) if result.is_complex() else result).to(
            torch.float64
        )


def _with(entry: Any, taken: Sequence[Tensor]) -> Any:  # noqa: ANN401  an argument of any operation
    if isinstance(entry, _Operand):
        return taken[entry.number]
    if isinstance(entry, list):
        return [_with(part, taken) for part in entry]
    return tuple([_with(part, taken) for part in entry]) if type(entry) is tuple else entry


def _flat(made: object) -> list[object]:
    if isinstance(made, Tensor | bool | int | float):
        return [made]
    if isinstance(made, dict):
        return [part for value in made.values() for part in _flat(value)]
    if isinstance(made, list | tuple):
        return [part for value in made for part in _flat(value)]
    return []
