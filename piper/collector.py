"""Keeps Python's cycle collector out of the way of work that makes many objects which stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no cycles inside. A sixth of a trace went on them; plans are many small records without one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
