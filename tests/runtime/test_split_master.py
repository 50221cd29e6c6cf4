"""Parameters in bf16 and what rounding leaves of them: nothing of float32 is lost, and no memory is held twice."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.runtime.bucket_state import AT_A_TIME, join, split

BITS = {
    "zeros": [0x00000000, 0x80000000],
    "infinities": [0x7F800000, 0xFF800000],
    "rounded to infinity": [0x7F7FFFFF, 0xFF7FFFFF],
    "subnormal": [0x00000001, 0x80000001, 0x007FFFFF, 0x00008000],
    "half way": [0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000],
    "largest remainders": [0x3F807FFF, 0x3F80FFFF, 0x3F808001],
}


def of_bits(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("kind", BITS)
def test_every_bit_comes_back(kind: str) -> None:
    exact = of_bits(BITS[kind])
    assert torch.equal(join(*split(exact)).view(torch.int32), exact.view(torch.int32))


def test_numbers_are_rounded_to_the_nearest() -> None:
    exact = torch.randint(-(2**31), 2**31 - 1, (2**20,)).to(torch.int32).view(torch.float32)
    exact = exact[exact.isfinite()]
    high, low = split(exact)
    assert torch.equal(join(high, low), exact)
    rounded = exact.bfloat16()
    differ = (high != rounded).nonzero().view(-1)
    # Only where two are as near: half way, torch takes the even one.
    assert (exact[differ].view(torch.int32) & 0xFFFF == 0x8000).all()
    half_way = of_bits(BITS["half way"])
    assert split(half_way)[0].tolist() == of_bits([0x3F810000, 0x3F820000, 0xBF810000, 0xBF820000]).tolist()


def test_each_nan_stays_one() -> None:
    exact = of_bits([0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001])
    high, low = split(exact)
    assert high.isnan().all()
    assert join(high, low).isnan().all()


def test_long_tensors_are_split_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.randn(1000)
    wanted = split(exact)
    assert len(exact) < AT_A_TIME
    monkeypatch.setattr("piper.runtime.bucket_state.AT_A_TIME", 64)
    assert all(map(torch.equal, split(exact), wanted))


class Odd(nn.Module):
    """A model whose parameters have odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return made


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "our own": lambda params: FromStart(params),
}


class FromStart(torch.optim.Optimizer):
    """Draws parameters towards their first values."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 1e-2})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    first = self.state[parameter].setdefault("first", parameter.detach().clone())
                    parameter.sub_(group["lr"] * (parameter.grad + 0.1 * (parameter - first)))


def rounded(master: Tensor) -> Tensor:
    """Round to bf16, half way away from zero, in another way than the code that is tested."""
    down = (master.view(torch.int32) & ~0xFFFF).view(torch.float32)
    up = ((master.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    nearer = (master.double() - down.double()).abs() < (up.double() - master.double()).abs()
    return torch.where(nearer, down, up).bfloat16()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_trains_masters_of_float32(kind: str) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 7)} for _ in range(4)]
    job = piper.Job(
        model=Odd,
        loss=lambda model, batch: ((model(batch["x"]) - batch["x"]) ** 2).float().mean(),
        data=lambda: batches,
        strategy=[],
        optimizer=OPTIMIZERS[kind],
        precision="bf16",
    )
    with piper.launch(piper.compile(job, device="cpu"), on="inline") as run:
        start = {name: value.clone() for name, value in run.state_dict().items()}
        losses = [run.step(batch).loss for batch in batches]
        trained = run.state_dict()

    model = Odd()
    masters = {name: start[name].clone().requires_grad_() for name, _ in model.named_parameters()}
    optimizer = OPTIMIZERS[kind](list(masters.values()))
    model = model.bfloat16()
    wanted = []
    for batch in batches:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(rounded(masters[name].detach()))
        model.zero_grad()
        loss = ((model(batch["x"].bfloat16()) - batch["x"].bfloat16()) ** 2).float().mean()
        loss.backward()
        wanted.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
        optimizer.step()
    assert losses == pytest.approx(wanted, rel=1e-6)
    for name, value in trained.items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, masters[name].detach(), rtol=1e-6, atol=1e-8)
    assert any((value.view(torch.int32) & 0xFFFF).any() for value in trained.values())
