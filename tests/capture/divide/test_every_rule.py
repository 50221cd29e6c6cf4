"""Every rule of a sharded operation, on samples in every layout: equal to eager, or refused; never wrong or raw.

The short form takes the samples written here, on two devices. `make rules` takes them and torch's own database of
operations, on two, three and four devices.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from piper.capture.divide import attention_rules
from piper.capture.divide.collective import collective
from piper.capture.divide.compute_rules import POINTWISE
from piper.capture.divide.draws import RULES as DRAWS
from piper.capture.divide.layout import Sum
from piper.capture.divide.rules import rules
from piper.capture.trace.effects import draws
from piper.errors import CaptureError
from tests.capture.divide.hand_samples import hand_samples
from tests.capture.divide.samples import operations, samples
from tests.capture.divide.verdict import Sample, combinations, judge, recorded, targets_of

ELSEWHERE = {collective, *attention_rules.RULES, *DRAWS}  # have tests of their own
ATTENTION = ("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward")
CRASHES = "_segment_reduce"  # torch itself, in one of its samples at this size
PIECES = 24  # of torch's database, each a test
SAMPLES, LAYOUTS = 4, 24  # of an operation, and of a sample on each number of devices


def judged(given: Iterable[Sample], degrees: Iterable[int], limit: int) -> tuple[Counter[str], set[str]]:
    """Judge samples in many layouts; returns how often each verdict came, and which operations were equal."""
    found: Counter[str] = Counter()
    exercised: set[str] = set()
    bad: list[str] = []
    for sample in given:
        try:
            recording = recorded(sample)
        except CaptureError:
            found["not recorded"] += 1
            continue
        if any(draws(node) for node in recording.graph.nodes):
            continue  # eager draws other numbers
        for degree in degrees:
            for layouts in combinations(sample.tensors, degree, limit):
                if sample.direct and Sum() in layouts:
                    continue  # no parameter is a pending sum
                verdict = judge(sample, recording, layouts, degree)
                found[verdict.kind] += 1
                if verdict.kind in ("wrong", "raw"):
                    bad.append(f"{sample.name} on {degree} in {layouts}: {verdict.kind}: {verdict.text}")
                if verdict.kind == "equal":
                    exercised |= targets_of(recording)
    assert not bad, "\n".join([f"{len(bad)} of {found.total()}", *bad[:20]])
    return found, exercised


def test_every_rule_has_a_sample_and_is_right() -> None:
    _, exercised = judged((sample for sample in hand_samples() if not sample.direct), [2], 0)
    named = {str(target) for target in {*rules(), *POINTWISE} - ELSEWHERE}
    assert named <= exercised, f"no sample exercises {sorted(named - exercised)}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_samples_written_here_in_every_layout(degree: int) -> None:
    found, _ = judged(hand_samples(), [degree], 200)
    assert found["equal"] > found["refused"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", range(PIECES))
def test_the_samples_of_torch(piece: int, record_property: Callable[[str, object], None]) -> None:
    every = [
        (name, op)
        for name, op in operations().items()
        if name not in ATTENTION and not name.startswith(CRASHES)
    ]
    given = (sample for name, op in every[piece::PIECES] for sample in samples(name, op, SAMPLES))
    found, _ = judged(given, [2, 3, 4], LAYOUTS)
    record_property("verdicts", dict(found))
