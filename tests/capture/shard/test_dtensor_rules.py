"""Operations that DTensor's rules shard have the numbers of one device, forward and backward, or are not asked for."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper.capture.shard.axis_sharding import HINT, INSTEAD, hint_for
from piper.capture.shard.dtensor_rules import VERIFIED
from piper.errors import CaptureError
from piper.ir.sharding import REPLICATE, Partial, Placement, Shard
from tests.capture.shard.dtensor_samples import MATRICES, dtensor_samples, values
from tests.capture.shard.samples import operations, samples
from tests.capture.shard.verdict import Sample, judge, recorded, sharded
from tests.capture.shard.verified import DEVICES, LAYOUTS, SAMPLES, Every, asked, verdicts

LISTED = Path(__file__).with_name("dtensor_verified.txt")
PIECES = 24
NEWEST = torch.__version__ >= "2.13"  # 2.11 has rules for a third of the operations; none of those is wrong


def listed(source: str) -> dict[str, str]:
    """Return the operations that samples of one source verify, each with the name of such a sample."""
    rows = [row.split(" | ") for row in LISTED.read_text().splitlines() if not row.startswith("#")]
    assert all(len(row) == 2 and row[1].startswith(("here: ", "torch: ")) for row in rows)
    return {row[0]: row[1].partition(": ")[2] for row in rows if row[1].startswith(source)}


def test_every_operation_that_is_asked_for_is_verified() -> None:
    verified = {**listed("here"), **listed("torch")}.keys()
    assert verified == (VERIFIED if NEWEST else VERIFIED | {"aten.convolution.default"})


@pytest.mark.parametrize(
    "name", ["conv2d in groups", "max_pool2d", "group norm", "inverse", "scattered number"]
)
def test_samples_of_a_batch_are_sharded(name: str) -> None:
    sample = next(each for each in dtensor_samples() if each.name == name)
    recording = recorded(sample)
    for first in (Shard(0), Shard(0, 2), Shard(0, zigzag=True)):
        layouts: list[Placement] = [first, *[REPLICATE for _ in sample.tensors[1:]]]
        with asked(VERIFIED) as answered:
            kind = judge(sample, recording, layouts, 2).kind
        assert (kind == "equal" and answered) if NEWEST else kind in ("equal", "refused")


def test_a_sum_is_taken_before_dtensor_is_asked() -> None:
    sample = Sample(name="product", call=lambda x: [torch.baddbmm(x, x, x)], tensors=(MATRICES,))
    assert judge(sample, recorded(sample), [Partial()], 2).kind == "equal"


def test_what_dtensor_would_gather_is_refused_with_what_to_write() -> None:
    sample = Sample(name="norm", call=lambda x: [torch.norm(x, dim=1)], tensors=(MATRICES,))
    with pytest.raises(CaptureError) as caught:
        sharded(recorded(sample), [Shard(1)], 2)
    assert INSTEAD["aten.norm"] in str(caught.value) and HINT in str(caught.value)
    assert hint_for(torch.ops.aten.erf.default) == hint_for(len) == HINT


def test_an_operation_that_is_not_verified_is_refused() -> None:
    sample = Sample(name="cummax", call=lambda x: [x.cummax(1).values], tensors=(MATRICES,))
    with asked(frozenset()), pytest.raises(CaptureError, match=r"aten\.cummax\.default has no rule"):
        sharded(recorded(sample), [Shard(0)], 2)


@pytest.mark.skipif(not NEWEST, reason="DTensor of torch 2.11 has no rule for it, so it is refused before")
def test_an_operation_that_writes_what_is_whole_is_refused() -> None:
    """Running statistics of a norm would go into a slice."""

    def normed(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        return [torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5)[0]]

    tensors = (values(4, 6, 3), torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64))
    sample = Sample(name="batch norm", call=normed, tensors=tensors)
    with asked(Every()), pytest.raises(CaptureError, match="it writes into what every device holds whole"):
        sharded(recorded(sample), [Shard(1), REPLICATE, REPLICATE], 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_sample_written_here_has_the_numbers_of_one_device() -> None:
    every = {each.name: verdicts([each], DEVICES, LAYOUTS, VERIFIED) for each in dtensor_samples()}
    bad = {
        name: counts for name, counts in every.items() if any(c["wrong"] + c["raw"] for c in counts.values())
    }
    assert not bad
    if NEWEST:
        assert [target for target, name in listed("here").items() if not every[name][target]["equal"]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", range(PIECES))
def test_every_verified_operation_has_the_numbers_of_one_device(piece: int) -> None:
    database = operations()
    for target, name in list(listed("torch").items())[piece::PIECES]:
        counts = verdicts(samples(name, database[name], SAMPLES), DEVICES, LAYOUTS, VERIFIED)[target]
        assert not counts["wrong"] and not counts["raw"], f"{target} in {name}: {counts}"
        assert counts["equal"] or not NEWEST, f"{target} in {name} is not sharded"
