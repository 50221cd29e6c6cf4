"""Replaces functions and methods of other libraries for a while, where they offer no setting."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    """Give an attribute of a class or module another value inside the block."""
    getattr(owner, name)  # a version of the library without it must not go unnoticed
    inherited, before = name not in vars(owner), vars(owner).get(name)  # `vars`: a static method stays one
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
