"""CUDA as far as a captured step needs it, played on the host: streams in order, and graphs as tapes.

While a graph is captured, every operation is noted with the tensors it took and gave, and afterwards all that
was there before is as it was: a capture runs nothing. A replay does the same operations on the same tensors. So
what a step takes from the host in passing, or leaves in another tensor than the one it read, shows as on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

REFUSED = "operation not permitted when stream is capturing"


class Tape(TorchDispatchMode):
    """Notes operations while they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[Callable[..., object], Sequence[object], Mapping[str, object], object]] = []
        self.made: set[int] = set()  # storages of what was made since
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}  # what was there before, and how it was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(REFUSED)
        given = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(value)
        out = func(*args, **given)
        # As they are now: a graph knows memory, and a tensor may get other memory later.
        noted = tree_map_only(Tensor, Tensor.detach, (args, given, out))
        self.noted.append((func, *noted))
        taken = {address(value) for value in tensors_in((args, given))}
        self.made |= {address(value) for value in tensors_in(out)} - taken
        return out

    def _save(self, written: object) -> None:
        for value in tensors_in(written):
            if address(value) not in self.made and address(value) not in self.saved:
                base = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
                self.saved[address(value)] = (base, base.clone())

    def undo(self) -> None:
        """Put everything back that was there before."""
        for base, kept in self.saved.values():
            base.copy_(kept)

    def play(self) -> None:
        """Do the same again."""
        for func, args, kwargs, out in self.noted:
            again = func(*args, **kwargs)
            for old, new in zip(tensors_in(out), tensors_in(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


class Stream:
    """A stream on which everything is over at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.waited = 0

    def wait_event(self, event: object) -> None:
        self.waited += 1

    def wait_stream(self, other: object) -> None:
        self.waited += 1


class Event:
    def __init__(self, *_: object, **__: object) -> None:
        self.records = 0

    def record(self, stream: object = None) -> None:
        self.records += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class Graph:
    def __init__(self) -> None:
        self.tape = Tape()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.tape.play()


@contextmanager
def capture(graph: Graph, **_: object) -> Iterator[None]:
    with graph.tape:
        yield
    graph.tape.undo()


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.cuda be this, and executors of streams on the host use it."""
    played: dict[str, object] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "default_stream": Stream,
        "current_stream": Stream,
        "set_stream": lambda _: None,
        "synchronize": lambda _: None,
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("piper.runtime.stream_executor.module", lambda _: torch.cuda)
    # It lets go of graphs of CUDA. Here there are none, and to look through what all tests before have left takes seconds.
    monkeypatch.setattr("piper.runtime.cuda.graphs.gc", SimpleNamespace(collect=lambda: 0))
