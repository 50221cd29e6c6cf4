"""What a trail keeps of a step: the results of chunks, each of its first run."""

from types import SimpleNamespace
from typing import cast

import torch

from piper.plan.instr import Instr
from piper.runtime.env import Env
from piper.runtime.trail import Trail


def test_results_of_chunks_are_kept_and_those_of_a_second_run_are_not() -> None:
    slots: list[object] = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    places = {"PP=0.out0[MB=1]": 0, "PP=0.out0.again[MB=1]": 1, "PP=0.din0": 2}
    trail = Trail(cast(Env, SimpleNamespace(slots=slots, at=places.__getitem__)))
    ran: list[str] = []
    for op, node, slot in (
        ("compute", "F[PP=0 MB=1]", "PP=0.out0[MB=1]"),
        ("compute", "R[PP=0 MB=1]", "PP=0.out0.again[MB=1]"),
        ("compute", "B[PP=0]", "PP=0.din0"),
        ("copy", "transfer", "PP=0.din0"),
    ):
        ins = Instr(op=op, node=node, stream="compute", writes=(slot,))  # type: ignore[arg-type]
        trail.watch(ins, lambda node=node: ran.append(node))()  # type: ignore[misc]
    assert ran == ["F[PP=0 MB=1]", "R[PP=0 MB=1]", "B[PP=0]", "transfer"]
    assert {mark: value.item() for mark, value in trail.kept.items()} == {
        ("F[PP=0 MB=1]", "PP=0.out0"): 1.0,
        ("B[PP=0]", "PP=0.din0"): 3.0,
    }
    slots[0] = None  # what is kept is a copy
    assert trail.kept["F[PP=0 MB=1]", "PP=0.out0"].item() == 1.0
