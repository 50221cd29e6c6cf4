"""One device of a job by itself: the right shapes, the right time, and errors for what it cannot give."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from piper.errors import ConfigError, LaunchError
from piper.plan.memory_timeline import timeline
from piper.run.launch import SingleRankRun, launch, launch_single_rank
from piper.runtime.worker import Options
from piper.workers.serve import NEEDS, WorkerAnswers
from tests.runtime.grid import Cell, batches, compiled
from tests.runtime.memory_meter import measured, meter_of, planned_bytes

CELLS = [
    Cell(case="decoder", schedule="zero-bubble", dp=2, zero=1, clip=0.3),
    Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, bucket_mb=0.02),
    Cell(case="moe", schedule="zbv", dp=2, zero=3, ways=2, rows=1),
    Cell(case="convnet", schedule="1f1b", dp=2),
    Cell(case="sum_weight", schedule="1f1b", dp=2, zero=3),  # only the last stage has weights
    Cell(case="encoder_decoder", schedule="1f1b", dp=2, zero=2),
]
SLOW = """
devices = 8
memory = 1e9
memory_bandwidth = 1e9

[flops]
float32 = 1e9

[[link]]
name = "wire"
bandwidth = 1e12
latency = {latency}
"""


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_device_runs_alone(cell: Cell) -> None:
    program = compiled(cell)
    for plan in program.plans:
        with launch_single_rank(program, f"rank:{plan.devices[-1]}") as run:
            norms = [run.step(batch).grad_norm for batch in batches(cell, 2)]
            assert all(math.isfinite(norm) and norm > 0 for norm in norms)
            assert norms[0] != norms[1]
            assert len(run.seconds) == 2
            assert run.peak().planned == timeline(plan).peak <= run.peak().predicted
            assert run.peak().measured is None


@pytest.mark.parametrize("cell", CELLS[:2], ids=str)
def test_memory_is_what_the_plan_counts(cell: Cell) -> None:
    """Alone, a device holds what it would hold among others."""
    program = compiled(cell)
    with measured(), launch_single_rank(program, "rank:0", Options()) as run:
        for batch in batches(cell, 2):
            run.step(batch)
        assert meter_of(run.worker).live == planned_bytes(run.worker)


def run_with(latency: float, folder: Path, streams: bool) -> tuple[SingleRankRun, Mapping[str, Tensor]]:
    cell = Cell(case="mlp", schedule="1f1b", dp=1, parts=4)
    file = folder / f"{latency}.toml"
    file.write_text(SLOW.format(latency=latency))
    program = compiled(cell)
    with launch_single_rank(program, "rank:0", Options(streams=streams), cluster=str(file)) as run:
        for batch in batches(cell, 3):
            run.step(batch)
    return run, batches(cell, 1)[0]


def test_communication_takes_its_time_on_its_own_stream(tmp_path: Path) -> None:
    fast, _ = run_with(0.0, tmp_path, streams=False)
    slow, _ = run_with(0.02, tmp_path, streams=False)
    ops = [ins.op for ins in slow.worker.env.plan.instrs]
    assert ops.count("send") == ops.count("recv") == 4
    serial = 8 * 0.02
    assert serial < min(slow.seconds[1:]) - min(fast.seconds[1:]) < 2 * serial
    beside, _ = run_with(0.02, tmp_path, streams=True)
    assert min(beside.seconds[1:]) < min(slow.seconds[1:])  # sends and receives do not wait for each other


def test_a_device_that_is_not_in_the_plan() -> None:
    with pytest.raises(ConfigError) as caught, launch(compiled(CELLS[0]), on="rank:9"):
        pass
    assert str(caught.value) == (
        "rank:9: there is no device '9'\n"
        "  devices: 0 to 3\n"
        "  hint:    name one of the plan's devices: --on rank:0"
    )


def test_what_only_a_whole_job_has() -> None:
    with launch(compiled(CELLS[0]), on="rank:1") as run, pytest.raises(LaunchError) as caught:
        run.state_dict()
    assert str(caught.value) == (
        "rank: there is no full state\n"
        "  why:  one device runs alone, on synthetic numbers\n"
        "  hint: launch the whole job: on='inline', 'local' or 'ray'"
    )


def test_what_is_said_of_a_call_is_said_of_a_method_that_answers_it() -> None:
    assert [name for name in NEEDS if not callable(getattr(WorkerAnswers, name, None))] == []
