"""Typed messages as bytes: a JSON header that describes the value, then the raw bytes of its tensors.

Reading a message builds numbers, text, containers, tensors and instances of the classes that the codec was
made for, and nothing else. It never imports a module or calls a function that the message names.

Functions cannot travel as data. `pack` and `unpack` pickle those of a job, for a channel between a driver and
its own workers; see docs/security.md.
"""

import dataclasses
import importlib
import io
import json
import mmap
import os
import pickle
import struct
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor, fx, nn

from piper.checkpoint.json_state import name_of, raw_bytes
from piper.ir.devices import InternedDevices
from piper.ir.ids import SlotId
from piper.process.custom_operators import check_importable, importable, modules_of
from piper.workers.processes import nameless_file

ALIGNMENT = 64  # of a tensor's bytes, so that any element type can be read in place


def rounded(nbytes: int) -> int:
    """Return bytes rounded up, so that any type can begin there."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


HEADER = struct.Struct("!Q")  # length of the JSON header
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
PLAIN = (bool, int, float, str)
CONTAINERS: Mapping[str, Callable[[Iterable[object]], object]] = {"t": tuple, "s": set, "z": frozenset}
TAGS: Mapping[type, str] = {tuple: "t", InternedDevices: "t", set: "s", frozenset: "z"}
Buffer = bytes | memoryview | Tensor


class MessageError(ValueError):
    """Bytes that are not a message of this codec."""


class Codec:
    """Encodes and decodes values of plain types, tensors, and a closed set of classes."""

    def __init__(self, roots: Iterable[object] = ()) -> None:
        """Take these classes, or those that type hints name, and the classes that their fields name."""
        self.attributes = reachable(roots)
        self.names = {cls: name_of(cls) for cls in self.attributes}
        self.classes = {name: cls for cls, name in self.names.items()}

    def encode(self, value: object) -> bytes:
        """Return the message that holds `value`."""
        return b"".join(self.parts(value))

    def parts(self, value: object) -> Iterator[bytes | memoryview]:
        """Yield the message that holds `value` part by part."""
        blobs = _Blobs()
        header = json.dumps(self._tree(value, blobs), separators=(",", ":")).encode()
        yield from (HEADER.pack(len(header)), header)
        at = HEADER.size + len(header)
        for blob in blobs:
            if isinstance(blob, Tensor):  # not earlier: those of an accelerator are copied one at a time
                blob = raw_bytes(blob.resolve_conj().resolve_neg())
            gap = -at % ALIGNMENT
            yield from (b"\0" * gap, blob)
            at += gap + len(blob)

    def _tree(self, value: object, blobs: "_Blobs") -> object:
        """Return `value` as what JSON can hold. Bytes go to `blobs`."""
        kind = type(value)
        if value is None or kind in PLAIN:
            return value
        if kind is SlotId:
            return self._slot(cast(SlotId, value), blobs)
        if (name := self.names.get(kind)) is not None:
            items = [getattr(value, attribute) for attribute in self.attributes[kind]]
            return {"c": [name, [self._tree(item, blobs) for item in items]]}
        if kind is Tensor or kind is nn.Parameter:
            return {"T": self._tensor(cast(Tensor, value), blobs)}
        if kind is list:
            return [self._tree(item, blobs) for item in cast("list[object]", value)]
        if (tag := TAGS.get(kind)) is not None:
            return {tag: [self._tree(item, blobs) for item in cast("Iterable[object]", value)]}
        if isinstance(value, Mapping):
            pairs = [[self._tree(key, blobs), self._tree(item, blobs)] for key, item in value.items()]
            return {"d": pairs}
        if isinstance(value, bytes | bytearray):
            blobs.append(memoryview(value))
            return {"b": len(value)}
        if isinstance(value, torch.dtype):
            return {"y": str(value)}
        raise TypeError(f"{name_of(kind)} cannot be sent in a message")

    def _slot(self, slot: SlotId, blobs: "_Blobs") -> object:
        """Return the id of a slot: its fields at first, later its number. A plan names each slot often."""
        if slot in blobs.slots:
            return {"i": blobs.slots[slot]}
        fields = [self._tree(item, blobs) for item in slot.fields]
        blobs.slots[slot] = len(blobs.slots)
        return {"I": fields}

    def _tensor(self, tensor: Tensor, blobs: "_Blobs") -> list[object]:
        blobs.append(tensor.detach())
        return [tensor.nbytes, str(tensor.dtype), list(tensor.shape), tensor.requires_grad]

    def decode(self, message: bytes | bytearray | mmap.mmap) -> object:
        """Return the value that `message` holds. Its tensors share one block of memory."""
        view = memoryview(bytearray(message) if isinstance(message, bytes) else message)
        if len(view) < HEADER.size:
            raise MessageError("a message is cut short")
        (length,) = HEADER.unpack(view[: HEADER.size])
        end = HEADER.size + length
        if end > len(view):
            raise MessageError("a message is cut short")
        try:
            reader = _Reader(self, view, end)
            return json.loads(bytes(view[HEADER.size : end]), object_hook=reader.value)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}") from error


class _Blobs(list[Buffer]):
    """The bytes that follow the header of one message, and the slots that it has described so far."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[SlotId, int] = {}


