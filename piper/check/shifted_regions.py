"""Compares the regions that a model enters in plain PyTorch with those of its captured chunks.

A region whose index has shifted trains right and runs where the strategy did not mean it, so no number shows
it. The parameters that a region uses do.
"""

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper.check.reference import Reference

ANNOTATE = "piper.capture.trace.annotate"  # the module of `annotate`, which is not imported for it
Region = tuple[str, int]


class _Used(TorchDispatchMode):
    """Records which parameters each region uses. `annotate` does nothing outside a capture: it is watched."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.open: dict[FrameType, Region] = {}
        self.entered: dict[str, int] = {}
        self.params: dict[Region, set[str]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if self.open:
            used = {self.names[id(leaf)] for leaf in tree_leaves(args) if id(leaf) in self.names}
            for region in self.open.values():
                self.params[region] |= used
        return op(*args, **(kwargs or {}))

    def watch(self, frame: FrameType, event: str, _: object) -> None:
        """Note that `annotate` begins (the first call of its frame) or ends (the second)."""
        code = frame.f_code
        if event != "call" or code.co_name != "annotate" or frame.f_globals["__name__"] != ANNOTATE:
            return
        if frame in self.open:
            del self.open[frame]
            return
        tag = frame.f_locals["tag"]
        index = self.entered.get(tag, 0)
        self.entered[tag] = index + 1
        self.open[frame] = (tag, index)
        self.params[tag, index] = set()


def shifted_regions(reference: Reference, batch: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield each region that the captured model has under another index than the model."""
    used = _Used({id(parameter): name for name, parameter in reference.params.items()})
    given = reference.on_device(batch)

    def run() -> None:
        sys.setprofile(used.watch)
        with reference.unchanged(), torch.no_grad(), torch.random.fork_rng(), used:
            reference.loss(given)

    with ThreadPoolExecutor(
        1
    ) as thread:  # of its own: a profiler that watches this thread cannot be put back
        thread.submit(run).result()
    captured: dict[Region, set[str]] = {}
    for chunk in reference.program.outline.chunks:
        for region in chunk.tags:
            captured.setdefault(region, set()).update(chunk.params)
    for region, names in used.params.items():
        tag, index = region
        for name in sorted(names - captured.get(region, set())):
            others = [at for at, own in captured.items() if at[0] == tag and at != region and name in own]
            if others:
                yield (
                    f"{name} is used in region {tag}={index} of the model, but the captured model has it in "
                    f"{tag}={others[0][1]}, so that at({tag}={index}) selects another region"
                )
                break
