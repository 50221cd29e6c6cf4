"""Captures a deep model from few of its blocks, for compilations of which nothing runs.

A run of the whole model on fakes, a fraction of a trace, proves that its blocks do the same. It is cut behind
each block. Two blocks are equal if they run the same operations on values of the same shapes, which come from
the same places: from the same block, the result of the block before, or one of the first blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from piper.capture.autodiff.differentiate import Captured
from piper.capture.layers.filled import Filled, filled, skipped_blocks
from piper.capture.recordings import Capturing, Recordings, request_key
from piper.capture.shard.axis_sharding import Request
from piper.capture.shard.request import merged
from piper.capture.trace.annotate import find_layers
from piper.capture.trace.record import LossFn
from piper.capture.trace.trace import Traced, on_fakes
from piper.ir.chunk import CapturedModel
from piper.ir.chunk_options import CodeOptions

EARLY = 2  # blocks that all later ones may read
FEWEST = 8  # blocks from which on it is worth it
K = TypeVar("K")
V = TypeVar("V")
Place = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortCapturing(Capturing):
    """Captures a model of equal blocks without most of them, and fills these in: outlines without their code.

    `recordings` are those of the shorter model. See [Note: skipped blocks].
    """

    blocks: tuple[str, ...]
    short: Capturing  # of the shorter model
    whole: Capturing  # of all blocks, for what cannot be filled in
    filled_models: dict[tuple[object, ...], Filled | None] = field(default_factory=dict, repr=False)

    @property
    def complete(self) -> Recordings:
        """Return recordings of the whole model, from which programs that run can be compiled."""
        return self.whole.recordings

    def traced(self, rows: int, requests: Sequence[Request] = ()) -> Traced:
        """Return the model for slices of `rows` samples, sharded as `requests` ask."""
        short = self._shorter(rows, merged(requests))
        if short is None:
            return self.whole.traced(rows, requests)
        asked, whole = short
        return replace(self.short.traced(rows, asked), outline=whole.outline)

    def differentiated(
        self, rows: int, requests: Sequence[Request], options: Mapping[str, CodeOptions]
    ) -> Captured:
        """Return the outline of the model for slices of `rows` samples. options: by chunk."""
        short = self._shorter(rows, merged(requests))
        if short is not None:
            asked, whole = short
            fewer = shorter(options, {name: chunk.name for name, chunk in whole.origins.items()})
            if fewer is not None:
                captured = self.short.differentiated(rows, asked, fewer)
                key = (rows, request_key(merged(requests)), tuple(options.items()))
                if done := self._filled(key, captured.outline):
                    return replace(captured, outline=done.outline)
        return self.whole.differentiated(rows, requests, options)

    def _filled(self, key: tuple[object, ...], outline: CapturedModel) -> Filled | None:
        if key not in self.filled_models:
            self.filled_models[key] = filled(outline, self.blocks)
        return self.filled_models[key]

    def _shorter(self, rows: int, requests: Sequence[Request]) -> tuple[Sequence[Request], Filled] | None:
        """Return what requests ask of the shorter model, and the whole. None: equal blocks are not alike."""
        plain, asked = self._shorter(rows, ()) if requests else None, list[Request]()
        for request in requests:
            if plain is None:
                return None
            origins = {chunk.tags: plain[1].origins[chunk.name].tags for chunk in plain[1].outline.chunks}
            if (regions := shorter(request.regions, origins)) is None:
                return None
            asked.append(replace(request, regions=regions))
        whole = self._filled((rows, request_key(requests)), self.short.traced(rows, asked).outline)
        return None if whole is None else (asked, whole)


def shorter(values: Mapping[K, V], origins: Mapping[K, K]) -> dict[K, V] | None:
    """Return values of the whole model for the shorter one. None: two copies of a chunk differ in theirs.

    origins: for each key of the whole model that of the shorter one.
    """
    fewer = {origins[key]: value for key, value in values.items()}
    same = all(values.get(key) == fewer.get(origin) for key, origin in origins.items())
    return fewer if same else None


def short_capturing(capturing: Capturing, rows: int) -> Capturing:
    """Return a capturing of the same model that traces few of its blocks, if all but the first are equal.

    rows: the samples with which the model is run once, on fakes.
    """
    known = capturing.recordings
    if known.recorded:
        return capturing
    model, fakes, mode = on_fakes(known.model, capturing.batch, rows, known.precision, known.device)
    blocks = without_others(model, find_layers(model))
    if len(blocks) < FEWEST or not equal_blocks(model, blocks, known.loss, fakes, mode):
        return capturing
    recordings = replace(
        known, model=without(known.model, skipped_blocks(blocks)), recorded={}, sharded={}, differentiated={}
    )
    return ShortCapturing(
        batch=capturing.batch,
        recordings=recordings,
        blocks=tuple(blocks),
        short=replace(capturing, recordings=recordings),
        whole=capturing,
    )


def without_others(model: nn.Module, blocks: Sequence[str]) -> Sequence[str]:
    """Return blocks all but the first of which have the parameters of the last, if more than two have others.

    The first blocks of a mixture of experts are often dense: they are traced as what comes before the blocks.
    The third of those that are left reads the result of one like itself, which `filled` compares.
    """
    kinds = [
        [(name, tuple(tensor.shape)) for name, tensor in model.get_submodule(path).named_parameters()]
        for path in blocks
    ]
    others = sum(1 for _ in dropwhile(lambda kind: kind == kinds[-1], reversed(kinds)))
    return blocks[others - 1 :] if others > EARLY else blocks


def without(build: Callable[[], nn.Module], skipped: Sequence[str]) -> Callable[[], nn.Module]:
    """Return a function that builds a model some of whose blocks return their input."""

    def shorter_model() -> nn.Module:
        model = build()
        for path in skipped:
            model.get_submodule(path).forward = passed
        return model

    return shorter_model


def passed(x: Tensor, *_: object, **__: object) -> Tensor:
    """Return the first argument: the forward of a block that is skipped."""
    return x


class _Journal(TorchDispatchMode):
    """Notes each operation: its arguments by where they come from, and the shapes of its results."""

    def __init__(self, tensors: Mapping[str, Tensor], blocks: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = blocks
        self.operations: list[list[Place]] = [[]]
        self.results: list[Place] = []  # of each block
        self.plain = True  # blocks give a tensor like the one they are given, and only that is read later
        self.kept: list[object] = list(tensors.values())  # so that no id is used twice
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.origins: dict[int, tuple[int, int, int]] = {}  # block, operation and number of a result

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        read = tree_map(self._read, (args, kwargs or {}))
        block = self.operations[-1]
        results = tree_leaves(out)
        for number, result in enumerate(results):
            if isinstance(result, Tensor):
                self.origins[id(result)] = (len(self.operations) - 1, len(block), number)
                self.kept.append(result)
        block.append((str(func), str(read), str([_described(result) for result in results])))
        return out

    def _read(self, value: object) -> object:
        """Return where an argument comes from, as seen from the present block."""
        if not isinstance(value, Tensor):
            return _described(value)
        here = len(self.operations) - 1
        if id(value) not in self.origins:
            return self._named(self.names.get(id(value), ""), here), _described(value)
        block, operation, number = self.origins[id(value)]
        if block == here:
            return "here", operation, number
        if block == here - 1 and self.results and (operation, number) == self.results[-1]:
            return "block before"
        self.plain = self.plain and block < EARLY
        return block, operation, number

    def _named(self, name: str, here: int) -> str:
        """Return the name of a parameter, relative to the present block."""
        block = self.blocks[here] if here < len(self.blocks) else ""
        return f"*{name.removeprefix(block)}" if block and name.startswith(f"{block}.") else name

    def ends(self, module: nn.Module, args: tuple[object, ...], out: object) -> None:
        """Note the end of a block: a hook of its forward."""
        first = args[0] if args else None
        same = isinstance(out, Tensor) and isinstance(first, Tensor) and _described(out) == _described(first)
        block, *place = self.origins.get(id(out), (-1, -1, -1))
        self.plain = self.plain and same and block == len(self.operations) - 1
        self.results.append(tuple(place))
        self.operations.append([])


def _described(value: object) -> object:
    """Return a value without what differs from run to run: sizes that depend on data have no number."""
    if isinstance(value, Tensor):
        return str(value.dtype), [size if isinstance(size, int) else "?" for size in value.shape]
    return "?" if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else repr(value)


def equal_blocks(
    model: nn.Module, blocks: Sequence[str], loss: LossFn, batch: Mapping[str, Tensor], mode: FakeTensorMode
) -> bool:
    """Return whether a model runs its blocks in order, each once, and all from the third on do the same.

    blocks: their paths. model, batch: of fakes of `mode`. Hooks are left on the model.
    """
    called: list[str] = []
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    journal = _Journal(tensors, blocks)
    for path in blocks:
        block = model.get_submodule(path)
        block.register_forward_pre_hook(lambda module, args, path=path: called.append(path))
        block.register_forward_hook(journal.ends)
    try:
        with torch.no_grad(), mode, journal:
            loss(model, dict(batch))
    except Exception:  # noqa: BLE001  the model's own code, which a fake cannot run; a trace says what fails
        return False
    operations = journal.operations[EARLY : len(blocks)]
    return called == list(blocks) and journal.plain and all(each == operations[0] for each in operations)
