"""`compile` always proves the values of its plans: a lowering that makes a mistake is noticed."""

from dataclasses import replace

import pytest

from piper.errors import CompilerError
from piper.ir.devices import Devices
from piper.ir.ids import SlotId
from piper.lower.emit import plan_of
from piper.lower.events import Keeps
from piper.lower.state import LoweringState
from piper.plan.instr import Instr
from piper.plan.plan import Plan
from piper.plan.prove import ProofError
from tests.proof import models
from tests.proof.programs import program, stages


def test_a_mistake_of_the_lowering_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(work: LoweringState, devices: Devices, drafts: list[Instr], keeps: Keeps) -> Plan:
        """Begin the sum of the loss with each microbatch: valid in order, wrong in value."""
        sums = (SlotId("loss"),)
        edited = [
            replace(draft, reads=draft.reads[:1])
            if draft.op == "accumulate" and draft.writes == sums
            else draft
            for draft in drafts
        ]
        return plan_of(work, devices, edited, keeps)

    monkeypatch.setattr("piper.lower.emit.plan_of", mistaken)
    with pytest.raises(CompilerError) as caught:
        program(lambda: models.Dense(1), stages([0]))
    assert isinstance(caught.value.__cause__, ProofError)
    proof = [
        "the plans compute something else:",
        "norm[@0] reads loss, which holds (PP=0 MB=1) over cells 0-0; "
        "it should hold (PP=0 MB=0 + PP=0 MB=1) over cells 0-0",
    ]
    assert caught.value.facts["proof"].splitlines()[:2] == proof
    assert [line[:8] for line in caught.value.facts["strategy"].splitlines()] == ["replicat", "split #1"]
    assert "this is a bug in Piper: the plans of this strategy fail their proof" in str(caught.value)
    assert "please report it" in caught.value.hint
