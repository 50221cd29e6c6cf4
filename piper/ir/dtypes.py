"""Types of elements by torch's names, and those in which a parameter and its gradient are held and sent."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

JobPrecision = Literal["fp32", "bf16", "fp64"]
DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
HALF = ("bfloat16", "float16")
BITS = re.compile(r"\d+")  # the first number in a type's name: float32, bfloat16, float8_e4m3fn


def itemsize(dtype: str) -> int:
    """Return the number of bytes of one element of a type."""
    bits = BITS.search(dtype)
    return int(bits[0]) // 8 if bits else 1  # bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """The types of a parameter: in compute, in gathers, of its gradient, and of its master copy."""

    dtype: str  # that chunks compute in
    reduced_as: str = ""  # the type its gradients travel in between replicas; empty: that of their sum
    gathered_as: str = ""  # "fp8": rounded row by row when its shards are gathered; empty: as it is

    @property
    def sum_dtype(self) -> str:
        """Return the type that gradients are summed in: long sums in half precision lose digits."""
        # The optimizer sees parameters in this type, too.
        return "float32" if self.dtype in HALF else self.dtype

    @property
    def travel_dtype(self) -> str:
        """Return the type that gradients travel in between replicas."""
        return self.reduced_as or self.sum_dtype

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def sum_itemsize(self) -> int:
        return itemsize(self.sum_dtype)

    @property
    def travel_itemsize(self) -> int:
        return itemsize(self.travel_dtype)

    @property
    def has_master(self) -> bool:
        """Return whether the optimizer trains a copy in a longer type, which is then rounded."""
        return self.sum_dtype != self.dtype

    @property
    def splits(self) -> bool:
        """Return whether the bits of a master copy are those of the parameter and some that follow them."""
        return self.dtype == "bfloat16"

    @property
    def master_bytes(self) -> int:
        """Return the bytes of the master copy of one element, beside those that the parameter has of it."""
        if not self.has_master:
            return 0
        return self.sum_itemsize - self.itemsize if self.splits else self.sum_itemsize


def job_precision(precision: JobPrecision) -> MixedPrecision:
    """Return the types of the parameters of a job."""
    return MixedPrecision(dtype=DTYPES[precision])
