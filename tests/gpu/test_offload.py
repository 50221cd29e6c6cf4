"""Activations on the host of a GPU: the numbers of a run that keeps them, and memory as planned."""

import pytest
import torch
from torch import Tensor

from piper.compiler import Program, compile
from piper.directives import offload, remat
from piper.errors import ConfigError
from piper.ir.select import at
from piper.run.launch import launch, launch_inline, launch_single_rank
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job, strategy
from tests.runtime.inline_workers import workers_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
CELLS = [
    Cell(case="decoder", schedule="gpipe", dp=2, zero=3, parts=6, clip=0.3),
    Cell(case="decoder", schedule="zbv", parts=6),
]


def left(program: Program, given: list[dict[str, Tensor]], options: Options) -> list[Tensor]:
    with launch_inline(program, options) as run:
        losses = [torch.tensor(run.step(batch).loss) for batch in given]
        return [*losses, *(value.cpu() for value in run.state_dict().values())]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_numbers_of_a_run_that_keeps_them(cell: Cell, again: bool) -> None:
    kept = [*strategy(cell), *([remat(at(), 1, across="PP")] if again else [])]
    away = compile(job(cell, strategy=[*kept, offload(at(), least_mb=0)]), device="cuda")
    assert any(ins.op == "fetch" for plan in away.plans for ins in plan.instrs)
    other = compile(job(cell, strategy=kept), device="cuda")
    for options in (Options(), Options(streams=False)):
        found = zip(
            left(away, batches(cell, 3), options), left(other, batches(cell, 3), options), strict=True
        )
        for one, two in found:
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)  # atomic sums round differently


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_optimizer_state_on_the_host(precision: str) -> None:
    cell = Cell(case="decoder", schedule="gpipe", dp=2, zero=2, parts=2, clip=0.3)
    kept = strategy(cell)
    away = job(cell, strategy=[*kept, offload(at(), what="optimizer")], precision=precision)
    other = job(cell, strategy=kept, precision=precision)
    programs = [compile(each, device="cuda") for each in (away, other)]
    found = [left(program, batches(cell, 3), Options()) for program in programs]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    with launch_inline(programs[0]) as run:
        run.step(batches(cell, 1)[0])
        for worker in workers_of(run).values():
            optimizer = worker.env.state.optimizer
            assert optimizer is not None
            tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
            assert tensors
            assert all(value.device.type == "cpu" and value.is_pinned() for value in tensors)


def test_one_rank_holds_at_least_as_much_less_as_the_plan_says() -> None:
    cell = Cell(case="decoder", schedule="gpipe", parts=8, rows=16)
    kept = strategy(cell)
    saved = []  # predicted and measured bytes without what is on the host
    for asked in (kept, [*kept, offload(at(), least_mb=0)]):
        program = compile(job(cell, strategy=asked), device="cuda")
        torch._C._cuda_clearCublasWorkspaces()  # each side makes its own
        before = torch.cuda.memory_allocated()
        with launch_single_rank(program, "rank:0") as run:
            for batch in batches(cell, 3):
                run.step(batch)
            held = run.peak()
            assert held.measured is not None
            saved.append((held.predicted, held.measured - before))
            pinned = [buffer for idle in run.worker.env.host_memory.idle.values() for buffer in idle]
            assert all(buffer.data.is_pinned() for buffer in pinned)
    assert pinned
    predicted, measured = (more - less for more, less in zip(*saved, strict=True))
    assert predicted > 2**20
    assert measured >= 0.8 * predicted  # what kernels that are not compiled hold meanwhile is not predicted


def test_graphs_are_refused() -> None:
    cell = CELLS[1]
    program = compile(job(cell, strategy=[*strategy(cell), offload(at(), least_mb=0)]), device="cuda")
    with (
        pytest.raises(ConfigError, match="offload: the host lends its memory"),
        launch(program, on="inline", graphs=True),
    ):
        pass
