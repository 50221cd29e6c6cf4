"""The rows of `benchmarks/gpu_ranks.py`: what is measured, and the numbers of both sides where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_ranks
from benchmarks.ranks_probe import figures_of, overlaps, union
from benchmarks.ranks_rows import RANKS, ROWS, SIZES, strategy_of
from benchmarks.ranks_sides import GIB, Figures

ROOT = Path(gpu_ranks.__file__).parents[1]
TOLERANCE = 2e-5  # of float32 sums in another order, over a few steps


def event(kind: str, name: str, begin: float, end: float) -> dict[str, object]:
    return {"cat": kind, "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3}


def test_a_trace_says_where_the_time_went() -> None:
    figures = figures_of(
        [
            event("kernel", "gemm", 0, 4),
            event("kernel", "norm", 2, 5),  # beside the first one
            event("kernel", "ncclDevKernel_SendRecv", 4, 8),
            event("gpu_memcpy", "Memcpy DtoH", 9, 10),
            event("kernel", "gemm", 12, 14),
            event("cuda_runtime", "cudaLaunchKernel", 0, 1),
            event("cuda_runtime", "cudaStreamWaitEvent", 1, 2),
            event("cpu_op", "aten::mm", 0, 9),
        ]
    )
    assert figures == {
        "compute": 9.0,
        "nccl": 4.0,
        "copies": 1.0,
        "busy": 7.0,
        "gaps": 7.0,
        "exposed": 4.0,  # 3 of NCCL after the second kernel, and the copy
        "kernels": 3.0,
        "nccl kernels": 1.0,
        "copy calls": 1.0,
        "launches": 1.0,
    }


def test_a_trace_without_a_gpu_is_empty() -> None:
    assert set(figures_of([event("cpu_op", "aten::mm", 0, 9)]).values()) == {0.0}


def test_spans() -> None:
    assert union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert overlaps([(0, 2), (4, 6)], [(1, 5), (5, 7)]) == [(1, 2), (4, 5), (5, 6)]


def test_figures_are_of_the_second_half_and_the_worst_rank() -> None:
    times = [9.0, 5.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.5]
    figures = Figures(times=times, losses=[], norm=1.0, memory=[GIB, 3 * GIB], build_s=0.0)
    assert (figures.ms, figures.gib, figures.fifth) == (1750.0, 3.0, 2.0)


def test_every_row_has_a_shape_of_each_size_and_uses_all_ranks() -> None:
    for size in SIZES.values():
        assert size.shapes.keys() == ROWS.keys()
    for row in ROWS.values():
        devices = [device for stage in range(row.stages) for device in row.devices_of(stage)]
        assert {*devices} == {*range(RANKS)}
        assert all(strategy_of(row, size.shapes[row.name]) for size in SIZES.values())


def test_a_v_schedule_turns_around_at_the_last_rank() -> None:
    assert [ROWS["zbv"].stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [ROWS["interleaved"].stages_of(rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_sides_have_the_same_numbers(tmp_path: Path) -> None:
    rows, out = ["zbv", "pp2_fsdp2_reshard", "pp2_ep2"], tmp_path / "out.jsonl"
    words = ["--device", "cpu", "--size", "tiny", "--eager", "--steps", "3", "--sides", "peer,piper"]
    words += ["--rows", ",".join(rows), "--out", str(out), "--cache", str(tmp_path / "cache")]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_ranks", *words], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["row"], line["side"]) for line in lines] == [
        (row, side) for row in rows for side in ("peer", "piper")
    ]
    for peer, ours in zip(lines[::2], lines[1::2], strict=True):
        assert "error" not in peer, peer["error"]
        assert "error" not in ours, ours["error"]
        assert ours["losses"] == pytest.approx(peer["losses"], rel=TOLERANCE), ours["row"]
        assert ours["norm"] == pytest.approx(peer["norm"], rel=TOLERANCE), ours["row"]
