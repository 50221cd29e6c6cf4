"""A deep model whose equal blocks are skipped in the trace has the outline of a trace of all of them."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.capture.layers.short import ShortCapturing, short_capturing
from piper.capture.recordings import Capturing, Recordings, fields_of
from piper.capture.shard.axis_sharding import Request
from piper.compiler.slices import requests_of
from piper.directives import Directive, apply
from piper.ir.chunk_options import CodeOptions
from piper.ir.graph import start
from piper.ir.mesh import Axis, mesh_of

DIM, DEPTH, ROWS = 8, 9, 2
BATCH = {"x": torch.zeros(4, 3, DIM)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x).relu())
        return x + made


class Tower(nn.Module):
    """Equal blocks and a head."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, 2 * DIM)
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.depth):
            x = self.run(number, x)
        made: Tensor = self.head(x)
        return made

    def run(self, number: int, x: Tensor) -> Tensor:
        made: Tensor = self.layers[number](x)
        return made


class SeventhIsOther(Tower):
    """A parent that treats one block differently, which no block shows."""

    def run(self, number: int, x: Tensor) -> Tensor:
        made: Tensor = super().run(number, x)
        return made.sin() if number == 6 else made


class SkipsTwo(Tower):
    """Each block reads the results of the two before it."""

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for number in range(self.depth):
            before, x = x, self.run(number, x + before)
        made: Tensor = self.head(x)
        return made


class ReadsAll(Tower):
    """The head reads the result of every block."""

    def forward(self, x: Tensor) -> Tensor:
        made = [x := self.run(number, x) for number in range(self.depth)]
        out: Tensor = self.head(torch.stack(made).sum(0))
        return out


class WiderBlock(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5].up, self.layers[5].down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    made: Tensor = model(batch["x"])
    return made.square().mean()


def capturing_of(model: Callable[[], nn.Module]) -> Capturing:
    recordings = Recordings(
        model=model, loss=loss, precision="fp32", device="cpu", compiled=False, fields=fields_of(BATCH)
    )
    return Capturing(batch=BATCH, recordings=recordings)


def by_layer() -> nn.Module:
    return piper.annotate_layers(Tower())


def by_half_layer() -> nn.Module:
    model = Tower()
    halves = [f"layers.{n}.{part}" for n in range(DEPTH) for part in ("up", "down")]
    return piper.annotate_modules(model, {"LAYER": halves})


def first_blocks_wider() -> nn.Module:
    model = Tower(DEPTH + 2)
    for block in model.layers[:3]:
        assert isinstance(block, Block)
        block.up, block.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
    return piper.annotate_layers(model)


@pytest.mark.parametrize("build", [by_layer, by_half_layer, first_blocks_wider])
def test_the_outline_is_that_of_all_blocks(build: Callable[[], nn.Module]) -> None:
    whole = capturing_of(build)
    short = short_capturing(capturing_of(build), ROWS)
    assert isinstance(short, ShortCapturing)
    found, wanted = short.traced(ROWS), whole.traced(ROWS)
    assert found.outline == wanted.outline
    assert len(found.pieces) < len(wanted.pieces)
    for options in (CodeOptions(), CodeOptions(budget=0.5)):
        asked = {chunk.name: options for chunk in wanted.outline.chunks}
        given = whole.differentiated(ROWS, (), asked)
        assert short.differentiated(ROWS, (), asked).outline == given.outline
    assert not short.whole.recordings.recorded  # all blocks were never traced


def test_the_outline_of_a_divided_model_is_that_of_all_blocks() -> None:
    weights = {"*up": 0, "*down": 1}
    strategy: list[Directive] = [
        piper.replicate(piper.at(), range(4)),
        piper.shard(piper.at(), range(4), ways=2, axis="TP", weights=weights),
    ]
    whole, short = capturing_of(by_layer), short_capturing(capturing_of(by_layer), ROWS)
    requests = requests_of(apply(start(whole.traced(ROWS).outline), strategy, orders=False))
    assert short.traced(ROWS, requests).outline == whole.traced(ROWS, requests).outline
    assert isinstance(short, ShortCapturing)
    assert not short.whole.recordings.recorded


def test_where_stages_begin_does_not_change_a_division() -> None:
    def asked(first: int) -> list[Request]:
        mesh = mesh_of((0, 1, 2, 3), [Axis(name="TP", degree=2)])
        stages = [range(first), range(first, DEPTH)]
        return [
            Request(
                by=f"shard #{number}",
                axis="TP",
                degree=2,
                stream="tp",
                origin=number,
                weights={"*up": 0, "*down": 1},
                regions={(("LAYER", layer),): mesh for layer in stage},
            )
            for number, stage in enumerate(stages)
        ]

    capturing = capturing_of(by_layer)
    assert capturing.traced(ROWS, asked(3)) is capturing.traced(ROWS, asked(5))


def test_what_differs_from_block_to_block_traces_all_blocks() -> None:
    short = short_capturing(capturing_of(by_layer), ROWS)
    names = [chunk.name for chunk in short.traced(ROWS).outline.chunks]
    uneven = {name: CodeOptions(budget=0.5) for name in names[:6]}
    found = short.differentiated(ROWS, (), uneven)
    assert found.outline == capturing_of(by_layer).differentiated(ROWS, (), uneven).outline


@pytest.mark.parametrize("build", [SeventhIsOther, SkipsTwo, ReadsAll, WiderBlock, lambda: Tower(7)])
def test_blocks_that_differ_are_all_traced(build: Callable[[], nn.Module]) -> None:
    whole = capturing_of(lambda: piper.annotate_layers(build()))
    assert short_capturing(whole, ROWS) is whole
