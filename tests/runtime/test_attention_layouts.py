"""Attention is exact or refused, whatever the rank of its operands, its mask and the way it is divided."""

import pytest

from tests.runtime.attention_cases import FORMS, Case, Layout, refusal, refusal_in_lockstep


@pytest.mark.parametrize("operands", ["3", "one head"])
@pytest.mark.parametrize("attention,zigzag", FORMS)
def test_a_sequence_in_three_dimensions(operands: str, attention: str, zigzag: bool) -> None:
    layout = str(Layout(context=2, attention=attention, zigzag=zigzag))
    assert refusal_in_lockstep(Case(operands=operands, mask="causal", layout=layout)) is None


def test_heads_that_two_axes_divide_keep_their_order() -> None:
    assert refusal_in_lockstep(Case(operands="4", mask="alibi 3", layout="tp2 cp2 heads")) is None


@pytest.mark.parametrize(
    "case",
    [
        Case(operands="3", mask="window 3", layout="tp2"),
        Case(operands="3", mask="none", layout="cp2 gather"),
        Case(operands="4", mask="window 2", layout="tp2 cp2 ring"),
        Case(operands="4", mask="alibi 3", layout="tp2 cp2 ring zigzag"),
    ],
    ids=str,
)
def test_a_case_that_is_proven_and_trained(case: Case) -> None:
    assert refusal(case) is None
