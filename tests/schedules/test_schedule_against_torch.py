"""Against torch.distributed.pipelining: it reads our schedules, we read its, and ours are never slower."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.pipelining import schedules as peer

from piper.schedules.grid import NAMES, Grid, grid_for
from piper.schedules.timing import makespan
from piper.schedules.torch_csv import read_csv, to_csv
from tests.schedules.activations import peak_activations


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "schedules_vs_torch.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


bench = load_benchmark()


def torch_reads(grid: Grid, path: Path) -> peer._PipelineScheduleRuntime:
    """Load our CSV with torch: its validator, then its lowering to sends and receives, finds deadlocks."""
    path.write_text(to_csv(grid))
    stages = bench.bare_stages(len(grid.rows), grid.stages // len(grid.rows))
    runtime = peer._PipelineScheduleRuntime(stages, grid.microbatches)
    runtime._load_csv(str(path))
    return runtime


def torch_simulates(runtime: peer._PipelineScheduleRuntime) -> None:
    """Torch's own dry run, which knows neither overlapped pairs nor FSDP's actions."""
    rows = {rank: [cell for cell in row if cell] for rank, row in runtime.pipeline_order.items()}
    rank_of = runtime.stage_index_to_group_rank.__getitem__
    with_comms = peer._add_send_recv(rows, rank_of, runtime._num_stages)
    peer._simulate_comms_compute(with_comms, rank_of, runtime._num_stages)


@pytest.mark.parametrize("ranks", bench.RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_valid_for_torch_and_never_slower(name: str, ranks: int, tmp_path: Path) -> None:
    for microbatches in bench.microbatch_counts(ranks):
        result = bench.compare(name, ranks, microbatches)
        assert result.ok, result
        if result.ours is None:
            assert name in ("dualpipe-v", "dualpipe") and result.theirs is None
            continue
        if result.their_peak is not None:
            assert result.our_peak <= result.their_peak, result
        if name == "dualpipe":
            continue  # torch has a stage on one rank only
        runtime = torch_reads(grid_for(name, ranks, microbatches), tmp_path / "ours.csv")
        if name != "dualpipe-v":
            torch_simulates(runtime)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble"])
@pytest.mark.parametrize("stages_per_rank", [1, 3, 4])
def test_any_number_of_stages_on_a_rank(name: str, stages_per_rank: int, tmp_path: Path) -> None:
    for ranks, microbatches in ((2, 5), (3, 7), (4, 8), (4, 3), (5, 12)):
        grid = grid_for(name, ranks, microbatches, stages_per_rank)
        torch_simulates(torch_reads(grid, tmp_path / "ours.csv"))
        theirs = bench.torch_grid(name, ranks, microbatches, stages_per_rank)
        if theirs is not None:
            assert makespan(grid) <= makespan(theirs)
            assert max(peak_activations(grid)) <= max(peak_activations(theirs))


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [
        ("interleaved-1f1b", 57, 141),
        ("interleaved-zero-bubble", 51, 127),
        ("zbv", 51, 127),
        ("dualpipe-v", 54, 134),
    ],
)
def test_the_published_figures(name: str, small: int, large: int) -> None:
    for ranks, microbatches, figure in ((4, 8, small), (8, 20, large)):
        result = bench.compare(name, ranks, microbatches)
        assert result.ours <= result.theirs == figure


def test_torch_with_communication_reads_as_without(tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    for name in ("interleaved-1f1b", "zbv", "dualpipe-v"):
        schedule = bench.PEERS[name](bench.bare_stages(3, 2), 6)
        schedule._dump_csv(str(path), format="compute_comms")
        assert read_csv(path) == bench.torch_grid(name, 3, 6, 2)


def test_a_torch_schedule_we_have_no_builder_for(tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    peer.ScheduleLoopedBFS(bench.bare_stages(2, 2), 3)._dump_csv(str(path), format="compute_only")
    assert makespan(read_csv(path)) > 0
