"""Random edits of proven plans: each is refused by the proof, or gives the same numbers when run."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from piper.plan.plan import Plans
from piper.plan.prove import ProofError, prove
from piper.proof.values import prove_values
from tests.proof.mutations import KINDS, mutant
from tests.proof.programs import PROGRAMS, numbers, program_of, right_numbers


def verdict(name: str, plans: Plans) -> str:
    """Return which proof refuses plans, or that they are accepted."""
    program = program_of(name)
    try:
        prove(plans)
    except ProofError:
        return "order"
    try:
        prove_values(plans, program.graph, clip=program.job.clip_norm is not None)
    except ProofError:
        return "values"
    return "accepted"


def examine(name: str, kinds: list[str], seed: int) -> Counter[str]:
    """Edit one program in several ways; return how often each proof refused, and how often none."""
    rng = random.Random(f"{name} {seed}")
    found: Counter[str] = Counter()
    for kind in kinds:
        plans = mutant(rng, program_of(name).plans, kind)
        if plans is None:
            found["nothing to edit"] += 1
            continue
        said = verdict(name, plans)
        found[said] += 1
        if said == "accepted":
            got = numbers(program_of(name), plans)
            assert got.equals(right_numbers(name)), f"{name}, {kind}, seed {seed}: accepted, other numbers"
    return found


@pytest.mark.timeout(180)  # it compiles every program: about 10 s on an idle machine
def test_the_plans_themselves_are_accepted() -> None:
    for name in PROGRAMS:
        assert verdict(name, program_of(name).plans) == "accepted"


@pytest.mark.timeout(180)
def test_edited_plans_are_refused_or_give_the_same_numbers() -> None:
    found: Counter[str] = Counter()
    kinds = [*KINDS]
    for number, name in enumerate(PROGRAMS):
        found += examine(name, [kinds[(7 * number + i) % len(kinds)] for i in range(5)], seed=1)
    assert found["order"] + found["values"] + found["accepted"] >= 60, found
    assert found["values"] >= 15, found  # what the proof of order alone would let pass


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_edited_plans_are_refused_or_give_the_same_numbers(name: str) -> None:
    """At least 500 edits over all programs together, of every kind."""
    found: Counter[str] = Counter()
    for seed in range(2, 4):
        found += examine(name, [*KINDS], seed)
    assert found["order"] + found["values"] + found["accepted"] >= 36, found
    assert found["values"] >= 10, found


def test_the_right_numbers_are_told_from_others() -> None:
    """The comparison would notice: another learning rate, another loss, another gradient, another norm."""
    right = right_numbers("1f1b")
    assert right.equals(right)
    first = next(iter(right.state))
    assert not right.equals(replace(right, state={**right.state, first: right.state[first] + 1e-6}))
    gradients = {**right.gradients, first: right.gradients[first] * (1 + 1e-6)}
    assert not right.equals(replace(right, gradients=gradients))
    assert not right.equals(replace(right, losses=(right.losses[0], right.losses[1] + 1e-6)))
    assert not right.equals(replace(right, norms=(right.norms[0] * 1.001, right.norms[1])))
