"""Optimizers of tests in several files."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Cooling(torch.optim.SGD):
    """Cools with each step: it counts them in its state under a name, and has a rate in its `state_dict`."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.factor = 1.0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        steps = self.state["all"]  # type: ignore[index]
        steps["count"] = steps.get("count", torch.zeros(())) + 1
        self.factor *= 0.5
        for group in self.param_groups:
            group["lr"] = self.factor / float(steps["count"])
        super().step()

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "factor": self.factor}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "factor"})
        self.factor = float(state_dict["factor"])  # type: ignore[arg-type]


class CountsApart(torch.optim.SGD):
    """Counts its steps in an attribute of its own, as its rate needs them. No `state_dict` has them."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().step()


class CountsInGroups(CountsApart):
    """Has the number of its steps in the first group of its `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["param_groups"][0]["steps"] = self.steps
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict({**state_dict})
        self.steps = state_dict["param_groups"][0]["steps"]


class CountsInState(CountsApart):
    """Has the number of its steps in the `state` of its `state_dict`, beside those of parameters."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "state": {**state["state"], "steps": self.steps}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = {**state_dict["state"]}
        self.steps = state.pop("steps")
        super().load_state_dict({**state_dict, "state": state})


class Recent(torch.optim.Optimizer):
    """Keeps the last gradients in a list, and steps by their sum."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                recent = self.state[p]["recent"] = [*self.state[p].get("recent", []), p.grad.clone()][-2:]
                p.sub_(torch.stack(recent).sum(0), alpha=group["lr"])


def by_values(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Choose groups by the mean of each parameter, which the parts of a parameter do not have."""
    low: dict[str, Any] = {"params": [], "lr": 0.05}
    high: dict[str, Any] = {"params": []}
    for p in params:
        (high if p.detach().mean() > 0 else low)["params"].append(p)
    return torch.optim.Adam([low, high], lr=0.01)
