"""Every rule of a sharded operation, on samples in every layout: equal to eager, or refused; never wrong or raw.

The short form takes the samples written here, on two devices. `make rules` takes them and torch's own database of
operations, on two, three and four devices. `every_rule.py` runs a part of the whole without pytest.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from piper.capture.shard import attention_rules
from piper.capture.shard.compute_rules import DRAWS, POINTWISE
from piper.capture.shard.rules import RULES
from piper.capture.trace.recording import collective
from tests.capture.shard.every_rule import DEVICES, LAYOUTS, SAMPLES, Report, judged, main, suite
from tests.capture.shard.hand_samples import hand_samples

ELSEWHERE = {collective, *attention_rules.RULES, *DRAWS}  # have tests of their own
PIECES = 72  # of the whole, each a test


def nothing_is_wrong(report: Report) -> None:
    assert not report.bad, "\n".join([report.totals(), *report.bad[:20]])


def test_every_rule_has_a_sample_and_is_right() -> None:
    report = judged((sample for sample in hand_samples() if not sample.direct), [2], 0)
    nothing_is_wrong(report)
    named = {str(target) for target in {*RULES, *POINTWISE} - ELSEWHERE}
    assert named <= report.exercised, f"no sample exercises {sorted(named - report.exercised)}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", range(PIECES))
def test_every_sample_in_every_layout(piece: int, record_property: Callable[[str, object], None]) -> None:
    report = Report()
    for given, layouts in list(suite(SAMPLES, LAYOUTS).values())[piece::PIECES]:
        report.add(judged(given(), DEVICES, layouts))
    nothing_is_wrong(report)
    record_property("verdicts", dict(report.verdicts))


@pytest.mark.slow  # torch's database takes seconds to import
def test_a_part_of_the_suite_runs_without_pytest(tmp_path: Path) -> None:
    file = tmp_path / "report"
    name = "torch nn.functional.scaled_dot_product_attention"
    assert main(["--only", name, "--devices", "2", "--samples", "1", "--out", str(file)]) == 0
    first, second, last = file.read_text().splitlines()
    assert first == f"begin {name}" and second.startswith(f"{name}: ") and last.startswith("total: ")
    assert " 0 equal" not in last
