"""The benchmark of the paper's results runs at toy size, and its page holds the figures of the results."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.check.check import check
from piper.compiler import Program
from piper.models import decoder, moe
from piper.recipe import import_file
from piper.run.launch import launch_inline

ROOT = Path(__file__).parents[2]
VOCAB = 4096
TINY = moe.Config.tiny(layers=4, stages=1, experts=4)


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return import_file(ROOT / "benchmarks" / "paper.py")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.slow
def test_schedules_of_a_tiny_model_are_compared_on_measured_costs(paper: ModuleType, tmp_path: Path) -> None:
    """The chunks of one rank are run and timed; every chunk of every schedule then has a measured cost."""
    case = paper.Case(
        name="tiny", config=TINY, samples=1, length=8, pp=2, ep=2, microbatches=4, ends=((0, 0),)
    )
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        paper.measure(case, tmp_path / "costs.json", device="cpu", compile=False)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    costs = paper.read_costs(tmp_path / "costs.json")
    rows = paper.schedules([case], ["h200"], {"tiny": costs})
    assert [row["schedule"] for row in rows] == ["1f1b", "interleaved-1f1b", "dualpipe-v"]
    assert {row["computing"] for row in rows} == {"measured"}
    program = paper.compiled(case.study(), case.layout("1f1b", (0, 0)))
    computing = {chunk.name for chunk in program.outline.chunks if chunk.kind in ("compute", "expert")}
    assert len(computing) == 12
    assert computing <= set(costs.chunks)


def test_devices_of_a_job_that_grows_have_the_same_work(paper: ModuleType) -> None:
    dense = decoder.Config.tiny(layers=2, stages=1)
    rows = paper.scale(config=dense, replicas=(1, 2), clusters=("h200",), length=8, microbatches=2)
    assert [(row["devices"], row["layout"]) for row in rows] == [("2", "PP2 x DP1"), ("4", "PP2 x DP2")]
    assert rows[0]["of 2 devices %"] == "100.0"


@pytest.mark.slow
def test_streams_and_buckets_of_a_tiny_model(paper: ModuleType) -> None:
    """A shared stream is never faster, and small buckets are more collectives."""
    one, two = paper.streams(config=TINY, samples=(1,), length=8, zeros=(0,), devices=4, ep=2)
    assert float(one["step ms"]) >= float(two["step ms"])
    dense = decoder.Config.tiny(layers=2, stages=1)
    small, large = paper.buckets(config=dense, sizes=(0.001, None), zeros=(1,), length=8, dp=2)
    assert int(small["collectives"]) > int(large["collectives"])


def test_results_are_read_as_they_are_written(paper: ModuleType) -> None:
    """A part that is run again is replaced, and the others stay as they were."""
    first = paper.with_tables("", {"scale": paper.table([{"a": "1", "b": "2x"}])}, "made so")
    both = paper.with_tables(first, {"buckets": paper.table([{"c": "3"}])}, "made later")
    assert paper.tables_of(both) == {"scale": [{"a": "1", "b": "2x"}], "buckets": [{"c": "3"}]}
    assert dict(paper.kept_notes(both)) == {"scale": "made so", "buckets": "made later"}


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return import_file(ROOT / "benchmarks" / "paper_peer.py")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def tiny_grid(peer: ModuleType) -> object:
    """Return a job with a vocabulary that makes logits the largest values of its last stage."""
    config = replace(decoder.Config.tiny(layers=4, stages=2), vocab=VOCAB)
    return peer.Grid(config=config, dp=2, length=16, microbatches=4, least_mb=0)


@pytest.mark.slow
def test_the_peer_of_the_memory_comparison_runs_without_data(
    peer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer needs more for larger microbatches, and every level, limit and way to recompute has a row."""
    grid = tiny_grid(peer)
    small, large = (peer.peer_bytes(grid, 0, size, 3) for size in (2, 8))
    assert large > small > 0
    monkeypatch.setattr(peer, "LEVELS", (1, 3))
    monkeypatch.setattr(peer, "WAYS", (peer.LAYERS, peer.Saved(stage=True, host=True)))
    rows = peer.batch(grid, sizes={4: (1, 2)}, peer_sizes=(1, 2))
    assert len(rows) == 2 * 2 * 2
    assert {row["zero"] for row in rows} == {"1", "3"}
    assert {row["saved"] for row in rows} == {"layer inputs", "stage inputs, on the host"}


def test_the_largest_microbatch_lies_between_the_sizes_that_were_tried(peer: ModuleType) -> None:
    """Of three sizes, the two around the limit count; outside of them, the nearest two."""
    assert peer.largest([10, 20, 60], (1, 2, 4), 40) == 3
    assert peer.largest([10, 20, 60], (1, 2, 4), 15) == 1
    assert peer.largest([10, 20, 60], (1, 2, 4), 5) == 0
    assert peer.largest([10, 20, 60], (1, 2, 4), 80) == 5


@pytest.mark.parametrize("index", [0, 1])
def test_the_peer_has_the_loss_and_gradients_of_the_plain_stage(peer: ModuleType, index: int) -> None:
    """In whatever pieces it computes the head, and whatever it saves to recompute from."""
    config = decoder.Config.tiny(layers=4, stages=2)
    torch.manual_seed(0)
    plain = peer.Stage(config, index).double()
    labels = torch.randint(config.vocab, (4, 12))
    came = torch.randn(4, 12, config.dim, dtype=torch.float64) if index else labels

    def of_logits(out: Tensor) -> Tensor:
        total: Tensor = peer.cross_entropy(out, labels) if index else out.square().sum()
        return total

    wanted = gradients(plain, came, of_logits)
    for saved in peer.WAYS:
        for pieces in (1, 3) if index else (1,):
            stage = peer.PeerStage(config, index, saved, pieces, peer.LiveBytes()).double()
            stage.load_state_dict(plain.state_dict())
            if pieces == 1:
                found = gradients(stage, came, of_logits)
            else:
                found = gradients(stage, came, lambda out: peer.mean_of_pieces(out, labels), labels=labels)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)  # the plain loss is in float32


def gradients(
    module: nn.Module, came: Tensor, loss: Callable[[Tensor], Tensor], **given: Tensor
) -> dict[str, Tensor]:
    """Return the loss in float32, and the gradients of the input and of all parameters."""
    x = came.clone().requires_grad_(came.is_floating_point())
    total = loss(module(x, **given))
    total.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()} | {"x": x.grad}
    return {name: value for name, value in found.items() if value is not None} | {"loss": total.float()}


def test_our_head_in_pieces_gives_the_numbers_of_one_device(peer: ModuleType) -> None:
    """Whatever is saved. And holds the logits of one piece at a time: the last stage needs less."""
    grid, programs = tiny_grid(peer), dict[int, Program]()
    logits = 2 * 16 * VOCAB * 8  # bytes of a microbatch
    for saved in peer.WAYS:
        for pieces in (1, 4):
            job = replace(peer.our_job(grid, 2, 3, saved, pieces), precision="fp64")
            programs[pieces] = piper.compile(job, device="cpu", captured=programs.get(pieces))
        report = check(programs[4], launch_inline, list(programs[4].job.data()))
        assert report.ok, (saved, report)
        whole, pieced = (peer.predicted_peak(programs[pieces].plans.of(2)) for pieces in (1, 4))
        assert whole - pieced > logits, saved
