"""On CUDA every strategy gives the numbers of plain PyTorch on one device, in fp64 to 1e-9."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from piper.check.check import check
from piper.compiler import compile
from piper.directives import remat
from piper.ir.select import at
from piper.run.launch import launch_inline, launch_local
from piper.run.run import Run
from piper.runtime.setup import ProgramLike, seeded_draws
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job, strategy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]  # each process takes seconds to get there
LAUNCHERS: dict[str, Callable[[ProgramLike, Options], AbstractContextManager[Run]]] = {
    "inline": launch_inline,
    "local": launch_local,
}
CELLS = [
    Cell(case="decoder", schedule="zero-bubble", clip=0.3),  # a pipeline, with a tied embedding
    Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, bucket_mb=0.02),
    Cell(case="moe", schedule="1f1b", dp=2, zero=2, ways=2, rows=1),  # divided experts
    Cell(case="sum_weight", schedule="1f1b", dp=2, zero=1, clip=0.3, rows=1),
    Cell(case="convnet", schedule="zero-bubble", dp=2),  # buffers that follow the first replica
    Cell(case="dropout", schedule="zero-bubble", dp=2, zero=2),
]


@pytest.mark.parametrize("on", LAUNCHERS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_several_ranks_on_one_gpu(cell: Cell, on: str) -> None:
    program = compile(job(cell), device="cuda")
    report = check(program, LAUNCHERS[on], batches(cell, 2))
    assert report.ok, report


@pytest.mark.parametrize("cell", [CELLS[1], CELLS[2], CELLS[5]], ids=str)
def test_stages_that_run_again(cell: Cell) -> None:
    again = job(cell, strategy=[remat(at(), 0.5, across="PP"), *strategy(cell)])
    program = compile(again, device="cuda")
    assert any(ins.again for plan in program.plans for ins in plan.instrs)
    report = check(program, launch_local, batches(cell, 2))
    assert report.ok, report


def test_one_device_with_streams() -> None:
    cell = Cell(case="decoder", schedule="none", parts=4)
    one = job(cell, strategy=[])
    program = compile(one, device="cuda")
    assert sum(len(plan.devices) for plan in program.plans) == 1
    report = check(program, launch_inline, batches(cell, 3))
    assert report.ok, report


@pytest.mark.parametrize("cell", [CELLS[0], CELLS[1]], ids=str)
def test_streams_and_one_stream_give_the_same_bits(cell: Cell) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    states = []
    for streams in (True, False, True):
        with launch_local(compile(job(cell), device="cuda"), Options(streams=streams)) as run:
            for batch in batches(cell, 3):
                run.step(batch)
            states.append(run.state_dict())
    for other in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(value, other[name]), name


def test_a_large_tensor_drawn_on_the_gpu_arrives_whole() -> None:
    """It is copied in pieces, of which the last one is shorter; or in one piece that does not fill its buffer."""
    device = torch.device("cuda", 0)
    for dtype, length in (
        (torch.float32, 2**23 + 5),
        (torch.bfloat16, 2**23 + 5),
        (torch.float32, 2**17 + 5),
    ):
        with seeded_draws(3, device):
            found = torch.empty(7, length, dtype=dtype).normal_()
        torch.manual_seed(3)
        assert torch.equal(found.cuda(), torch.empty(7, length, dtype=dtype, device=device).normal_())


@pytest.mark.parametrize("on", LAUNCHERS)
def test_initial_values_are_drawn_on_the_gpu(on: str) -> None:
    """They are those of a model that is built there; with initial="host", those of one built on the host."""
    cell = Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3)
    before = torch.cuda.get_rng_state()
    for initial, device in (("device", "cuda"), ("host", "cpu")):
        asked = job(cell, initial=initial)
        with LAUNCHERS[on](compile(asked, device="cuda"), Options()) as run:
            found = run.state_dict()
        assert torch.equal(torch.cuda.get_rng_state(), before), "the generator is left as it was"
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(asked.seed)
            plain = asked.model()
        for name, value in plain.named_parameters():
            assert torch.equal(value.detach().cpu().to(found[name].dtype), found[name]), name
