"""Initial values whose random numbers another device draws. The host stands for that device here."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from piper.models.decoder import Config, Decoder
from piper.runtime.setup import DrawnOn, ProgramLike, drawing_device, seeded_draws

HOST = torch.device("cpu")
NOWHERE = torch.device("meta")  # from where nothing can be copied


@pytest.mark.parametrize(
    ("program", "initial", "expected"),
    [("cpu", "device", "cpu"), ("cpu", "host", "cpu"), ("cuda", "device", "cuda:0"), ("cuda", "host", "cpu")],
)
def test_a_job_draws_on_the_device_it_runs_on_unless_it_names_the_host(
    program: str, initial: str, expected: str
) -> None:
    asked = SimpleNamespace(device=program, job=SimpleNamespace(initial=initial))
    assert drawing_device(cast(ProgramLike, asked)) == torch.device(expected)


def test_numbers_are_those_of_the_same_calls_on_the_device() -> None:
    torch.manual_seed(3)
    plain = Decoder(Config.tiny())
    torch.manual_seed(3)
    with DrawnOn(HOST):
        drawn = Decoder(Config.tiny())
    for (name, expected), value in zip(plain.named_parameters(), drawn.parameters(), strict=True):
        assert torch.equal(expected, value), name
        assert value.is_leaf and value.requires_grad


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(4).normal_(1.0, 2.0),
        lambda: torch.empty(4, dtype=torch.bfloat16).uniform_(-1.0, 1.0),
        lambda: nn.init.trunc_normal_(torch.empty(4)),
        lambda: torch.randn(2, 2),
        lambda: torch.rand(3, dtype=torch.float64),
        lambda: torch.rand_like(torch.ones(2)),
        lambda: torch.normal(0.0, 1.0, (4,)),
    ],
)
def test_draws_of_floats_go_to_the_device(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(5)
    expected = draw()
    torch.manual_seed(5)
    with DrawnOn(HOST):
        found = draw()
    assert torch.equal(found, expected) and found.dtype is expected.dtype
    with DrawnOn(NOWHERE), pytest.raises(NotImplementedError, match="meta"):
        draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(4).normal_(generator=torch.Generator().manual_seed(1)),
        lambda: torch.randn(4, generator=torch.Generator().manual_seed(1)),
        lambda: torch.randperm(4),
        lambda: torch.empty(4, device="meta").normal_(),
        lambda: torch.randn(4, device="meta"),
        lambda: torch.ones(4).mul_(2),
    ],
)
def test_other_calls_stay_where_they_are(draw: Callable[[], Tensor]) -> None:
    with DrawnOn(NOWHERE):
        draw()


def test_a_part_of_a_tensor_gets_the_numbers_of_a_dense_one() -> None:
    torch.manual_seed(5)
    expected = torch.empty(3, 2).normal_()
    whole = torch.zeros(3, 4)
    torch.manual_seed(5)
    with DrawnOn(HOST):
        whole[:, ::2].normal_()
    assert torch.equal(whole[:, ::2], expected) and not whole[:, 1::2].any()


def test_the_generator_is_left_as_it_was() -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    with seeded_draws(7, HOST):
        drawn = torch.rand(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), drawn)
