"""What counts as a number among the values that a user gives: True and False do not."""

import math
from typing import TypeGuard


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
