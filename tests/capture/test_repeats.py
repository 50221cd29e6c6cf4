"""The repeated layers of a phase are found, compiled once, and give the same values."""

import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piper.capture.autodiff.code import GraphCode
from piper.capture.autodiff.differentiate import Captured, differentiate
from piper.capture.compile import inductor, phases
from piper.capture.compile.cache import Cache
from piper.capture.compile.hashing import Source
from piper.capture.compile.phases import CompiledPieces
from piper.capture.trace.trace import trace
from tests import zoo

LAYERS = 6


class Block(nn.Module):
    """A layer of enough operations to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) * torch.sigmoid(x.sum(-1, keepdim=True))
        result: Tensor = x + torch.tanh(self.down(y))
        return result


class Stack(nn.Module):
    """Equal layers, and a head."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head, self.odd = nn.Linear(16, 4), odd

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) * (float(number) if self.odd else 2.0)
        result: Tensor = self.head(x)
        return result


def captured(model: type[nn.Module] | object, cache: Cache | None = None) -> Captured:
    found = trace(model, zoo.regression, zoo.vectors(3, 0), 3, "fp64", compiled=True)  # type: ignore[arg-type]
    return differentiate(found, cache=cache)


def graph_of(code: Captured, phase: str) -> torch.fx.GraphModule:
    (made,) = code.codes.values()
    assert isinstance(made, GraphCode)
    return made.build(phase)  # type: ignore[arg-type]


class Plain(nn.Module):
    """One layer, around which there may be operations that return their argument."""

    def __init__(self, *, alias: bool) -> None:
        super().__init__()
        self.linear, self.alias = nn.Linear(16, 4), alias

    def forward(self, x: Tensor) -> Tensor:
        if self.alias:
            x = torch.ops.aten.alias(x)
        made = torch.tanh(self.linear(x))
        return torch.ops.aten.alias(made) if self.alias else made


def test_operations_that_return_their_argument_do_not_change_a_graph() -> None:
    """Torch adds some where Python holds one more reference, so a cache would not find the graph."""
    one, other = (captured(lambda alias=alias: Plain(alias=alias)) for alias in (False, True))
    for phase in ("F", "B"):
        assert str(graph_of(one, phase).graph) == str(graph_of(other, phase).graph)


def test_layers_are_found_and_cut_behind_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "WORTH", 10)
    code = captured(Stack)
    for phase, most in (("F", 3), ("B", 4)):
        pieces = phases.pieces_of(graph_of(code, phase))
        assert len(pieces) >= LAYERS - 1
        assert len({piece.key for piece in pieces}) <= most
        for piece in pieces[1:-2]:
            *_, last, _ = piece.module.graph.nodes
            assert phases.ends_kernel(last)


def test_small_graphs_and_unequal_layers_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert phases.pieces_of(graph_of(captured(Stack), "F")) == []  # too small to be worth it
    monkeypatch.setattr(phases, "WORTH", 10)
    assert phases.pieces_of(graph_of(captured(lambda: Stack(odd=True)), "F")) == []


@pytest.mark.parametrize("phase", ["F", pytest.param("B", marks=pytest.mark.slow)])
def test_pieces_give_the_values_of_the_whole(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "WORTH", 10)
    compiled: list[Source] = []
    make = inductor._compile

    def counted(source: Source, cache: Cache) -> bytes:
        compiled.append(source)
        return make(source, cache)

    monkeypatch.setattr(inductor, "_compile", counted)
    code = captured(Stack, Cache(folder=tmp_path))
    made = code.phase(code.outline.chunks[0].key, phase)  # type: ignore[arg-type]
    assert isinstance(made, CompiledPieces)
    assert len(compiled) == len(made.pieces) < len(made.calls)
    plain = graph_of(code, phase)
    (held,) = code.codes.values()
    assert isinstance(held, GraphCode)
    torch.manual_seed(0)
    given = [torch.randn(fake.shape, dtype=fake.dtype) for fake in held.examples(phase)]  # type: ignore[arg-type]
    wanted = plain(*given)
    for result, value in zip(pickle.loads(pickle.dumps(made))(*given), wanted, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-12, atol=1e-12 * max(1.0, value.abs().max().item()))
    seen = weakref.ref(given[0])
    assert len(made.boxed(given)) == len(wanted)
    assert given == [] and (seen() is None or phase == "F")
