"""The layouts of results are those of DTensor's rules, wherever neither needs to communicate, or are listed with a reason."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.capture.shard.dtensor import differences
from tests.capture.shard.hand_samples import hand_samples
from tests.capture.shard.samples import operations, samples
from tests.capture.shard.verdict import Sample

QUICK = ("row", "product with a bias", "matrices", "mean of two", "stacked", "norm", "labels", "unflattened")
PIECES = 12
LISTED = Path(__file__).with_name("dtensor_differs.txt")


def listed() -> set[tuple[str, str]]:
    rows = [row.split(" | ") for row in LISTED.read_text().splitlines() if not row.startswith("#")]
    assert all(len(row) == 3 and row[2] for row in rows), "ours | DTensor's | why"
    return {(row[0], row[1]) for row in rows}


def compare(given: Iterable[Sample], limit: int) -> set[tuple[str, str]]:
    """Fail on a difference that is not listed; returns those that are and occur."""
    occurring: set[tuple[str, str]] = set()
    compared = 0
    for sample in given:
        count, differing = differences(sample, limit)
        compared += count
        unlisted = set(differing) - listed()
        assert not unlisted, f"{sample.name}: (ours, DTensor's) {unlisted}"
        occurring |= set(differing)
    assert compared, "nothing was compared"
    return occurring


def test_results_lie_as_dtensor_says() -> None:
    given = [sample for sample in hand_samples() if sample.name in QUICK]
    assert ("partial sum", "partial avg") in compare(given, 16)
    assert [sample.name for sample in given if not differences(sample, 16)[0]] == ["labels"], (
        "the rest is compared; a loss communicates in every layout"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_results_of_every_sample_written_here_lie_as_dtensor_says() -> None:
    compare((sample for sample in hand_samples() if not sample.direct), 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", range(PIECES))
def test_results_of_torch_samples_lie_as_dtensor_says(piece: int) -> None:
    every = list(operations().items())[piece::PIECES]
    compare((sample for name, op in every for sample in samples(name, op, 2)), 40)
