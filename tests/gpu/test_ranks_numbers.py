"""Whole jobs on up to four ranks of one GPU that use NCCL: the numbers of plain PyTorch on one device, in float64."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piper.capture.precision.fp8 import CAPABLE
from piper.check.check import check, numbers
from piper.check.reference import Reference
from piper.compiler import Program, compile
from piper.directives import replicate, shard, split
from piper.directives.shard import Shard
from piper.ir.select import at
from piper.job import Job
from piper.runtime.worker import Options
from piper.workers.transport.fork_server import ForkServer
from tests import plain
from tests.gpu.rank_trials import MOST, TRIALS, Trial, momentum
from tests.gpu.ranks import DEVICE, MARKS, ON_GPU, launch_ranks
from tests.runtime.grid import Cell, batches, case_of, job
from tests.runtime.grid import strategy as strategy_of

pytestmark = [*MARKS, pytest.mark.timeout(300)]
GROUPED = [pytest.param(trial, id=str(trial), marks=pytest.mark.xdist_group(trial.group)) for trial in TRIALS]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("trial", GROUPED)
def test_the_numbers_of_one_device(trial: Trial, forks: ForkServer, cache: Path) -> None:
    if ON_GPU and trial.group == "fp8" and torch.cuda.get_device_capability() < CAPABLE:
        pytest.skip("this GPU has no fp8")
    program = compile(trial.job(), device=DEVICE, compile=trial.compiled, cache=cache)
    assert 1 < len(program.plans.devices) <= MOST
    report = check(
        program, partial(launch_ranks, forks=forks), trial.batches(), trial.tol, options=trial.options
    )
    assert report.ok, report


GRAPHS = [
    Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, parts=4, clip=0.3, bucket_mb=0.02),
    Cell(case="decoder", schedule="zero-bubble", dp=2, zero=1, clip=0.3),
    Cell(case="decoder", schedule="zbv", dp=1, parts=4),
]


def power_of_two(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """A rate that single precision holds as it is: graphs keep it so."""
    return torch.optim.SGD(params, lr=2**-5, momentum=0.5)


@pytest.mark.xdist_group("graphs")
@pytest.mark.parametrize("cell", GRAPHS, ids=str)
def test_graphs(cell: Cell, forks: ForkServer) -> None:
    program, given = compile(job(cell, optimizer=power_of_two), device=DEVICE), batches(cell, 6)
    with launch_ranks(program, Options(graphs=ON_GPU), forks) as run:
        losses = [run.step(batch).loss for batch in given]
        state = run.state_dict()
    assert_close_to_plain(program, given, losses, state)


@pytest.mark.xdist_group("graphs")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("room", [1.0, 0.6])
def test_graphs_of_experts_over_several_devices(stages: int, room: float, forks: ForkServer) -> None:
    """Rows in blocks, which they exceed if there is less room: the bits of steps that are issued one by one."""
    cell = Cell(case="moe", schedule="1f1b", dp=2, zero=2, ways=2, rows=2)
    whole = [replicate(at(), range(4), zero=3), shard(at(EP="*"), range(4)), split(at(), parts=2)]
    strategy = [
        replace(each, capacity=room * len(each.devices)) if isinstance(each, Shard) else each
        for each in (whole if stages == 1 else strategy_of(cell))
    ]
    asked = job(cell, strategy=strategy, optimizer=power_of_two, precision="bf16", initial="host")
    program, given = compile(asked, device=DEVICE), batches(cell, 10)
    assert len(program.plans.devices) == MOST
    found = []
    for options in (Options(), Options(graphs=ON_GPU)):
        with launch_ranks(program, options, forks) as run:
            found.append(([run.step(batch) for batch in given], run.state_dict()))
    assert found[0][0] == found[1][0]
    assert [name for name, value in found[0][1].items() if not torch.equal(value, found[1][1][name])] == []
    repeated = [result.repeated for result in found[0][0]]
    assert any(repeated) == (room < 1)


def assert_close_to_plain(
    program: Program, given: list[dict[str, Tensor]], losses: list[float], state: dict[str, Tensor]
) -> None:
    """Compare losses and the last state with those of plain PyTorch on one device."""
    wanted = list(numbers(Reference(program), given))
    assert losses == pytest.approx([each.loss for each in wanted], rel=1e-9)
    assert state.keys() == wanted[-1].state.keys()
    for name, value in wanted[-1].state.items():
        off = (state[name] - value.cpu()).abs()
        assert bool((off <= 1e-10 + 1e-8 * value.cpu().abs()).all()), (
            f"{name} is off by up to {off.max():.3g}"
        )


@pytest.mark.xdist_group("train")
@pytest.mark.parametrize(
    ("cell", "other"),
    [
        (
            Cell(case="mlp", schedule="1f1b", dp=2, zero=3, clip=0.3),
            Cell(case="mlp", schedule="zero-bubble", dp=1, parts=4, clip=0.3),
        ),
        (
            Cell(case="sum_weight", schedule="dualpipe-v", dp=1, parts=4),
            Cell(case="sum_weight", schedule="dualpipe-v", dp=2, zero=2, parts=4, rows=1),
        ),
    ],
    ids=str,
)
def test_training_and_resuming_under_another_layout(
    cell: Cell, other: Cell, forks: ForkServer, tmp_path: Path
) -> None:
    """`run.train` on the job's own data, a checkpoint on the way, and the rest on other ranks."""
    given = batches(cell, 6)
    asked = partial(job, data=lambda: given, steps=6, optimizer=momentum)
    whole = compile(asked(cell), device=DEVICE)
    with launch_ranks(whole, Options(), forks) as run:
        losses = [result.loss for result in run.train(3)]
        run.save(tmp_path / "step-3")
    program = compile(asked(other), device=DEVICE)
    with launch_ranks(program, Options(blank=True), forks) as run:
        assert run.load(tmp_path / "step-3").step == 3
        losses += [result.loss for result in run.train()]
        assert run.done == 6
        state = run.state_dict()
    assert_close_to_plain(whole, given, losses, state)


