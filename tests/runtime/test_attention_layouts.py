"""Attention is exact or refused, whatever the rank of its operands, its mask and the way it is divided."""

import pytest

from tests.covering import covering
from tests.runtime.attention_cases import FORMS, LAYOUTS, Case, Layout, cases, refusal, refusal_in_lockstep

REFUSALS = (  # all that is refused: what is not here must have plain PyTorch's numbers
    "it is sharded along the size of a head",
    "heads do not divide by",
    "attention that is sharded by the sequence is sharded by heads alone",
    "a ring passes on as many keys as there are queries",
    "a ring passes on one run of the sequence",
    "its mask has a gradient, which a ring does not compute",
    "shards the same dimension in another order",
    "has no even sharding as",  # a dimension of groups of heads that is smaller than the devices
    "k.weight cannot be sharded along dimension",  # one head of keys
    "aten.einsum.default has no rule",
)


def exact_or_refused(found: str | None) -> None:
    assert found is None or any(known in found for known in REFUSALS), found


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


PAIRS = covering(cases(), lambda case: {name: getattr(case, name) for name in ("operands", "mask", "layout")})
OF_LAYOUT = {name: [case for case in PAIRS if case.layout == name] for name in LAYOUTS}
TRAINED = [of[7 * i % len(of)] for i, of in enumerate(OF_LAYOUT.values())]


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_every_two_choices_meet(case: Case) -> None:
    exact_or_refused(refusal_in_lockstep(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_every_layout_is_proven_and_trained(case: Case) -> None:
    exact_or_refused(refusal(case))
