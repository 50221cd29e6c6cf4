"""Traces of equal chunks are made once in a run of the tests: they are half of what a test of a small model takes.

A compilation traces equal chunks of its model once, by their structural key. Here the traces of all compilations in
one process are kept by the same key: a key that leaves something out makes tests fail. Lines of the source, which
errors and profiles name, belong to the key. Traces that took long are also stored in `build/joints`, without their lines, for the other workers, the
other suites and the next run with the same torch and the same code that captures.
"""

import hashlib
import io
import os
import pickle
import shutil
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import piper
from piper.capture.autodiff import differentiate as autodiff
from piper.capture.autodiff.joint import Joint, trace_joint
from piper.capture.compile.hashing import structural_key
from piper.capture.trace.assemble import Body
from piper.capture.trace.sizes import SymbolicSizes

ROOT = Path(__file__).parents[1]
KEPT = 400  # traces in memory; what was not used for longest is dropped first
LONG = 0.05  # seconds of a core that a stored trace took: writing and reading one takes a tenth of that
UNUSED = 7 * 24 * 3600.0  # seconds after which the traces of other sources are removed
OURS = (
    "torch",
    "piper",
    "operator",
    "_operator",
    "math",
    "builtins",
)  # whose functions a stored trace may call
META = ("val", "partitioner_tag", "memory")  # what a trace says about its nodes, beside their lines
ADDED = "Gradient addition node"  # torch says so after a line whose value several operations read
NODES = ("inputs", "params", "buffers", "tangents", "mutated", "grad_inputs", "grad_params")
Trace = Callable[[], Joint]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJoints:
    """Traces in a folder, one file each."""

    folder: Path

    def find(self, body: Body, key: object, lines: Sequence[str], trace: Trace) -> Joint:
        """Return the stored trace of a chunk, or trace it now and store it if that takes long.

        lines: those of its nodes. A stored trace serves equal chunks on other lines: it says which of the lines each node has.
        """
        if not storable(body):
            return trace()
        numbers = numbered(lines)
        name = repr((key, [numbers[line] for line in lines]))
        path = self.folder / hashlib.sha256(name.encode()).hexdigest()
        if path.exists():
            return read_joint(zlib.decompress(path.read_bytes()), lines)
        began = time.thread_time()
        joint = trace()
        constants = any(node.op == "get_attr" for node in joint.graph.nodes)
        if time.thread_time() - began > LONG and not constants:
            write_joint(joint, path, lines)
        return joint


def numbered(lines: Sequence[str]) -> dict[str, int]:
    """Return a number for each different line, in their order."""
    return {line: number for number, line in enumerate(dict.fromkeys(lines))}


def storable(body: Body) -> bool:
    """Return whether the key of a chunk means the same in another process: it names no object of this one."""
    return body.experts is None and all(
        node.op in ("placeholder", "output", "call_method") or calls_ours(node) for node in body.graph.nodes
    )


def calls_ours(node: fx.Node) -> bool:
    """Return whether a node calls a function that no test defines."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        return str(node.target).split(".")[0] in ("aten", "prims", "piper")
    module = getattr(node.target, "__module__", None) or "torch"  # torch's own functions in C have none
    return module.split(".")[0] in OURS


class JointPickler(pickle.Pickler):
    """Writes nodes by their numbers, fake tensors by what code reads of them, and operations by name.

    Torch's own pickler of graphs describes tensors so fully that it takes a fifth of the time of a trace.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.numbers: dict[fx.Node, int] = {}

    def persistent_id(self, value: object) -> object:
        """Return what stands for a value that is not pickled as it is."""
        match value:
            case fx.Node():
                return self.numbers[value]
            case OpOverload():
                return str(value)
            case FakeTensor() if not value.requires_grad:
                size, rest = divmod(value.untyped_storage().nbytes(), value.itemsize)
                if isinstance(size, int) and not rest:
                    return (
                        value.shape,
                        value.stride(),
                        value.dtype,
                        value.device,
                        size,
                        value.storage_offset(),
                    )
        if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | HigherOrderOperator):
            raise pickle.PicklingError(f"{value} means something in this process only")
        return None


