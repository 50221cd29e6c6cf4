"""Optimizers and schedulers with habits that those of torch do not have: what they train, save and resume.

Each is compared with plain PyTorch on one device, in fp64, with and without ZeRO, and after it has gone on from a
checkpoint under another degree of it.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import piper
from piper.compiler import Program
from piper.errors import ConfigError
from tests import plain

Make = Callable[[Iterable[Tensor]], Optimizer]
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return y


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]) - 0.5).square().mean()
    return found


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


class Each(Optimizer):
    """What the optimizers below share: each says how far a step moves one parameter."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, **defaults: object) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, self.direction(group, p), group["lr"])

    def move(self, p: Tensor, direction: Tensor, rate: float) -> None:
        p.sub_(direction, alpha=rate)

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad

    def averaged(self, p: Tensor, name: str, like: Tensor) -> Tensor:
        """Return a momentum that is kept in the shape of a tensor."""
        kept: Tensor = self.state[p].setdefault(name, torch.zeros_like(like))
        return kept.mul_(0.9).add_(like)


class AssignsData(Each):
    """Gives a parameter other memory in each step."""

    def move(self, p: Tensor, direction: Tensor, rate: float) -> None:
        p.data = p.data - rate * direction

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return self.averaged(p, "momentum", p.grad)


class Counts(Each):
    """Counts steps in its state under a name, where torch has parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.state["steps"] = 0  # type: ignore[index]
        self.state["also"] = torch.zeros(1, dtype=torch.float64)  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["steps"] += 1  # type: ignore[index]
        self.state["also"] += 1  # type: ignore[index]
        super().step()

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad / (self.state["steps"] + self.state["also"])  # type: ignore[index, no-any-return]


OPTIMIZERS: dict[str, Make] = {each.__name__: each for each in (AssignsData, Counts)}


def job(make: Make, zero: int | None, scheduler: Callable[[Optimizer], Any] | None = None) -> piper.Job:
    return piper.Job(
        model=Net,
        loss=loss,
        data=lambda: [rows(seed) for seed in range(STEPS)],
        strategy=[] if zero is None else [piper.replicate(piper.at(), [0, 1], zero=zero)],
        optimizer=make,
        scheduler=scheduler,
        precision="fp64",
    )


def alone(make: Make, scheduler: Callable[[Optimizer], Any] | None = None) -> dict[str, Tensor]:
    """Train in plain PyTorch, without Piper."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = make([*model.parameters()])
    schedule = None if scheduler is None else scheduler(optimizer)
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss(model, rows(seed)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model.state_dict()


def check(program: Program, resumed: Iterable[Program], wanted: Mapping[str, Tensor], folder: Path) -> None:
    """Compare a program, and others that go on from its checkpoint, with plain PyTorch."""
    with piper.launch(program) as run:
        for seed in range(2):
            run.step(rows(seed))
        run.save(folder / "saved")
        for seed in range(2, STEPS):
            run.step(rows(seed))
        assert plain.largest_difference(wanted, run.state_dict()) < 1e-12
    for other in resumed:
        with piper.launch(other, resume=folder / "saved") as run:
            for seed in range(2, STEPS):
                run.step(rows(seed))
            assert plain.largest_difference(wanted, run.state_dict()) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_and_resumes_as_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    wanted = alone(make)
    programs = {zero: piper.compile(job(make, zero)) for zero in (None, 0, 3)}
    for zero, program in programs.items():
        check(program, programs.values(), wanted, tmp_path / str(zero))


class Adaptive(Each):
    """Adapts its rate to all parameters, as Prodigy does: by a sum that it keeps in its groups."""

    def __init__(self, params: Iterable[Tensor], beyond: float = 0.0) -> None:
        super().__init__(params, total=0.0, beyond=beyond)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] += sum(float(p.grad.square().sum()) for p in group["params"] if p.grad is not None)
        super().step()

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad * (1.0 if group["total"] < group["beyond"] else 0.5)


@pytest.mark.parametrize("beyond", [0.1, 1e9])
def test_a_rate_of_all_parameters_needs_them_all(beyond: float, tmp_path: Path) -> None:
    def make(params: Iterable[Tensor]) -> Optimizer:
        return Adaptive(params, beyond)

    programs = [piper.compile(job(make, zero)) for zero in (None, 0)]
    for number, program in enumerate(programs):
        check(program, programs, alone(make), tmp_path / str(number))
    why = "what it keeps for all parameters together differs" if beyond == 1e9 else "in another way"
    with pytest.raises(ConfigError, match=why):
        piper.compile(job(make, 1))


class OfShards(Each):
    """Keeps the norm of each tensor, which it would use much later."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad if self.averaged(p, "norm", p.grad.norm()) < 1e9 else p.grad / 2


def test_what_is_kept_for_a_tensor_tells_that_it_is_needed_whole() -> None:
    program = piper.compile(job(OfShards, 1))
    assert all(bucket.bounds for bucket in program.plans.buckets.values() if bucket.trainable)


class Halving:
    """A scheduler that only has the methods of one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps, self.stepped = 0, optimizer

    def step(self) -> None:
        self.steps += 1
        for group in self.stepped.param_groups:
            group["lr"] = 0.1 * 0.5**self.steps

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


def test_a_scheduler_needs_no_more_than_its_methods(tmp_path: Path) -> None:
    program = piper.compile(job(Each, 1, Halving))
    check(program, [program], alone(Each, Halving), tmp_path)
