"""The same training in plain PyTorch: one device, whole batches, float64, or groups that train apart.

Nothing of Piper computes here: `Family.instead` replaces the parts of our models that do.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.whole.jobs import CHAINS, CLIP, EVERY, OUTER, STEPS, STOP, Case, adamw, batches, falling, held_out
from tests.whole.models import FAMILIES, Batch, CastUp, Family, cross_entropy_sum, wide_angles


@dataclass(kw_only=True)
class Numbers:
    """What a training gives, step by step and in the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    predicted: Tensor = field(default_factory=lambda: torch.empty(0))


class PlainGroup:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = adamw(model.parameters())

    def step(self, family: Family, batch: Batch, rate: float) -> tuple[float, float, float]:
        """Train on a batch. Return the sum of losses, their weight and the norm."""
        self.optimizer.zero_grad()
        total, weight = plain_loss(family, self.model, batch)
        (total / weight).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        self.optimizer.step()
        return float(total.detach()), float(weight), float(norm)


def plain_loss(family: Family, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    if family.plain_loss is not None:
        return family.plain_loss(model, batch)
    return cross_entropy_sum((family.plain_forward or family.forward)(model, batch), batch["labels"])


def pieces(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield the samples of each group."""
    size = len(batch["id"]) // count
    for number in range(count):
        yield {name: value[number * size : (number + 1) * size] for name, value in batch.items()}


def plain_training(case: Case) -> Numbers:
    """Train as a case does."""
    family, chain = FAMILIES[case.family], CHAINS[case.chain]
    torch.manual_seed(0)
    model = (family.plain or (lambda: family.build(family.stages or 1)))().double()
    with family.instead(), wide_angles(), CastUp():
        return _trained(family, model, chain.groups, chain.outer)


def _trained(family: Family, first: nn.Module, count: int, outer: bool) -> Numbers:
    groups = [PlainGroup(copy.deepcopy(first)) for _ in range(count)]
    common = [parameter.detach().clone().requires_grad_() for parameter in first.parameters()]
    settings: dict[str, Any] = OUTER if outer else {"lr": 1.0}
    stepper = torch.optim.SGD(common, **settings)
    numbers = Numbers()
    for step, batch in zip(range(1, STEPS + 1), batches(), strict=False):
        results = [
            group.step(family, own, falling(step - 1))
            for group, own in zip(groups, pieces(batch, count), strict=True)
        ]
        totals, weights, norms = zip(*results, strict=True)
        numbers.losses.append(sum(totals) / sum(weights))
        numbers.norms.append(math.sqrt(sum(norm**2 for norm in norms) / count))
        numbers.samples.append(float((2.0 ** batch["id"].double()).sum()) / len(batch["id"]))
        if count > 1 and step % EVERY == 0:
            average(groups, common, stepper)
        if step % 2 == 0 or (step == STOP and count == 1):
            numbers.evaluations[step] = evaluated(family, groups)
    model = groups[0].model
    numbers.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        numbers.predicted = (family.plain_forward or family.forward)(model.eval(), held_out(5))
    return numbers


def average(groups: list[PlainGroup], common: list[Tensor], stepper: torch.optim.Optimizer) -> None:
    """Step what the groups had in common by what their mean has moved, and let all go on from there."""
    for number, shared in enumerate(common):
        values = [[*group.model.parameters()][number].detach() for group in groups]
        shared.grad = shared.detach() - sum(values) / len(values)
    stepper.step()
    for group in groups:
        for parameter, shared in zip(group.model.parameters(), common, strict=True):
            parameter.data.copy_(shared.detach())


def evaluated(family: Family, groups: list[PlainGroup]) -> float:
    """Return the loss of the samples held out, shared among the groups."""
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for group, own in zip(groups, pieces(held_out(6), len(groups)), strict=True):
            total, weight = plain_loss(family, group.model.eval(), own)
            group.model.train()
            totals += torch.stack([total, weight.double()])
    return float(totals[0] / totals[1])
