"""Reads sizes off fake tensors, also where a size depends on routing."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from piper.ir.chunk import TensorSpec

ROWS_WHILE_TRACING = 1013  # a prime that no real size equals, so that no guard can depend on it


class SymbolicSizes:
    """Turns symbolic sizes into numbers: each known symbol has the size it takes when routing is balanced."""

    def __init__(self, balanced: Mapping[str, int] | None = None, rows: frozenset[str] = frozenset()) -> None:
        self.balanced = dict(balanced or {})
        self.rows = rows  # the symbols that count routed rows

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size as a number. Count a symbol without a known size as 1."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs({symbol: self.balanced.get(str(symbol), 1) for symbol in _symbols(size)}))

    def shape(self, value: Tensor) -> tuple[int, ...]:
        """Return a tensor's shape in numbers."""
        return tuple(self.number(size) for size in value.shape)

    def nbytes(self, value: Tensor) -> int:
        """Return the bytes of a tensor's elements."""
        return value.element_size() * math.prod(self.shape(value))

    def storage_bytes(self, value: Tensor) -> int:
        """Return the bytes of a tensor's storage."""
        return self.number(value.untyped_storage().nbytes())

    def routed(self, value: Tensor) -> bool:
        """Return whether a tensor's size depends on routing."""
        names = {str(symbol) for size in value.shape for symbol in _symbols(size)}
        return any(name in self.rows or name not in self.balanced for name in names)

    def spec(self, value: Tensor, storage: int = -1) -> TensorSpec:
        """Return the shape, type and bytes of a tensor, as the compiler reads them."""
        return TensorSpec(
            shape=self.shape(value),
            dtype=dtype_name(value.dtype),
            nbytes=self.nbytes(value),
            storage=storage,
            dynamic_rows=self.routed(value),
        )


def unknown_rows(shapes: ShapeEnv) -> torch.SymInt:
    """Return a symbolic number of rows of which a trace knows only that it is a size."""
    source = ConstantSource("rows")
    symbol = shapes.create_symbol(ROWS_WHILE_TRACING, source, dynamic_dim=DimDynamic.DYNAMIC)
    rows = shapes.create_symintnode(symbol, hint=ROWS_WHILE_TRACING, source=source)
    assert isinstance(rows, torch.SymInt)
    return rows


def _symbols(size: int | torch.SymInt) -> Iterable[object]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type, without the module."""
    return str(dtype).removeprefix("torch.")