class _Reader:
    """Builds the values of one message, in the order in which their bytes were written."""

    def __init__(self, codec: Codec, view: memoryview, at: int) -> None:
        self.codec, self.view, self.at = codec, view, at
        self.slots: list[SlotId] = []

    def value(self, tree: dict[str, Any]) -> object:
        """Return what a JSON object stands for. Those inside it are built already."""
        ((tag, inner),) = tree.items()
        match tag:
            case "d":
                return dict(inner)
            case "T":
                length, dtype, shape, grad = inner
                return restore_tensor(self._blob(length), DTYPES[dtype], shape, grad)
            case "b":
                return bytes(self._blob(inner))
            case "y":
                return DTYPES[inner]
            case "I":
                self.slots.append(SlotId(*inner))
                return self.slots[-1]
            case "i":
                return self.slots[inner]
            case "c":
                name, items = inner
                cls = self.codec.classes[name]
                if issubclass(cls, BaseException):
                    return cls(*items[0])
                return cls(**dict(zip(self.codec.attributes[cls], items, strict=True)))
        return CONTAINERS[tag](inner)

    def _blob(self, length: int) -> memoryview:
        start = self.at + -self.at % ALIGNMENT
        self.at = start + length
        if length < 0 or self.at > len(self.view):
            raise MessageError("a message is cut short")
        return self.view[start : self.at]


def share(values: Mapping[str, Tensor]) -> int:
    """Write tensors into a nameless file. Return its descriptor."""
    with open(nameless_file(0), "wb") as file:
        file.writelines(Codec().parts(values))
        file.flush()
        return os.dup(file.fileno())


def shared(descriptor: int) -> Mapping[str, Tensor]:
    """Return the tensors that another process wrote, by name. A change is private to this process."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)
    return cast("Mapping[str, Tensor]", Codec().decode(memory))


def fields_of(cls: type) -> tuple[str, ...] | None:
    """Return the attributes from which an instance can be built again. None: messages cannot hold it."""
    if dataclasses.is_dataclass(cls):
        return tuple(item.name for item in dataclasses.fields(cls) if item.init)
    if issubclass(cls, BaseException):
        return ("args",)
    return ("fields",) if cls is SlotId else None  # which has a form of its own in messages


def reachable(roots: Iterable[object]) -> dict[type, tuple[str, ...]]:
    """Return the classes that these name and those that their fields can hold, with their attributes."""
    classes: dict[type, tuple[str, ...]] = {}
    left = [named for root in roots for named in classes_in(root)]
    while left:
        cls = left.pop()
        if cls not in classes and (fields := fields_of(cls)) is not None:
            classes[cls] = fields
            if not issubclass(cls, BaseException):
                left += [named for hint in typing.get_type_hints(cls).values() for named in classes_in(hint)]
    return classes


def classes_in(hint: object) -> list[type]:
    """Return the classes that a type hint names."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return [hint]
    return [named for inner in typing.get_args(hint) for named in classes_in(inner)]


@contextmanager
def pickled_by_value(*functions: object) -> Iterator[None]:
    """Let the modules of these functions be pickled whole, where a worker could not import them by name."""
    names = {getattr(function, "__module__", None) for function in functions}
    loaded = [(name, sys.modules.get(name)) for name in sorted(filter(None, names)) if name != "__main__"]
    stray = [module for name, module in loaded if module is not None and not importable(name)]
    new = [module for module in stray if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def pack(value: object) -> bytes:
    """Return a value as a pickle."""
    target = io.BytesIO()
    FunctionPickler(target, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return target.getvalue()


def unpack(data: bytes) -> object:
    """Return the value that a pickle holds. The only place that unpickles: see docs/security.md."""
    return pickle.loads(data)


class FunctionPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """Pickles tensors as their own elements and captured code as its source."""

    def reducer_override(self, obj: object) -> object:
        if type(obj) is Tensor:
            raw = bytearray(raw_bytes(obj))  # its own elements, not its whole storage
            return restore_tensor, (raw, obj.dtype, tuple(obj.shape), obj.requires_grad)
        if isinstance(obj, fx.GraphModule):
            return reduce_module(obj)
        return super().reducer_override(obj)


def restore_tensor(
    raw: bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int], grad: bool
) -> Tensor:
    """Return a tensor over received bytes."""
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(grad)


def reduce_module(module: fx.GraphModule) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return how to restore captured code: its source, the names it uses, and its attributes.

    A graph module's own pickle traces the code again when it is read, which is slow and may change it.
    """
    code = module.graph.python_code("self")
    attributes = {
        str(node.target): attrgetter(str(node.target))(module)
        for node in module.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    modules = sorted(modules_of(module.graph))  # a worker imports them first
    check_importable(modules)
    return CapturedSource, (code.src, dict(code.globals), attributes, modules, module.meta)


class CapturedSource:
    """Captured code, restored from its source."""

    def __init__(
        self,
        source: str,
        names: Mapping[str, object],
        attributes: Mapping[str, object],
        modules: Sequence[str],
        meta: Mapping[str, object],
    ) -> None:
        for name in modules:
            importlib.import_module(name)
        space: dict[str, object] = dict(names)
        exec(compile(source, "<chunk>", "exec"), space)  # what fx itself does with the code of a graph
        root = SimpleNamespace(code=source, meta=meta)  # for errors: the user's lines are in the metadata
        for path, value in attributes.items():
            *way, last = path.split(".")
            place = root
            for name in way:
                place = place.__dict__.setdefault(name, SimpleNamespace())
            setattr(place, last, value)
        self.forward = cast(Callable[..., tuple[Tensor, ...]], space["forward"])
        self.root = root

    def __call__(self, *arguments: object) -> tuple[Tensor, ...]:
        return self.forward(self.root, *arguments)
