"""`compile` always proves the values of its plans: a lowering that makes a mistake is noticed."""

from dataclasses import replace

import pytest

from piper import api
from piper.ir.chunk import Outline
from piper.ir.graph import Graph
from piper.lower.lower import lower
from piper.lower.work import Settings, Work
from piper.plan.check import ProofError
from piper.plan.plan import Plans
from tests.proof import models
from tests.proof.programs import program, stages


def test_a_mistake_of_the_lowering_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(graph: Graph, settings: Settings, outline: Outline) -> tuple[Plans, Work]:
        """Begin the sum of the loss with each microbatch: valid in order, wrong in value."""
        plans, work = lower(graph, settings, outline)
        edited = [
            replace(ins, reads=ins.reads[:1]) if ins.op == "accumulate" and ins.writes == ("loss",) else ins
            for ins in plans.plans[0].instrs
        ]
        return replace(plans, plans=(replace(plans.plans[0], instrs=tuple(edited)),)), work

    monkeypatch.setattr(api, "lower", mistaken)
    with pytest.raises(ProofError) as caught:
        program(lambda: models.Dense(1), stages([0]))
    assert str(caught.value).splitlines()[:2] == [
        "the plans compute something else:",
        "norm[@0] reads loss, which holds (PP=0 MB=1) over cells 0-0; "
        "it should hold (PP=0 MB=0 + PP=0 MB=1) over cells 0-0",
    ]
