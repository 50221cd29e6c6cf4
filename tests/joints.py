"""Traces of equal chunks are made once in a run of the tests: they are half of what a test of a small model takes.

A compilation traces equal chunks of its model once, by their structural key. Here the traces of all compilations in
one process are kept by the same key: a key that leaves something out makes tests fail. Lines of the source, which
errors and profiles name, belong to the key. Traces that took long are also stored in `build/joints`, for the other workers, the
other suites and the next run with the same torch and the same code that captures.
"""

import hashlib
import os
import pickle
import shutil
import sys
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.autodiff import compose
from piper.capture.autodiff.joint import Joint, trace_joint
from piper.capture.compile.hashing import structural_key
from piper.capture.trace.piece import Body
from piper.capture.trace.sizes import SymbolicSizes

ROOT = Path(__file__).parents[1]
KEPT = 400  # traces in memory; what was not used for longest is dropped first
LONG = 0.1  # seconds of a core that a stored trace took: writing one takes a tenth of that
UNUSED = 7 * 24 * 3600.0  # seconds after which the traces of other sources are removed
OURS = (
    "torch",
    "piper",
    "operator",
    "_operator",
    "math",
    "builtins",
)  # whose functions a stored trace may call
META = ("val", "partitioner_tag", "memory", "stack_trace")  # what a trace says about its nodes
NODES = ("inputs", "params", "buffers", "tangents", "mutated", "grad_inputs", "grad_params")
Trace = Callable[[], Joint]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJoints:
    """Traces in a folder, one file each."""

    folder: Path

    def find(self, body: Body, key: str, trace: Trace) -> Joint:
        """Return the stored trace of a chunk, or trace it now and store it if that takes long."""
        if not storable(body):
            return trace()
        path = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if path.exists():
            return read_joint(zlib.decompress(path.read_bytes()))
        began = time.thread_time()
        joint = trace()
        constants = any(node.op == "get_attr" for node in joint.graph.nodes)
        if time.thread_time() - began > LONG and not constants:
            write_joint(joint, path)
        return joint


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


def read_joint(data: bytes) -> Joint:
    """Return a trace that `write_joint` has written."""
    from torch.fx._graph_pickler import GraphPickler  # it takes a second to import

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch reads its own pickles by a name that it deprecates
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        loaded = GraphPickler.loads(data, mode)
    assert isinstance(loaded, tuple)
    module, places, outputs = loaded
    nodes = {node.name: node for node in module.graph.nodes}
    found = {kind: {place: nodes[name] for place, name in places[kind].items()} for kind in NODES}
    results = [nodes[name] for name in outputs]
    return Joint(graph=module.graph, root=module, outputs=results, sizes=SymbolicSizes(), **found)


def write_joint(joint: Joint, path: Path) -> None:
    """Store a trace, unless it holds what cannot be pickled."""
    from torch.fx._graph_pickler import GraphPickler, Options

    places = {kind: {place: node.name for place, node in getattr(joint, kind).items()} for kind in NODES}
    whole = (joint.root, places, [node.name for node in joint.outputs])
    options = Options(ops_filter=None, node_metadata_key_filter=META.__contains__)
    try:
        data = GraphPickler.dumps(whole, options)
    except (pickle.PicklingError, AttributeError, TypeError, AssertionError, NotImplementedError):
        return
    with suppress(OSError):  # a tree that nobody may write to: every process traces for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(zlib.compress(data, 1))
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
        ways: int,
        device: torch.device,
        *,
        decompose: bool = False,
    ) -> Joint:
        """Return the trace of a chunk, as `trace_joint` makes it."""
        lines = tuple(str(node.meta.get("stack_trace")) for node in body.graph.nodes)
        key = (structural_key(body, trained, tangents, ways, device), decompose, lines, settings())
        if key not in self.known:

            def trace() -> Joint:
                return trace_joint(body, trained, tangents, ways, device, decompose=decompose)

            stored = None if decompose else self.stored
            self.known[key] = trace() if stored is None else stored.find(body, repr(key), trace)
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
        owner = ROOT / "piper" / name
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
    patch.object(compose, "trace_joint", SharedJoints(stored=stored).trace).start()
