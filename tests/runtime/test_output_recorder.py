"""What a trail keeps of a step: the results of chunks, each of its first run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

from piper.ir.ids import Pass, SlotId
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.runtime.context import Env
from piper.runtime.recorders import OutputRecorder
from tests.slots import slots as named


def test_results_of_chunks_are_kept_and_those_of_a_second_run_are_not() -> None:
    slots: list[object] = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    first, second, gradient = named("PP=0.out0[MB=1]", "PP=0.out0.again[MB=1]", "PP=0.din0")
    places = {first: 0, second: 1, gradient: 2}
    forward = Pass(phase="F", chunk="PP=0", part=(("MB", 1),))
    backward = Pass(phase="B", chunk="PP=0")
    trail = OutputRecorder(cast(Env, SimpleNamespace(slots=slots, at=places.__getitem__)))
    ran: list[str] = []
    steps: list[tuple[Op, str, Pass | None, SlotId]] = [
        ("compute", "F[PP=0 MB=1]", forward, first),
        ("compute", "R[PP=0 MB=1]", replace(forward, again=True), second),
        ("compute", "B[PP=0]", backward, gradient),
        ("copy", "transfer", None, gradient),
    ]
    for op, node, run, slot in steps:
        ins = Instr(op=op, node=node, stream="compute", writes=(slot,), payload=run)
        trail.watch(0, ins, lambda node=node: ran.append(node))()  # type: ignore[misc]
    assert ran == ["F[PP=0 MB=1]", "R[PP=0 MB=1]", "B[PP=0]", "transfer"]
    assert {mark: value.item() for mark, value in trail.kept.items()} == {
        (forward, SlotId("output", "PP=0")): 1.0,
        (backward, gradient): 3.0,
    }
    slots[0] = None  # what is kept is a copy
    assert trail.kept[forward, first.base].item() == 1.0
