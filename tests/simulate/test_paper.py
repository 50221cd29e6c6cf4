"""The benchmark of the paper's results runs at toy size, and its page holds the figures of the results."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from piper.models import decoder, moe
from piper.recipe import import_file

ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
def test_the_peer_of_the_memory_comparison_runs_without_data(paper: ModuleType) -> None:
    """Both sides need more for larger microbatches, and every level, limit and stage has its row."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        peer = import_file(ROOT / "benchmarks" / "paper_peer.py")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    grid = peer.Grid(config=decoder.Config.tiny(layers=4, stages=2), dp=2, length=16, microbatches=4)
    small, large = (peer.peer_bytes(grid, 0, size, 3) for size in (2, 8))
    assert large > small > 0
    rows = peer.batch(grid, sizes=(1, 2))
    assert len(rows) == 18
    assert {row["zero"] for row in rows} == {"1", "2", "3"}
