"""Samples of every operator of Python on tensors: as functions of `operator`, reflected, and in place."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.opinfo.sample import Sample

A = torch.tensor([[1.5, -0.5, 2.0], [0.25, 3.0, -1.0]], dtype=torch.float64)
B = torch.tensor([[0.5, 2.5, 2.0], [1.0, 0.75, 1.25]], dtype=torch.float64)
SQUARE = torch.tensor([[1.0, 0.5, -1.0], [0.25, 2.0, 1.5], [-0.5, 0.125, 1.0]], dtype=torch.float64)
I = torch.tensor([[5, 3, 12], [7, 1, 6]])  # noqa: E741
J = torch.tensor([[1, 2, 3], [2, 1, 3]])
C = torch.tensor([[True, False, True], [False, True, False]])
D = torch.tensor([[True, True, False], [False, False, True]])
ROW = torch.tensor([[True, False, True]])

_ARITHMETIC = "add sub mul truediv floordiv mod pow"
_COMPARED = "eq ne lt le gt ge"
_BITWISE = "and or xor"
_SHIFTS = "lshift rshift"
# Of `operator`, what takes no two tensors: the arguments by which each is called
_OTHERS: dict[str, tuple[Callable[..., Any], tuple[object, ...]]] = {
    **{name: (getattr(operator, name), (A,)) for name in ("abs", "neg", "pos", "length_hint")},
    **{name: (getattr(operator, name), (C,)) for name in ("inv", "invert")},
    **{name: (getattr(operator, name), (C[0, 0],)) for name in ("not_", "truth")},
    **{name: (getattr(operator, name), (A, B)) for name in ("is_", "is_not")},
    **{name: (getattr(operator, name), ([A, B], [B])) for name in ("concat", "iconcat")},
    **{name: (getattr(operator, name), (A, SQUARE)) for name in ("matmul", "imatmul")},
    **{name: (getattr(operator, name), (A, 2.0)) for name in ("contains", "countOf", "indexOf")},
    "index": (operator.index, (I[0, 0],)),
    "getitem": (operator.getitem, (A, (slice(None), 1))),
    "setitem": (operator.setitem, (A, (0, slice(1, None)), B[0, 1:])),
    "delitem": (lambda parts: operator.delitem(parts, 0) or parts, ([A, B],)),
    "call": (operator.call, (torch.add, A, B)),
    "attrgetter": (lambda x: operator.attrgetter("T")(x), (A,)),
    "itemgetter": (lambda x: operator.itemgetter(0, 1)(x), (A,)),
    "methodcaller": (lambda x: operator.methodcaller("cumsum", 1)(x), (A,)),
}


def samples() -> Iterator[Sample]:
    """Return a sample for each operator and each type of its operands, with the operands as it leaves them."""
    for name in (*_ARITHMETIC.split(), *_COMPARED.split(), *_BITWISE.split(), *_SHIFTS.split()):
        compared = name in _COMPARED.split()
        plain = f"{name}_" if name in ("and", "or") else name
        yield from _pairs(f"operator.{plain}", getattr(operator, plain), name)
        if not compared:
            yield from _pairs(f"operator.i{name}", getattr(operator, f"i{name}"), name)
            for kind in "ri":
                yield from _pairs(
                    f"Tensor.__{kind}{name}__", getattr(Tensor, f"__{kind}{name}__", None), name
                )
    for name, (call, args) in _OTHERS.items():
        yield Sample(name=f"operator.{name}", call=call, args=args, inside=True)
    yield Sample(name="Tensor.__rmatmul__", call=Tensor.__rmatmul__, args=(SQUARE, A), inside=True)


def covered() -> set[str]:
    """Return the functions of `operator` that have a sample."""
    names = {sample.name for sample in samples()}
    return {name.removeprefix("operator.") for name in names if name.startswith("operator.")}


def _pairs(shown: str, call: Callable[..., Any] | None, name: str) -> Iterator[Sample]:
    """Return samples of one operator on numbers, whole numbers and masks, also with one operand twice."""
    if call is None:  # tensors do not have it
        return
    if name not in (*_BITWISE.split(), *_SHIFTS.split()):
        yield Sample(name=shown, call=call, args=(A, B), inside=True)
        yield Sample(name=shown, call=call, args=(B, 2), inside=True)
        yield Sample(name=shown, call=lambda x: call(x, x), args=(B,), inside=True)
    else:
        yield Sample(name=shown, call=call, args=(I, J), inside=True)
    if name in _BITWISE.split():
        yield Sample(name=shown, call=call, args=(C, D), inside=True)
        yield Sample(name=shown, call=call, args=(C, ROW), inside=True)


def families() -> Iterator[Sample]:
    """Return few samples that hold all of these operators that can be captured: quick, for every run."""
    bits, shifts = _functions(_BITWISE), _functions(_SHIFTS)
    numbers = [*_functions(f"{_ARITHMETIC} {_COMPARED}"), *map(_reflected, _functions(_ARITHMETIC))]
    changed = list(map(_copied, _functions(_ARITHMETIC, "i")))
    changed_bits = list(map(_copied, _functions(_BITWISE, "i")))
    changed_shifts = list(map(_copied, _functions(_SHIFTS, "i")))
    yield _family("operators of numbers", ([*numbers, *changed], 0, 1), args=(A.abs(), B))
    pairs = [(bits + changed_bits, 0, 1), (bits + changed_bits, 0, 2)]
    yield _family("operators of masks", *pairs, args=(C, D, ROW))
    yield _family(
        "operators of whole numbers", (bits + changed_bits + shifts + changed_shifts, 0, 1), args=(I, J)
    )


def _functions(names: str, kind: str = "") -> list[Callable[..., Any]]:
    return [
        getattr(operator, f"{kind}{name}_" if not kind and name in ("and", "or") else f"{kind}{name}")
        for name in names.split()
    ]


def _family(name: str, *calls: tuple[list[Callable[..., Any]], int, int], args: tuple[object, ...]) -> Sample:
    """Return a sample that makes several calls, each with two of the arguments."""

    def called(*given: object) -> list[object]:
        return [call(given[first], given[second]) for some, first, second in calls for call in some]

    return Sample(name=name, call=called, args=args, inside=True)


def _reflected(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, number: call(number, x)


def _copied(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that writes a copy, and that gives the copy as well as its own result."""

    def called(x: Tensor, y: object) -> list[Tensor]:
        copy = x * 1 if x.is_floating_point() else x.clone()
        return [call(copy, y), copy]

    return called
