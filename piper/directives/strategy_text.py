"""The text of a strategy that a run writes to `strategy.txt`: a line for each directive."""

from collections.abc import Sequence
from dataclasses import fields

from piper.directives.base import Directive


def strategy_text(strategy: Sequence[Directive]) -> str:
    """Return the directives one per line, with their arguments and where they were written."""
    lines = []
    for number, directive in enumerate(strategy):
        given = ", ".join(
            f"{field.name}={shown(value)}"
            for field in fields(directive)
            if field.name != "source" and (value := getattr(directive, field.name)) is not None
        )
        lines.append(f"{directive.title(number)}: {given}\n")
    return "".join(lines) or "one device\n"


def shown(value: object) -> str:
    """Format a directive's argument as its user would write it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)
