"""Reads cached properties in a trace without their lock. A trace keeps nothing: its graph has the result.

Works around: torch 2.11. Dynamo refuses the lock that Python 3.11 takes there; Python 3.12 takes none.
Not needed from: no version yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch.compiler import is_dynamo_compiling

from piper.process.attributes import replaced


@contextmanager
def reading_cached_properties() -> Iterator[None]:
    """Let the traces inside the block read cached properties as plain ones."""

    def read(kept: Any, instance: Any, owner: type | None = None) -> object:  # noqa: ANN401  a descriptor's protocol
        if instance is None:
            return kept
        values = vars(instance)
        if kept.attrname in values:
            return values[kept.attrname]
        result = kept.func(instance)
        if not is_dynamo_compiling():  # torch itself reads many of its own
            values[kept.attrname] = result
        return result

    with replaced(cached_property, "__get__", read):
        yield
