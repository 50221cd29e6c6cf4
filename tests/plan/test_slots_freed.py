"""A slot that is freed is gone: whoever writes, reads or frees it afterwards is told."""

import pytest

from piper.plan.instr import Instr
from piper.plan.plan import Plan, Slot
from piper.plan.prove import SlotProof
from tests.slots import slot

A = slot("a")


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (Instr(op="compute", node="late", stream="compute", writes=(A,)), "late writes a.out0, freed at 1"),
        (Instr(op="compute", node="late", stream="compute", reads=(A,)), "late reads a.out0, freed at 1"),
        (Instr(op="compute", node="late", stream="compute", frees=(A,)), "late frees a.out0, freed at 1"),
        (Instr(op="compute", node="late", stream="compute"), None),
    ],
)
def test_after_its_end(late: Instr, said: str | None) -> None:
    made = Instr(op="compute", node="made", stream="compute", writes=(A,))
    used = Instr(op="compute", node="used", stream="compute", reads=(A,), frees=(A,))
    plan = Plan(devices=(0,), instrs=(made, used, late), slots={A: Slot(nbytes=4)}, residents={})
    assert [problem.splitlines()[0] for problem in SlotProof(plan).run()] == ([said] if said else [])