def evaluated(asked: Job, state: dict[str, Tensor], given: list[dict[str, Tensor]]) -> float:
    """Return the mean loss of a model in eval mode, in plain PyTorch on the host."""
    model: nn.Module = asked.model().double()
    model.load_state_dict(state)
    model.eval()
    losses, weights = [], []
    with torch.no_grad():
        for batch in given:
            double = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            result = asked.loss(model, double)
            pair = result if isinstance(result, tuple) else (result * len(double["x"]), len(double["x"]))
            losses.append(float(pair[0]))  # type: ignore[arg-type]
            weights.append(float(pair[1]))  # type: ignore[arg-type]
    return sum(losses) / sum(weights)


@pytest.mark.xdist_group("train")
@pytest.mark.parametrize(
    "cell",
    [
        Cell(case="dropout", schedule="zero-bubble", dp=2, zero=3),
        Cell(case="convnet", schedule="1f1b", dp=2, zero=1),
    ],
    ids=str,
)
def test_evaluation_between_steps(cell: Cell, forks: ForkServer) -> None:
    asked = job(cell)
    program = compile(asked, device=DEVICE)
    first, second, *held_out = batches(cell, 4)
    with launch_ranks(program, Options(), forks) as run:
        run.step(first)
        before = run.evaluate(held_out).loss
        assert before == pytest.approx(evaluated(asked, run.state_dict(), held_out), rel=1e-9)
        run.step(second)
        after = run.evaluate(held_out).loss
        assert after == pytest.approx(evaluated(asked, run.state_dict(), held_out), rel=1e-9)
    assert before != after


@pytest.mark.xdist_group("train")
def test_a_job_that_shares_no_code_with_its_check(forks: ForkServer) -> None:
    """The first gradients, losses and last state of a plain loop on the host."""
    cell = Cell(case="mlp", schedule="1f1b", dp=2, zero=3)
    case, given = case_of(cell), batches(cell, 3)
    program = compile(job(cell, optimizer=plain.sgd, initial="host"), device=DEVICE)
    wanted = plain.train(case.model, case.loss, given)
    with launch_ranks(program, Options(keep_gradients=True), forks) as run:
        losses = [run.step(given[0]).loss]
        gradients = run.gradients()
        losses += [run.step(batch).loss for batch in given[1:]]
        state = run.state_dict()
    assert losses == pytest.approx(wanted.losses, rel=1e-10)
    gradients = {name: value.cpu() for name, value in gradients.items()}
    assert plain.largest_difference(wanted.gradients, gradients) < 1e-10
    assert plain.largest_difference(wanted.state, state) < 1e-10
