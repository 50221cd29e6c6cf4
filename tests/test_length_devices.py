"""Strategies for several lengths under which a device trains, or reads a buffer, only for some of them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from tests.test_length_moves import batches, stages
from tests.test_length_strategies import Net, adamw, job, mean, replicas, rows


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


class FrozenHead(Net):
    """In stages, two devices train nothing."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.norm.parameters(), *self.last.parameters()):
            parameter.requires_grad_(False)


class Scaled(Net):
    """The second layer reads a buffer. counts: and writes it."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 2, 8))
        self.counts = counts
        self.norm.register_forward_pre_hook(self.scaled)

    def scaled(self, _: torch.nn.Module, given: tuple[Tensor]) -> Tensor:
        if self.counts:
            self.scale.add_(0.125)
        return given[0] * self.scale


class Counting(torch.optim.Optimizer):
    """Averages iterates with weights that are sums over steps, and lets the rate of each group decay by itself."""

    def __init__(self, params: Iterable[Tensor], skips: bool = False) -> None:
        """skips: a group without gradients is not counted."""
        given = [*params]
        split: list[dict[str, Any]] = [{"params": given[:2]}, {"params": given[2:], "lr": 0.3}]
        super().__init__(split, {"lr": 0.1, "k": 0, "weight_sum": 0.0, "dtype": torch.float64})
        self.skips = skips

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if not given and self.skips:
                continue
            group["k"] += 1
            group["weight_sum"] += group["k"] * group["lr"]
            part = group["k"] * group["lr"] / group["weight_sum"]
            for p in given:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, part)
            group["lr"] *= 0.9


def adagrad(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make an optimizer that has its state at once: a device that trains nothing has none."""
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1)


MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
COUNTS: tuple[MakeOptimizer, ...] = (Counting, partial(Counting, skips=True))


