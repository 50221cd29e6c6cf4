"""Types of elements by torch's names of them: their size, and the type that gradients are summed in."""

import re

HALF = ("bfloat16", "float16")  # types of which the optimizer keeps a float32 master copy
BITS = re.compile(r"\d+")  # the first number in a type's name: float32, bfloat16, float8_e4m3fn


def itemsize(dtype: str) -> int:
    """Return the number of bytes of one element of a type."""
    bits = BITS.search(dtype)
    return int(bits[0]) // 8 if bits else 1  # bool


def summed_as(dtype: str) -> str:
    """Return the type that gradients of a type are summed in: long sums in half precision lose digits."""
    return "float32" if dtype in HALF else dtype
