"""A model that draws random numbers is the model that was captured: given the same draws, it gives the same.

What the captured chunks draw is written down, and given to the plain model in place of what it would draw.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture.trace.annotate import annotate
from piper.check.localise import ChunkwiseReference
from piper.check.reference import samples_in
from piper.check.slicing import take
from piper.compiler import compile
from piper.job import Job
from tests.runtime.grid import Cell, batches, job

aten = torch.ops.aten


def draws_random(op: Any) -> bool:  # noqa: ANN401
    return torch.Tag.nondeterministic_seeded in op.tags


class Drawn(TorchDispatchMode):
    """Writes down what is drawn: of a dropout its mask."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        out = op(*args, **(kwargs or {}))
        if draws_random(op):
            self.draws.append((out[1] if op is aten.native_dropout.default else out).clone())
        return out


class Given(TorchDispatchMode):
    """Gives what was drawn before, in the same order."""

    def __init__(self, draws: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = iter(draws)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if not draws_random(op):
            return op(*args, **(kwargs or {}))
        assert op is aten.bernoulli_.float, f"dropout draws in place on a CPU, {op} is something else"
        draw = next(self.draws)
        assert args[0].shape == draw.shape
        return args[0].copy_(draw)


class Attention(nn.Module):
    """Attention and a feed-forward layer with dropout everywhere, as nn.Transformer has it."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 16)).expand(-1, 3, -1)
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x)
        return x.mean(1)[:, :4]


def jobs() -> Iterator[tuple[str, Callable[[], Job]]]:
    cell = Cell(case="dropout", schedule="1f1b", dp=2)
    yield "mlp", lambda: job(cell)
    yield "attention", lambda: job(cell, model=Attention)


@pytest.mark.parametrize("made", [pytest.param(made, id=name) for name, made in jobs()])
def test_the_plain_model_gives_the_same_for_the_same_draws(made: Callable[[], Job]) -> None:
    program = compile(made())
    reference = ChunkwiseReference(program)
    outline, seen = program.outline, set()
    batch = reference.as_run(batches(Cell(case="dropout", schedule="1f1b", dp=2), 1)[0])
    for part in reference.replay.slicing.slices(outline.loss.chunk, samples_in(batch)):
        rows = take(batch, part.samples)
        with Drawn() as drawn:
            walk = reference.walk(rows, part)
        with Given(drawn.draws) as given:
            plain = program.job.loss(reference.model, rows)
        assert next(given.draws, None) is None, "all that was drawn is used"
        assert isinstance(plain, Tensor)
        torch.testing.assert_close(
            walk.outputs[outline.loss.chunk, outline.loss.index], plain, rtol=1e-12, atol=0.0
        )
        seen.add(plain.item())
    assert len(seen) == 4, "every slice draws its own"
