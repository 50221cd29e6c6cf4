"""Captures a deep model from few of its blocks, for compilations of which nothing runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.autodiff.differentiate import Captured
from piper.capture.layers.annotate_layers import find_layers
from piper.capture.layers.equal_blocks import EARLY, equal_blocks
from piper.capture.layers.filled import Filled, filled, skipped_blocks
from piper.capture.recordings import Capturing, Recordings, request_key
from piper.capture.shard.request import Request, merged
from piper.capture.trace.build_model import build_fake
from piper.capture.trace.trace import Traced, fake_batch
from piper.ir.chunk import CapturedModel
from piper.ir.chunk_options import CodeOptions
from piper.ir.dtypes import DTYPES

FEWEST = 8  # blocks from which on it is worth it
K = TypeVar("K")
V = TypeVar("V")


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
        key = (rows, request_key(merged(requests)))
        asked = self._shorter_requests(rows, requests)
        if asked is not None:
            short = self.short.traced(rows, asked)
            whole = self._filled(key, short.outline)
            if whole is not None:
                return replace(short, outline=whole.outline)
        return self.whole.traced(rows, requests)

    def differentiated(
        self, rows: int, requests: Sequence[Request], options: Mapping[str, CodeOptions]
    ) -> Captured:
        """Return the outline of the model for slices of `rows` samples. options: by chunk."""
        self.traced(rows, requests)
        asked_key = (rows, request_key(merged(requests)))
        asked, undifferentiated = self._shorter_requests(rows, requests), self.filled_models.get(asked_key)
        if asked is not None and undifferentiated is not None:
            origins = {name: chunk.name for name, chunk in undifferentiated.origins.items()}
            fewer = shorter(options, origins)
            if fewer is not None:
                short = self.short.differentiated(rows, asked, fewer)
                done = self._filled((*asked_key, tuple(options.items())), short.outline)
                if done is not None:
                    return replace(short, outline=done.outline)
        return self.whole.differentiated(rows, requests, options)

    def _filled(self, key: tuple[object, ...], outline: CapturedModel) -> Filled | None:
        if key not in self.filled_models:
            self.filled_models[key] = filled(outline, self.blocks)
        return self.filled_models[key]

    def _shorter_requests(self, rows: int, requests: Sequence[Request]) -> list[Request] | None:
        """Return what requests ask of the shorter model. None: equal blocks are not sharded alike."""
        if not requests:
            return []
        self.traced(rows)
        whole = self.filled_models[rows, ()]
        if whole is None:
            return None
        origins = {chunk.tags: whole.origins[chunk.name].tags for chunk in whole.outline.chunks}
        asked = []
        for request in merged(requests):
            regions = shorter(request.regions, origins)
            if regions is None:
                return None
            asked.append(replace(request, regions=regions))
        return asked


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
    dtype, device = getattr(torch, DTYPES[known.precision]), torch.device(known.device)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model = build_fake(known.model, mode, dtype, device)
    fakes = fake_batch(capturing.batch, rows, mode, dtype, device)
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
