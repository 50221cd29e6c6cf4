"""Nested state as JSON and back, exactly: what schedulers and datasets save. Nothing in it can run code.

Numbers, strings, bools, None and lists stay as they are. Any other type is an object with one tag to name it.
"""

import base64
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from piper.errors import ConfigError
from piper.runtime.accelerator import is_accelerator

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Stands for a tensor inside of a list or dict, which lies beside it under a key of its own."""

    key: str


def flat_state(state: Mapping[str, object]) -> dict[str, object]:
    """Return what an optimizer keeps for a parameter, with tensors inside of other values beside these."""
    flat: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            flat[key] = value
            continue
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        inside = {f"{key}[{number}]": tensor for number, tensor in enumerate(tensors)}
        places = map(TensorAt, inside)
        outside = tree_map_only(Tensor, lambda _: next(places), value)  # noqa: B023  called at once
        flat |= {**inside, key: outside}
    return flat


def nested_state(flat: Mapping[str, object]) -> dict[str, object]:
    """Return a state that was made flat as it was."""
    inside = {leaf.key for leaf in tree_leaves([*flat.values()]) if isinstance(leaf, TensorAt)}
    outside = {key: value for key, value in flat.items() if key not in inside}
    return {key: tree_map_only(TensorAt, lambda at: flat[at.key], value) for key, value in outside.items()}


def encode(value: object, where: str) -> Plain:
    """Return a value in the form that JSON can hold. `where` names it in an error."""
    match value:
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
        case np.generic():
            return encode(value.item(), where)
        case list() | tuple() | deque():
            items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            if isinstance(value, list):
                return items
            return {"tuple": items} if isinstance(value, tuple) else {"deque": [value.maxlen, items]}
        case Mapping() if not isinstance(value, Counter) and all(type(key) is str for key in value):
            return {"map": {cast(str, key): encode(item, f"{where}.{key}") for key, item in value.items()}}
        case Mapping():
            pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
            return {"counter" if isinstance(value, Counter) else "pairs": cast(Plain, pairs)}
    if (leaf := encode_leaf(value)) is not None:
        return leaf
    raise ConfigError(
        "a part of the state cannot be written down",
        by="save",
        facts={"at": where, "type": name_of(type(value))},
        hint="keep numbers, texts, tensors, arrays, lists, tuples and dicts in a state_dict()",
    )


def encode_leaf(value: object) -> Plain:
    """Return a value that is no container in the form that JSON can hold. None: there is no form for it."""
    match value:
        case Tensor():
            there = ["device"] if is_accelerator(value.device) else []
            return {"tensor": [name_of_dtype(value.dtype), [*value.shape], text_of(raw_bytes(value)), *there]}
        case np.ndarray() if value.dtype.kind in "biufc":
            return {"array": [value.dtype.str, [*value.shape], text_of(value.tobytes())]}
        case bytes():
            return {"bytes": text_of(value)}
        case torch.dtype():
            return {"dtype": name_of_dtype(value)}
        case TensorAt():
            return {"at": value.key}
    return None


def raw_bytes(value: Tensor) -> memoryview:
    """Return a tensor's elements as bytes."""
    flat = value.detach().cpu().contiguous()
    return (
        flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data
    )  # one element may have any stride


def text_of(raw: bytes | memoryview) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(raw).decode("ascii")


def name_of(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def decode(value: Plain, device: torch.device | None = None) -> object:
    """Return the value that `encode` encoded. Raise ValueError, TypeError or KeyError for any other JSON.

    device: where tensors go that were on an accelerator. None: to the host, as all others.
    """
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    match tag, inner:
        case "tuple", list():
            return tuple(decode(item, device) for item in inner)
        case "deque", [maxlen, list(items)]:
            return deque((decode(item, device) for item in items), cast("int | None", maxlen))
        case "map", dict():
            return {key: decode(item, device) for key, item in inner.items()}
        case (("pairs" | "counter"), list()):
            pairs = cast("list[tuple[Plain, Plain]]", inner)
            pairs_read = {decode(key): decode(item, device) for key, item in pairs}
            return Counter(cast("dict[object, int]", pairs_read)) if tag == "counter" else pairs_read
    return decode_leaf(tag, inner, device)


def decode_leaf(tag: str, inner: Plain, device: torch.device | None) -> object:
    """Return the value that `encode_leaf` encoded under a tag."""
    match tag, inner:
        case "bytes", str():
            return base64.b64decode(inner, validate=True)
        case "dtype", str():
            return dtype_named(inner)
        case "at", str():
            return TensorAt(inner)
        case "tensor", [str(dtype), list(shape), str(text), *there]:
            raw, kind = bytearray(base64.b64decode(text, validate=True)), dtype_named(dtype)
            flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            return flat.view(cast("list[int]", shape)).to(device=device if there else None)
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
