"""The arguments of directives: the values that each may have, in Python and in JSON alike."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from piper.errors import ScheduleError
from piper.ir.numbers import is_number, is_whole

Given = Callable[[str, str, object], object]  # of the directive and the argument by name, and a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The values that an argument may have, in words and as a test."""

    words: str
    has: Callable[[object], bool]


def one_of(*values: object) -> Domain:
    """Return a domain of a few values."""
    *others, last = (f'"{value}"' if isinstance(value, str) else str(value) for value in values)
    return Domain(
        words=f"{', '.join(others)} or {last}" if others else last,
        has=lambda given: any(type(given) is type(value) and given == value for value in values),
    )


def whole(least: int) -> Domain:
    """Return the whole numbers from `least`."""
    return Domain(
        words=f"a whole number from {least}",
        has=lambda given: is_whole(given, least),
    )


FRACTION = Domain(
    words="a number from 0 to 1",
    has=lambda given: is_number(given) and 0 <= given <= 1,
)
SIZE = Domain(
    words="a size in MiB from 0",
    has=lambda given: is_number(given) and 0 <= given < float("inf"),
)
POSITIVE_SIZE = Domain(
    words="a size in MiB above 0",
    has=lambda given: is_number(given) and given > 0,
)


def argument(
    domain: Domain | None = None,
    *,
    default: object = MISSING,
    hint: str = "",
    key: str = "",
    flags: Mapping[str, int] | None = None,
    needed: bool = False,
    given: Given | None = None,
) -> Any:  # noqa: ANN401  as `dataclasses.field` does
    """Return a dataclass field that is an argument of a directive. A default of None may stay None.

    hint: what the values of the domain mean. key: its name in JSON, if that is another. flags: in JSON it is
    the highest of these whose key is true. needed: JSON must have it, though Python need not. given: returns
    what the directive holds for a value, or refuses it.
    """
    needed = needed or default is MISSING
    about = {"domain": domain, "hint": hint, "flags": flags, "needed": needed, "given": given}
    about |= {"key": key} if key else {}
    return field(metadata=about) if default is MISSING else field(default=default, metadata=about)


def check_value(by: str, name: str, value: object, domain: Domain, hint: str) -> None:
    """Refuse a value that is not of a domain."""
    if not domain.has(value):
        raise ScheduleError(f"{name} must be {domain.words}, got {value!r}", by=by, hint=hint)
