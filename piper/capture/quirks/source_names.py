"""Reads the name of what a variable of Dynamo stands for.

Works around: torch 2.11. There the name of a source is a method, later a property.
Not needed from: torch 2.13.
"""

from typing import Any


def source_name(source: Any) -> str:  # noqa: ANN401  a source of Dynamo
    """Return where Dynamo found a value: `L['self'].model.history`; empty where it made the value itself."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)