class JointUnpickler(pickle.Unpickler):
    """Reads what `JointPickler` has written."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.nodes: list[fx.Node] = []
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def persistent_load(self, written: Any) -> object:  # noqa: ANN401 (as `persistent_id` returns it)
        """Return the value that is meant."""
        match written:
            case int():
                return self.nodes[written]
            case str():
                namespace, name, overload = written.split(".")
                return getattr(getattr(getattr(torch.ops, namespace), name), overload)
        shape, strides, dtype, device, size, offset = written
        memory = torch.empty(size, dtype=dtype, device="meta")
        return FakeTensor(self.mode, memory.as_strided(shape, strides, offset), device)


def read_joint(data: bytes, lines: Sequence[str]) -> Joint:
    """Return a trace that `write_joint` has written. lines: those of the chunk's nodes."""
    unpickler = JointUnpickler(io.BytesIO(data))
    graph, stacks = fx.Graph(), [*numbered(lines)]
    count, places, outputs = unpickler.load()
    nodes = unpickler.nodes
    for _ in range(count):
        (op, name, target, args, kwargs), (line, added), meta = unpickler.load()
        node = graph.create_node(op, target, args, kwargs, name)
        node.meta = meta if line is None else {**meta, "stack_trace": stacks[line] + added}
        nodes.append(node)
    sorted_nodes = {kind: {place: nodes[number] for place, number in places[kind].items()} for kind in NODES}
    results = [nodes[number] for number in outputs]
    return Joint(graph=graph, root=nn.Module(), outputs=results, sizes=SymbolicSizes(), **sorted_nodes)


def write_joint(joint: Joint, path: Path, lines: Sequence[str]) -> None:
    """Store a trace, unless it holds what means nothing in another process. lines: those of the chunk's nodes."""
    file = io.BytesIO()
    pickler = JointPickler(file)
    nodes = [*joint.graph.nodes]
    numbers = {node: number for number, node in enumerate(nodes)}
    places = {kind: {place: numbers[node] for place, node in getattr(joint, kind).items()} for kind in NODES}
    numbers_of_lines = {"None": None, **numbered(lines)}
    try:
        pickler.dump((len(nodes), places, [numbers[node] for node in joint.outputs]))
        for number, node in enumerate(nodes):
            meta = {name: node.meta[name] for name in META if name in node.meta}
            line, added, rest = (node.meta.get("stack_trace") or "None").partition(ADDED)
            pickler.dump(
                (
                    (node.op, node.name, node.target, node.args, node.kwargs),
                    (numbers_of_lines[line], added + rest),
                    meta,
                )
            )
            pickler.numbers[node] = number
    except (pickle.PicklingError, AttributeError, TypeError, KeyError):
        return
    with suppress(OSError):  # a tree that nobody may write to: every process traces for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(zlib.compress(file.getvalue(), 1))
        new.replace(path)  # another process sees all of it or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJoints:
    """Traces chunks, and keeps the traces."""

    known: OrderedDict[object, Joint] = field(default_factory=OrderedDict)
    stored: StoredJoints | None = None

    def trace(
        self,
        body: Body,
        trained: Sequence[bool],
        tangents: Sequence[int],
        device: torch.device,
        *,
        decompose: bool = False,
    ) -> Joint:
        """Return the trace of a chunk, as `trace_joint` makes it."""
        lines = tuple(str(node.meta.get("stack_trace")) for node in body.graph.nodes)
        asked = (structural_key(body, trained, tangents, device), decompose, settings())
        key = (asked, lines)
        if key not in self.known:

            def trace() -> Joint:
                return trace_joint(body, trained, tangents, device, decompose=decompose)

            stored = None if decompose else self.stored
            self.known[key] = trace() if stored is None else stored.find(body, asked, lines, trace)
            if len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]


def settings() -> tuple[object, ...]:
    """Return the settings of torch by which it chooses operations."""
    cuda = torch.backends.cuda
    attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), attention


def sources() -> str:
    """Return a name for all that decides how a chunk is traced, besides the chunk."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for name in (
        "capture",
        "errors.py",
        "experts.py",
        "ir",
        "losses.py",
        "process",
    ):  # what capturing may import
        owner = Path(piper.__file__).parent / name
        for path in sorted(owner.rglob("*.py")) if owner.is_dir() else [owner]:
            digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def remove_unused(folder: Path, now: float) -> None:
    """Remove the traces of sources for which no run has traced anything for long."""
    for other in folder.glob("*"):
        if now - other.stat().st_mtime > UNUSED:
            shutil.rmtree(other, ignore_errors=True)


@cache  # once in a process, as `share_captures`
def share_joints() -> None:
    """Let all compilations of this process share traces, until it ends."""
    folder = ROOT / "build" / "joints"
    remove_unused(folder, time.time())
    stored = StoredJoints(folder=folder / sources())
    patch.object(autodiff, "trace_joint", SharedJoints(stored=stored).trace).start()
