"""A divided model draws what one device draws: plain PyTorch, with the seed that the contract names, is the reference."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.check.check import check
from piper.compiler import compile
from piper.directives import Directive, remat, shard
from piper.errors import CaptureError
from piper.ir.select import at
from piper.job import Job
from piper.run.launch import launch_inline
from tests.plain import sgd

WIDTH, LENGTH, SAMPLES = 8, 8, 4


class Attended(nn.Module):
    """Attention that drops some of its weights."""

    def __init__(self, *, rank: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.rank, self.causal, self.p = rank, causal, 0.3

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (4, 2)).transpose(1, 2)
        y = y.flatten(0, 1) if self.rank == 3 else y
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=self.p, is_causal=self.causal)
        y = y.unflatten(0, (-1, 4)) if self.rank == 3 else y
        return y.transpose(1, 2).flatten(2)


DRAWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "module": nn.Dropout(0.4),
    "transposed": lambda x: F.dropout(x.transpose(1, 2), 0.4).transpose(1, 2),
    "several": lambda x: F.dropout(F.dropout(x, 0.3) + torch.rand_like(x), 0.3),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.4).squeeze(-1),
    "rand": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "randn": lambda x: x + torch.randn(SAMPLES, LENGTH, 1, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "noise of a sample": lambda x: x * torch.bernoulli(torch.full((SAMPLES, 1, 1), 0.5, dtype=x.dtype)),
    "attention": Attended(),
    "attention of rank 3": Attended(rank=3, causal=False),
}
REFUSED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "in place": lambda x: F.dropout(x * 2.0, 0.4, inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


class Drawing(nn.Module):
    """Draws inside the divided work and behind it."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = [draw]  # in a list: it is no part of the model's state
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        (draw,) = self.draw
        for first, second in zip(self.first, self.second, strict=True):
            x = x + draw(second(draw(torch.tanh(first(x)))))
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    made = model(batch["x"])
    assert isinstance(made, Tensor)
    return (made - batch["y"]).square().mean()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator) for name in "xy"}


WEIGHTS = {"first.?": 0, "second.?": 1}
FIELDS = {"x": 1, "y": 1}
PAIR, FOUR = [0, 1], [0, 1, 2, 3]
LAYOUTS: Mapping[str, list[Directive]] = {
    "tp2": [shard(at(), PAIR, axis="TP", weights=WEIGHTS)],
    "tp4": [shard(at(), FOUR, axis="TP", weights=WEIGHTS)],
    "sp2": [shard(at(), PAIR, axis="TP", weights=WEIGHTS, between=1)],
    "cp2": [shard(at(), PAIR, axis="CP", batch=FIELDS)],
    "cp2 heads zigzag": [
        shard(at(), PAIR, axis="CP", batch=FIELDS, attention="heads", balance="zigzag"),
    ],
    "sp2 cp2": [
        shard(at(), FOUR, 2, axis="TP", weights=WEIGHTS, between=1),
        shard(at(), FOUR, 2, axis="CP", batch=FIELDS, balance="zigzag"),
    ],
    "sp2 remat": [
        shard(at(), PAIR, axis="TP", weights=WEIGHTS, between=1),
        remat(at(), 0.0),
    ],
}
QUICK = {("several", "sp2"), ("dropout", "tp2"), ("attention", "cp2 heads zigzag"), ("transposed", "sp2 cp2")}


def cells() -> list[object]:
    return [
        pytest.param(draw, layout, marks=[] if (draw, layout) in QUICK else [pytest.mark.slow])
        for draw in DRAWS
        for layout in LAYOUTS
    ]


def job(draw: Callable[[Tensor], Tensor], strategy: list[Directive]) -> Job:
    return Job(
        model=lambda: Drawing(draw),
        loss=loss,
        data=lambda: [batch()],
        strategy=strategy,
        precision="fp64",
        optimizer=sgd,
    )


def plain(draw: Callable[[Tensor], Tensor], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one device: all that a step draws comes from one generator."""
    torch.manual_seed(0)
    model = Drawing(draw).double()
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        digest = hashlib.blake2b(f"0/{step}/all//0".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        optimizer.zero_grad()
        made = loss(model, {name: value.double() for name, value in batch().items()})
        made.backward()
        optimizer.step()
        losses.append(float(made.detach()))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("draw,layout", cells())
def test_a_divided_model_draws_what_one_device_draws(draw: str, layout: str) -> None:
    wanted, state = plain(DRAWS[draw], 2)
    program = compile(job(DRAWS[draw], LAYOUTS[layout]), device="cpu")
    with launch_inline(program) as run:
        losses = [run.step(batch()).loss for _ in range(2)]
        found = run.state_dict()
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sp2", "cp2"])
@pytest.mark.parametrize("draw", REFUSED)
def test_a_draw_that_does_not_divide_is_refused(draw: str, layout: str) -> None:
    with pytest.raises(CaptureError, match="draws random numbers for a sharded value"):
        compile(job(REFUSED[draw], LAYOUTS[layout]), device="cpu")


def test_check_draws_the_same() -> None:
    report = check(compile(job(DRAWS["several"], LAYOUTS["sp2"]), device="cpu"), launch_inline, [batch()])
    assert report.ok, report


class Scaled(Drawing):
    """Draws, and reads a buffer that every device holds whole."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(DRAWS["dropout"])
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def test_check_draws_the_same_beside_a_buffer() -> None:
    scaled = replace(job(DRAWS["dropout"], LAYOUTS["tp2"]), model=Scaled)
    report = check(compile(scaled, device="cpu"), launch_inline, [batch()])
    assert report.verdict == "The same numbers as one device.", report
