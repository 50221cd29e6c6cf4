"""Methods that work out their result once for each of their arguments."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def once(method: Callable[Concatenate[Any, P], R]) -> "cached_property[Callable[P, R]]":
    """Keep the results of a method by its arguments, as long as its object lives."""
    return cached_property(lambda owner: cast("Callable[P, R]", cache(partial(method, owner))))
