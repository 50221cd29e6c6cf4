"""Nested state as JSON and back, exactly: what schedulers and datasets save. Nothing in it can run code.

Numbers, strings, bools, None and lists stay as they are. Any other type is an object with one tag to name it.
"""

import base64
from collections import Counter
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from piper.errors import ConfigError

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def encode(value: object, where: str) -> Plain:
    """Return a value in the form that JSON can hold. `where` names it in an error."""
    match value:
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
        case np.generic():
            return encode(value.item(), where)
        case list():
            return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {"tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        case Mapping() if not isinstance(value, Counter) and all(type(key) is str for key in value):
            return {"map": {cast(str, key): encode(item, f"{where}.{key}") for key, item in value.items()}}
        case Mapping():
            pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
            return {"counter" if isinstance(value, Counter) else "pairs": cast(Plain, pairs)}
        case Tensor():
            return {"tensor": [name_of_dtype(value.dtype), [*value.shape], text_of(raw_bytes(value))]}
        case np.ndarray() if value.dtype.kind in "biufc":
            return {"array": [value.dtype.str, [*value.shape], text_of(value.tobytes())]}
        case bytes() | torch.dtype():
            return {"bytes": text_of(value)} if isinstance(value, bytes) else {"dtype": name_of_dtype(value)}
    raise ConfigError(
        "a part of the state cannot be written down",
        by="save",
        facts={"at": where, "type": name_of(type(value))},
        hint="keep numbers, texts, tensors, arrays, lists, tuples and dicts in a state_dict()",
    )


def raw_bytes(value: Tensor) -> memoryview:
    """Return a tensor's elements as bytes."""
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def text_of(raw: bytes | memoryview) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(raw).decode("ascii")


def name_of(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def decode(value: Plain) -> object:
    """Return the value that `encode` encoded. Raise ValueError, TypeError or KeyError for any other JSON."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    match tag, inner:
        case "tuple", list():
            return tuple(decode(item) for item in inner)
        case "map", dict():
            return {key: decode(item) for key, item in inner.items()}
        case (("pairs" | "counter"), list()):
            pairs_read = {decode(key): decode(item) for key, item in cast("list[tuple[Plain, Plain]]", inner)}
            return Counter(cast("dict[object, int]", pairs_read)) if tag == "counter" else pairs_read
        case "bytes", str():
            return base64.b64decode(inner, validate=True)
        case "dtype", str():
            return dtype_named(inner)
        case "tensor", [str(dtype), list(shape), str(text)]:
            raw, kind = bytearray(base64.b64decode(text, validate=True)), dtype_named(dtype)
            flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            return flat.view(cast("list[int]", shape))
        case "array", [str(dtype), list(shape), str(text)]:
            array = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.dtype(dtype))
            return array.reshape(cast("list[int]", shape)).copy()
    raise ValueError(f"there is no kind of value {tag!r}")


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name such as "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype
