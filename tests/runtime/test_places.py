"""Where random numbers are drawn, and whose memory a phase may take back: read off single instructions."""

from types import SimpleNamespace
from typing import cast

from piper.plan.instr import Instr
from piper.runtime.compute import draw_place, ends_with
from piper.runtime.env import Env, draw_seed


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
    makers = {"a": "compute", "b": "load", "c": "compute"}
    env = cast(Env, SimpleNamespace(makers=makers, at="abc".index))
    ins = Instr(op="compute", node="B[PP=0]", stream="compute", frees=("a", "b", "c"))
    assert ends_with(env, ins) == [0, 2]
