"""Strategies for several lengths under which a device trains, or reads a buffer, only for some of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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


def trained(make: Callable[[], Net], data: list[dict[str, Tensor]], start: dict[str, Tensor]) -> Net:
    """Train in plain PyTorch from given values, without clipping, with a learning rate that decays."""
    model = make().double()
    model.load_state_dict(start)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    scheduler = decay(optimizer)
    for batch in data:
        model.zero_grad()
        mean(model, batch).backward()
        optimizer.step()
        scheduler.step()
    return model


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
        wanted = trained(make, data, start).state_dict()
        assert all((value - state[name]).abs().max() < 1e-9 for name, value in wanted.items())


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