def trained(
    make: Callable[[], Net],
    data: list[dict[str, Tensor]],
    start: dict[str, Tensor],
    make_optimizer: MakeOptimizer = adamw,
) -> tuple[Net, torch.optim.Optimizer]:
    """Train in plain PyTorch from given values, without clipping. The learning rate decays, also by a scheduler."""
    model = make().double()
    model.load_state_dict(start)
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    scheduler = None if make_optimizer in COUNTS else decay(optimizer)
    for batch in data:
        model.zero_grad()
        mean(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer


@pytest.mark.parametrize("make", [FrozenHead, Scaled])
def test_a_device_that_begins_to_train_or_to_read_a_buffer_has_the_values_of_the_others(
    make: Callable[[], Net],
) -> None:
    data = batches(5)
    given = job(data, strategy={4: stages(1), 16: replicas(3)}, clip_norm=None, scheduler=decay)
    program = piper.compile(replace(given, model=make))
    with piper.launch(program) as run:
        start = run.state_dict()
        for batch in data:
            run.step(batch)
        state = run.state_dict()
        wanted = trained(make, data, start)[0].state_dict()
        assert all((value - state[name]).abs().max() < 1e-9 for name, value in wanted.items())


@pytest.mark.parametrize("make", [*COUNTS, adagrad])
@pytest.mark.parametrize("order", ["stages first", "replicas first"])
def test_a_device_that_begins_to_train_has_the_options_of_those_that_did(
    make: MakeOptimizer, order: str
) -> None:
    data = [rows(4, length, seed) for seed, length in enumerate((4, 4, 16, 16, 16, 4, 4, 16))]
    strategy = {4: stages(1), 16: replicas(3)}
    if order == "replicas first":
        strategy = {4: replicas(3), 16: stages(1)}
    scheduler = None if make in COUNTS else decay
    given = job(data, strategy=strategy, clip_norm=None, scheduler=scheduler, optimizer=make)
    program = piper.compile(replace(given, model=FrozenHead))
    with piper.launch(program) as run:
        start = run.state_dict()
        for batch in data:
            run.step(batch)
        options = [dict(group) for group in run.optimizer]
        state = run.state_dict()
    wanted, plain = trained(FrozenHead, data, start, make)
    assert all((value - state[name]).abs().max() < 1e-9 for name, value in wanted.state_dict().items())
    for group, there in zip(options, plain.param_groups, strict=True):
        assert group["lr"] == pytest.approx(there["lr"], abs=1e-12) and group.get("k") == there.get("k")


def test_a_checkpoint_has_the_options_of_each_group_from_a_device_that_trains_it(tmp_path: Path) -> None:
    """The first device trains nothing of the second group."""
    data = batches(4)
    program = piper.compile(job(data, strategy=stages(1), clip_norm=None, optimizer=COUNTS[1]))
    with piper.launch(program) as run:
        start = run.state_dict()
        for batch in data[:2]:
            run.step(batch)
        run.save(tmp_path / "saved")
    with piper.launch(program, resume=tmp_path / "saved") as run:
        for batch in data[2:]:
            run.step(batch)
        state, counts = run.state_dict(), [group["k"] for group in run.optimizer]
    wanted, _ = trained(Net, data, start, COUNTS[1])
    assert all((value - state[name]).abs().max() < 1e-9 for name, value in wanted.state_dict().items())
    assert counts == [4, 4]


def test_what_an_optimizer_kept_for_frozen_parameters_is_saved_from_any_layout(tmp_path: Path) -> None:
    data = [rows(4, 4), rows(4, 16)]
    whole = piper.compile(job(data, strategy=replicas(1)))
    with piper.launch(whole) as run:
        run.step(data[0])
        wanted = run.optimizer_state("exp_avg")
        run.save(tmp_path / "whole")
    given = replace(job(data, strategy={4: stages(1), 16: replicas(3)}), model=FrozenHead)
    with piper.launch(piper.compile(given), resume=tmp_path / "whole") as run:
        run.step(data[1])
        run.save(tmp_path / "part")  # in the second layout
    with piper.launch(whole, resume=tmp_path / "part") as run:
        kept = run.optimizer_state("exp_avg")
    frozen = [name for name in wanted if name.startswith(("norm.", "last."))]
    assert len(frozen) == 4 and all(torch.equal(kept[name], wanted[name]) for name in frozen)
    assert not torch.equal(kept["qkv.weight"], wanted["qkv.weight"])


@pytest.mark.slow
def test_a_buffer_that_a_checkpoint_has_is_read_in_every_layout(tmp_path: Path) -> None:
    def other() -> Net:
        model = Scaled()
        model.scale.add_(1)
        return model

    with piper.launch(piper.compile(replace(job(batches(1), strategy=replicas(0)), model=other))) as run:
        run.save(tmp_path / "saved")
        wanted = run.evaluate([rows(4, 16)]).loss
    given = replace(job(batches(1), strategy={4: stages(1), 16: replicas(3)}), model=Scaled)
    with piper.launch(piper.compile(given)) as run:
        run.step(rows(4, 16))
        before = run.evaluate([rows(4, 16)]).loss
        run.load(tmp_path / "saved")
        assert run.evaluate([rows(4, 16)]).loss == pytest.approx(wanted, abs=1e-12) != before


def test_a_buffer_that_steps_write_lies_alike_in_all_layouts() -> None:
    for strategy in ({4: stages(1), 16: replicas(3)}, {4: replicas(3), 16: stages(1)}):
        given = replace(job(batches(1), strategy=strategy), model=lambda: Scaled(counts=True))
        with pytest.raises(piper.PiperError, match="hold scale, a buffer that steps write, on device 0 diff"):
            piper.compile(given).shaped(rows(4, 16))


def test_groups_that_train_apart_in_one_of_two_layouts_are_refused() -> None:
    apart = [*replicas(0), piper.average(piper.at(), across=[0, 2], every=2)]
    for strategy in ({4: apart, 16: replicas(3)}, {4: replicas(3), 16: apart}):
        with pytest.raises(piper.PiperError, match="hold groups that train apart differently"):
            piper.compile(job(batches(1), strategy=strategy)).shaped(rows(4, 16))
