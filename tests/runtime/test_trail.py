"""What a trail keeps of a step: the results of chunks, each of its first run."""

from types import SimpleNamespace
from typing import cast

import torch

from piper.ids import Pass, SlotId
from piper.plan.instr import Instr
from piper.runtime.env import Env
from piper.runtime.trail import Trail


def test_results_of_chunks_are_kept_and_those_of_a_second_run_are_not() -> None:
    slots: list[object] = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    part = (("MB", 1),)
    first, second, given = (
        SlotId("output", "PP=0", part=part),
        SlotId("output", "PP=0", again=True, part=part),
        SlotId("input_gradient", "PP=0"),
    )
    places = {first: 0, second: 1, given: 2}
    trail = Trail(cast(Env, SimpleNamespace(slots=slots, at=places.__getitem__)))
    forward, backward = Pass(phase="F", chunk="PP=0", part=part), Pass(phase="B", chunk="PP=0")
    again = Pass(phase="F", chunk="PP=0", part=part, again=True)
    ran: list[str] = []
    for ins in (
        Instr(op="compute", node="F[PP=0 MB=1]", stream="compute", writes=(first,), payload=forward),
        Instr(op="compute", node="R[PP=0 MB=1]", stream="compute", writes=(second,), payload=again),
        Instr(op="compute", node="B[PP=0]", stream="compute", writes=(given,), payload=backward),
        Instr(op="copy", node="transfer", stream="compute", writes=(given,)),
    ):
        trail.watch(ins, lambda node=ins.node: ran.append(node))()  # type: ignore[misc]
    assert ran == ["F[PP=0 MB=1]", "R[PP=0 MB=1]", "B[PP=0]", "transfer"]
    output, gradient = SlotId("output", "PP=0"), SlotId("input_gradient", "PP=0")
    assert {mark: value.item() for mark, value in trail.kept.items()} == {
        (forward, output): 1.0,
        (backward, gradient): 3.0,
    }
    slots[0] = None  # what is kept is a copy
    assert trail.kept[forward, output].item() == 1.0
