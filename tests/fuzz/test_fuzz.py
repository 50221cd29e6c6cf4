"""Random models under random strategies give the numbers of plain PyTorch, in fp64; few are refused."""

import pytest

from tests.fuzz.case import draw, try_case

SHORT, LONG, EACH = 10, 1000, 50
REFUSED = 0.15  # of the strategies, at most: a refusal is no proof that the numbers are right


def try_seeds(first: int, count: int) -> None:
    refusals = [text for seed in range(first, first + count) if (text := try_case(draw(seed))) is not None]
    assert len(refusals) <= REFUSED * count, "\n\n".join([f"{len(refusals)} of {count} refused", *refusals])


@pytest.mark.timeout(180)  # about 5 s on an idle machine
@pytest.mark.parametrize("first", range(0, SHORT, 5))
def test_random_models_and_strategies(first: int) -> None:
    try_seeds(first, 5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, LONG, EACH))
def test_a_thousand_random_models_and_strategies(first: int) -> None:
    try_seeds(first, EACH)


def test_the_cases_cover_what_they_should() -> None:
    """What the thousand draw, counted: none of it is rare."""
    cases = [draw(seed) for seed in range(LONG)]
    kinds = {kind for case in cases for kind in case.spec.blocks}
    assert kinds == {"mlp", "gated", "attention", "experts"}
    words = [
        *(f"zero={zero}" for zero in range(4)),
        *("place(", "replicate(", "shard(", "split(", "remat(", "across='PP'", "OUTER", "LAYER"),
        *("gpipe", "one_f_one_b", "zero_bubble(", "interleaved_1f1b", "interleaved_zero_bubble"),
        *("zbv", "dualpipe_v"),
    ]
    source = ["\n".join(case.layout.lines) for case in cases]
    counts = {word: sum(word in lines for lines in source) for word in words}
    assert min(counts.values()) >= 10, counts
    drawn = {
        "tied head": sum(case.spec.tied_head for case in cases),
        "tied blocks": sum(case.spec.tied_blocks for case in cases),
        "frozen": sum(bool(case.spec.frozen) for case in cases),
        "skips": sum(case.spec.skip for case in cases),
        "weighted": sum(case.spec.loss == "weighted" for case in cases),
        "means": sum(case.spec.loss == "mean" for case in cases),
        "clipped": sum(case.layout.clip is not None for case in cases),
    }
    assert min(drawn.values()) >= 50, drawn


def test_a_failure_says_how_to_run_it_again() -> None:
    text = str(draw(7))
    assert text.splitlines()[0] == "seed 7"
    assert text.splitlines()[-1] == "again: python -m tests.fuzz.case 7"
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
