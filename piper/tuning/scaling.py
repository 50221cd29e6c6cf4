"""A captured model at a microbatch size that was not captured, from two sizes that were.

Shapes, bytes and arithmetic of a chunk are affine in the samples of a slice, so two recordings give those of
every size.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from piper.ir.chunk import CapturedModel

T = TypeVar("T")
Known = dict[tuple[int, int], tuple[object, ...]]  # by the identities of two tuples, which live longer
SAME = frozenset(("storage", "index", "experts"))  # numbers that are positions, not amounts
DROPPED = frozenset(("key",))  # of code, which differs from size to size


class UnlikeLayersError(Exception):
    """Two recordings that differ in more than amounts."""


def scaled(one: CapturedModel, other: CapturedModel, rows: int) -> CapturedModel | None:
    """Return the outline for slices of `rows` samples. None: the two outlines differ in their structure."""
    share = (rows - one.rows) / (other.rows - one.rows)
    known: Known = {}
    try:
        chunks = tuple(
            replace(between(first, second, share, known), key="")
            for first, second in zip(one.chunks, other.chunks, strict=True)
        )
    except (UnlikeLayersError, ValueError):
        return None
    return replace(one, chunks=chunks, rows=rows)


def between(one: T, other: T, share: float, known: Known) -> T:
    """Return the value that lies at `share` of the way from one to the other; amounts are affine.

    known: tuples that were done. Equal layers share theirs.
    """
    if one is other:
        return one
    if isinstance(one, tuple) and isinstance(other, tuple):
        key = (id(one), id(other))
        if key not in known:
            known[key] = tuple(between(a, b, share, known) for a, b in zip(one, other, strict=True))
        return known[key]  # type: ignore[return-value]
    if one == other and not is_dataclass(one):
        return one
    if type(one) is not type(other) or isinstance(one, bool):
        raise UnlikeLayersError
    result: object
    match one, other:
        case int(), int():
            result = round(one + (other - one) * share)
        case float(), float():
            result = one + (other - one) * share
        case Mapping(), Mapping() if one.keys() == other.keys():
            result = {key: between(one[key], other[key], share, known) for key in one}
        case _ if is_dataclass(one):
            result = between_records(one, other, share, known)
        case _:
            raise UnlikeLayersError
    return result  # type: ignore[return-value]


def between_records(one: object, other: object, share: float, known: Known) -> object:
    """Return a dataclass whose amounts lie between those of two others."""
    changed = {}
    for field in fields(one):  # type: ignore[arg-type]
        first, second = getattr(one, field.name), getattr(other, field.name)
        if field.name in SAME and first != second:
            raise UnlikeLayersError
        changed[field.name] = first if field.name in DROPPED else between(first, second, share, known)
    return replace(one, **changed)  # type: ignore[type-var]
