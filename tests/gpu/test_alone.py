"""One device of a job alone on a CUDA device: every kind of communication, its time, and its memory."""

import itertools
import math
import statistics
from pathlib import Path

import pytest
import torch

from piper.compiler import compile
from piper.run.launch import launch_single_rank
from piper.runtime.comm.synthetic import CopyEngine
from tests.runtime.grid import Cell, batches, job
from tests.workers.test_alone import SLOW

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
CELLS = [
    Cell(case="moe", schedule="zbv", dp=2, zero=3, ways=2, rows=1),
    Cell(case="convnet", schedule="1f1b", dp=2),
    Cell(case="encoder_decoder", schedule="1f1b", dp=2, zero=2, clip=0.3),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_device_runs_alone(cell: Cell) -> None:
    program = compile(job(cell), device="cuda")
    for plan in program.plans:
        with launch_single_rank(program, f"rank:{plan.devices[-1]}") as run:
            for batch in itertools.chain(batches(cell, 2), batches(cell, 2)):
                norm = run.step(batch).grad_norm
                assert math.isfinite(norm) and norm > 0
            peak = run.peak()
            assert peak.measured is not None
            assert peak.measured > 0


def test_a_stream_is_busy_for_as_long_as_asked() -> None:
    engine = CopyEngine(torch.device("cuda", 0))
    for outward in (False, True):
        for seconds in (1e-3, 2e-2):
            taken = []
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                engine(seconds, outward)
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / 1e3)
            assert statistics.median(taken) == pytest.approx(seconds, rel=0.15)


def test_communication_takes_its_time_beside_other_streams(tmp_path: Path) -> None:
    cell = Cell(case="mlp", schedule="1f1b", parts=4)
    program = compile(job(cell), device="cuda")
    times = {}
    for latency in (0.0, 0.01):
        file = tmp_path / "slow.toml"
        file.write_text(SLOW.format(latency=latency))
        with launch_single_rank(program, "rank:0", cluster=str(file)) as run:
            for batch in batches(cell, 5):
                run.step(batch)
        times[latency] = min(run.seconds[2:])
    # Four sends go one way while four receives come the other: 40 ms, not 80.
    assert 0.035 < times[0.01] - times[0.0] < 0.07
