"""Where random numbers are drawn and from which seeds, and whose memory a phase may take back."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from piper.plan.instr import Instr
from piper.runtime.compute import draw_place, ends_with
from piper.runtime.context import Dice, Env, draw_seed
from piper.runtime.setup import ProgramLike, initial_tensors
from tests.slots import slots


def test_every_chunk_part_replica_step_and_seed_draws_its_own() -> None:
    """Runs go on with the same numbers under a later version: the seed itself may not change either."""
    assert draw_place("PP=0", (("MB", 1), ("K", 2)), 3) == "PP=0/MB=1,K=2/3"
    assert draw_seed(3, 5, "PP=0/MB=1/2") == 5158235224096867444
    places = [
        draw_place(name, (("MB", part),), replica) for name in "ab" for part in (0, 1) for replica in (0, 1)
    ]
    seeds = {draw_seed(seed, step, place) for seed in (0, 1) for step in (0, 1) for place in places}
    assert len(seeds) == 2 * 2 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_phase_takes_back_only_what_its_own_stream_made() -> None:
    """What another stream made goes back to that stream, when it may."""
    names = slots("a", "b", "c")
    makers = dict(zip(names, ("compute", "load", "compute"), strict=True))
    env = cast(Env, SimpleNamespace(makers=makers, at=names.index))
    ins = Instr(op="compute", node="B[PP=0]", stream="compute", frees=names)
    assert ends_with(env, ins) == [0, 2]


def test_a_model_is_initialised_as_plain_pytorch_does_for_the_seed() -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    job = SimpleNamespace(model=lambda: nn.Linear(3, 2), seed=5, initial="device")
    found = initial_tensors(cast(ProgramLike, SimpleNamespace(job=job, device="cpu")))
    assert torch.equal(torch.random.get_rng_state(), before), "the generator is left as it was"
    torch.manual_seed(5)
    plain = nn.Linear(3, 2)
    assert torch.equal(found["weight"], plain.weight) and torch.equal(found["bias"], plain.bias)


def test_a_draw_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    with Dice().seeded(7):
        first = torch.rand(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), first)
