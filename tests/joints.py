"""Traces of equal chunks are made once in a run of the tests: they are most of what a test of a small model takes.

A compilation traces equal chunks of its model once, by their structural key. Here the traces of all compilations in
one process are kept by the same key: a key that leaves something out makes tests fail. Lines of the source, which
errors and profiles name, belong to the key.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import torch

from piper.capture.autodiff import compose
from piper.capture.autodiff.joint import Joint, trace_joint
from piper.capture.compile.hashing import structural_key
from piper.capture.trace.piece import Body

KEPT = 400  # traces; what was not used for longest is dropped first


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJoints:
    """Traces chunks, and keeps the traces."""

    known: OrderedDict[object, Joint] = field(default_factory=OrderedDict)

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
        key = (structural_key(body, trained, tangents, ways, device), decompose, lines)
        if key not in self.known:
            self.known[key] = trace_joint(body, trained, tangents, ways, device, decompose=decompose)
            if len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]


@cache  # once in a process, as `share_captures`
def share_joints() -> None:
    """Let all compilations of this process share traces, until it ends."""
    patch.object(compose, "trace_joint", SharedJoints().trace).start()
