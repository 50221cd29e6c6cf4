"""A slot that is freed is gone: whoever writes, reads or frees it afterwards is told."""

import pytest

from piper.plan.instr import Instr
from piper.plan.plan import Plan, Slot
from piper.plan.slots import SlotProof


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (Instr(op="compute", node="late", stream="compute", writes=("a",)), "late writes a, freed at 1"),
        (Instr(op="compute", node="late", stream="compute", reads=("a",)), "late reads a, freed at 1"),
        (Instr(op="compute", node="late", stream="compute", frees=("a",)), "late frees a, freed at 1"),
        (Instr(op="compute", node="late", stream="compute"), None),
    ],
)
def test_after_its_end(late: Instr, said: str | None) -> None:
    made = Instr(op="compute", node="made", stream="compute", writes=("a",))
    used = Instr(op="compute", node="used", stream="compute", reads=("a",), frees=("a",))
    plan = Plan(devices=(0,), instrs=(made, used, late), slots={"a": Slot(nbytes=4)}, residents={})
    assert [problem.splitlines()[0] for problem in SlotProof(plan).run()] == ([said] if said else [])
