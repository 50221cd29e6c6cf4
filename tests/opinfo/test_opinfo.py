"""Operations under Piper's capture give what eager PyTorch gives, or are refused with a message."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor, nn

import piper
from tests import plain
from tests.opinfo import common, database, operators
from tests.opinfo.sample import BATCH, Calls, Sample, loss
from tests.opinfo.verdict import Runnable, Verdict, runnable, verdicts

REFUSED = Path(__file__).with_name("refused.txt")
HEADER = (
    "# What cannot be captured of the operations and modules that torch itself tests, and why. The test fails when\n"
    "# anything else is refused, and when something here works. `pytest -m slow tests/opinfo --update-golden` writes it.\n"
)
SHARDS = 24
TOGETHER = 6  # samples that are captured as one model


def test_common_operations_are_equal() -> None:
    _all_equal(list(common.samples()))


def test_operators_are_equal() -> None:
    _all_equal(list(operators.families()))


def test_every_function_of_operator_has_a_sample() -> None:
    assert operators.covered() == set(operator.__all__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_common_operations_trains_as_plain_torch_does() -> None:
    """The same through everything: compile, the proof, a launcher, a worker and an optimizer."""
    samples = [sample for sample in (*common.samples(), *operators.families()) if sample.name != "draws"]
    group = [each for sample in samples if isinstance(each := runnable(sample), Runnable)]
    assert len(group) == len(samples)

    def model() -> nn.Module:
        return Calls([each.filled() for each in group])

    def total(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return loss(model, batch)[0].nan_to_num()

    batches = [BATCH, BATCH]
    wanted = plain.train(model, total, batches)
    job = piper.Job(
        model=model, loss=total, data=lambda: batches, strategy=[], precision="fp64", optimizer=plain.sgd
    )
    with piper.launch(piper.compile(job), on="inline") as run:
        got = [step.loss for step in run.train(2)]
    assert got == pytest.approx(wanted.losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operation_that_torch_tests(shard: int, request: pytest.FixtureRequest) -> None:
    samples = [
        sample for info in database.operations()[shard::SHARDS] for sample in _few(database.samples(info))
    ]
    samples += [
        sample for info in database.modules()[shard::SHARDS] for sample in _few(database.module_samples(info))
    ]
    samples += list(operators.samples())[shard::SHARDS]
    _hold(samples, update=request.config.getoption("--update-golden"))


def _few(samples: Iterator[Sample]) -> list[Sample]:
    """Return the first of the samples of each name."""
    by_name: dict[str, Sample] = {}
    for sample in samples:
        by_name.setdefault(sample.name, sample)
    return list(by_name.values())


def _hold(samples: Sequence[Sample], *, update: bool) -> None:
    """Fail where a sample is wrong or raises an error that is not Piper's, or where the list is not right."""
    found: list[tuple[str, Verdict]] = []
    for start in range(0, len(samples), TOGETHER):
        some = samples[start : start + TOGETHER]
        found += zip((sample.name for sample in some), verdicts(some), strict=True)
    refused = {name: said.why for name, said in reversed(found) if said.kind == "refused"}
    names = {name for name, _ in found}
    listed = _listed()
    if update:
        kept = {name: why for name, why in listed.items() if name not in names}
        lines = [f"{name} | {why}\n" for name, why in sorted({**kept, **refused}.items())]
        REFUSED.write_text(HEADER + "".join(lines), encoding="utf-8")
    else:
        assert refused.keys() == {name for name in listed if name in names}
    assert [(name, said) for name, said in found if said.kind in ("wrong", "raw")] == []


def _listed() -> dict[str, str]:
    lines = [line for line in REFUSED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: why for name, _, why in (line.partition(" | ") for line in lines)}


def _all_equal(samples: Sequence[Sample]) -> None:
    found = dict(zip((sample.name for sample in samples), verdicts(samples, evaluated=False), strict=True))
    assert {name: said for name, said in found.items() if said.kind != "equal"} == {}
