"""Optimizers that step others inside of them: Muon for matrices and AdamW for the rest, in one class."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import piper
from piper.callbacks import EMA
from piper.errors import ConfigError
from tests import plain
from tests.test_optimizers import Net, four_devices, loss, rows

BATCHES = [rows(seed) for seed in range(6)]


class Joined(Optimizer):
    """Has the groups of both, and the `state_dict` of torch, which knows the state of neither."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        self.muon = torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)
        self.adam = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01)
        super().__init__(params, {"lr": 0.0})
        self.param_groups = self.muon.param_groups + self.adam.param_groups

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adam.step()


class WithStateDicts(Joined):
    """Returns the `state_dict` of both."""

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adam.load_state_dict(state_dict["adam"])


class Container(Optimizer):
    """Has them in a list, and shows their groups and their state as its own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        matrices = torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)
        self.inner: list[Optimizer] = [
            matrices,
            torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01),
        ]
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.inner for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: kept for each in self.inner for key, kept in each.state.items()}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.inner:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [each.state_dict() for each in self.inner]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for each, state in zip(self.inner, state_dict["inner"], strict=True):
            each.load_state_dict(state)


class Lookahead(Optimizer):
    """Takes every second step halfway from slow weights, which are kept beside what AdamW keeps."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.base = torch.optim.AdamW(params, lr=0.01)
        self.param_groups, self.defaults, self.state = self.base.param_groups, {}, self.base.state

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.base.step()
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.state[p]["step"] % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.base.load_state_dict(dict(state_dict))


class Counts(Joined):
    """Keeps a count for each parameter, where it does not see what the others keep."""

    count = "steps"

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                steps = self.state[p][self.count] = self.state[p].get(self.count, 0) + 1
                p.data.mul_(1 - 0.01 * steps)


class OwnRate(Joined):
    """Halves the rate of a group that its `param_groups` do not have, and saves it."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        super().__init__(params)
        self.muon = torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.muon.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "muon": self.muon.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        self.muon.load_state_dict(state.pop("muon"))
        super().load_state_dict(state)


def test_options_of_an_optimizer_inside_are_loaded(tmp_path: Path) -> None:
    losses, state = alone(OwnRate)
    one = piper.compile(replace(job(OwnRate, 0), strategy=[]))
    with piper.launch(one) as run:
        found = [result.loss for result in run.train(3)]
        run.save(tmp_path / "a")
    with piper.launch(one, resume=tmp_path / "a") as run:
        found += [result.loss for result in run.train()]
        assert plain.largest_difference(state, run.state_dict()) < 1e-9
    assert found == pytest.approx(losses, rel=1e-9)


class CountsAlike(Counts):
    count = "step"


def job(make: Callable[[Iterable[Tensor]], Optimizer], zero: int) -> piper.Job:
    return piper.Job(
        model=Net,
        loss=loss,
        data=lambda: BATCHES,
        strategy=four_devices(zero),
        optimizer=make,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8),
        precision="fp64",
        steps=6,
    )


def alone(make: Callable[[Iterable[Tensor]], Optimizer]) -> tuple[list[float], dict[str, Tensor]]:
    """Train without Piper."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    losses = []
    for batch in BATCHES:
        model.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("make", [Joined, WithStateDicts, Container, Lookahead, Counts])
def test_what_optimizers_inside_keep_goes_on_under_another_strategy(
    make: Callable[[Iterable[Tensor]], Optimizer], tmp_path: Path
) -> None:
    losses, state = alone(make)
    with piper.launch(piper.compile(job(make, 3))) as run:
        found = [result.loss for result in run.train(3)]
        run.save(tmp_path / "a")
    with piper.launch(piper.compile(replace(job(make, 0), strategy=[])), resume=tmp_path / "a") as run:
        found += [result.loss for result in run.train(2)]
        run.save(tmp_path / "b")
    with piper.launch(piper.compile(job(make, 1)), resume=tmp_path / "b") as run:
        found += [result.loss for result in run.train()]
        assert plain.largest_difference(state, run.state_dict()) < 1e-9
    assert found == pytest.approx(losses, rel=1e-9)


def test_two_that_keep_one_name_for_one_parameter_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        piper.compile(job(CountsAlike, 3))
    assert str(error.value) == cleandoc("""
        CountsAlike and Muon and AdamW: two optimizers keep state of one name for one parameter
          state: step
          hint:  let one of them keep it under another name
    """)


def test_an_average_is_kept_beside_what_optimizers_inside_keep(tmp_path: Path) -> None:
    def averages(saves: int) -> dict[str, Tensor]:
        average = EMA(decay=0.9)
        averaged = replace(job(Joined, 3), callbacks=[average])
        with piper.launch(piper.compile(averaged)) as run:
            list(run.train(saves))
            run.save(tmp_path / "a")
        with piper.launch(piper.compile(averaged), resume=tmp_path / "a") as run:
            list(run.train())
            return average.averages(run)

    assert plain.largest_difference(averages(2), averages(6)) < 1e-12
