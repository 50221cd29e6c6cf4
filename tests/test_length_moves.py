"""Strategies for several lengths that hold parameters differently: the state moves when a step switches."""

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import piper
from piper import at
from piper.check.check import check
from piper.checkpoint.move_state import Movement
from piper.checkpoint.moves import moving_plans, peak_while_moving
from piper.compiler import Program
from piper.directives import Directive
from piper.ir.dtypes import JobPrecision
from piper.plan.instr import Instr
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run import Run
from piper.runtime.context import Bound
from piper.runtime.device_state import DeviceState
from piper.runtime.worker import Options
from piper.workers.blame import Watcher
from piper.workers.inline import InlineWorkerGroup
from piper.workers.local import LocalWorkerGroup
from tests.checkpoint.test_optimizers_inside import Container, Joined
from tests.optimizers import Cooling, CountsApart, CountsInGroups, CountsInState, Recent, by_values
from tests.runtime.grid import adafactor, muon
from tests.test_length_strategies import DEVICES, compare, context, job, replicas, rows
from tests.workers.sabotage import BrokenError


def tensor(zero: int, ways: int) -> list[Directive]:
    weights = {"qkv": 0, "out": 1}
    return [*replicas(zero), piper.shard(at(), DEVICES, ways=ways, axis="TP", weights=weights)]


def stages(zero: int) -> list[Directive]:
    return [piper.replicate(at(LAYER=n), [2 * n, 2 * n + 1], zero=zero) for n in range(2)]


LAYOUTS: dict[str, dict[int, list[Directive]]] = {
    "zero 3 and 0": {4: replicas(3), 16: replicas(0)},
    "zero 3 and TP x zero 3": {4: replicas(3), 16: tensor(3, 2)},
    "zero 2 and TP": {4: replicas(2), 16: tensor(0, 4)},
    "zero 1 and CP x zero 3": {4: replicas(1), 16: context(3)},
    "TP2 and TP4": {4: tensor(3, 2), 16: tensor(1, 4)},
    "zero 3 in groups and stages": {4: [piper.replicate(at(), DEVICES, zero=3, within=2)], 16: stages(3)},
    "three layouts": {4: replicas(3), 8: tensor(3, 2), 16: context(0)},
}
MOST = LAYOUTS["zero 3 and TP x zero 3"]


def batches(steps: int) -> list[dict[str, Tensor]]:
    """The length changes in nearly every step, and every layout is left and entered."""
    sizes = [(8, 4), (4, 8), (4, 16), (8, 4), (4, 16)]
    return [rows(*sizes[7 * step % 5], step) for step in range(steps)]


@pytest.fixture(scope="module")
def program() -> Program:
    return piper.compile(job(batches(1), strategy=MOST))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_fifty_steps_that_move_the_state_equal_one_device(name: str) -> None:
    compare(piper.compile(job(batches(1), strategy=LAYOUTS[name])), batches(50))


@pytest.mark.slow
def test_processes_move_their_state_too(program: Program) -> None:
    compare(program, batches(50), on="local")


def test_every_step_has_the_gradients_of_one_device(program: Program) -> None:
    report = check(program, launch_inline, batches(4))
    assert report.ok, report


@pytest.mark.parametrize("narrow", [4, 16])
def test_fp8_in_one_of_two_strategies_has_the_numbers_of_one_device_that_rounds_alike(narrow: int) -> None:
    fp8 = [piper.precision(at(LAYER=0), "fp8")]
    strategy = {limit: [*given, *(fp8 if limit == narrow else ())] for limit, given in MOST.items()}
    report = check(piper.compile(job(batches(1), strategy=strategy)), launch_inline, batches(4))
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("make", [muon, adafactor])
def test_optimizers_that_need_whole_parameters_move_with_them(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> None:
    compare(piper.compile(job(batches(1), strategy=MOST, optimizer=make)), batches(6))


@pytest.mark.parametrize("make", [Cooling, CountsApart, CountsInGroups, CountsInState])
def test_what_an_optimizer_keeps_for_no_parameter_moves_too(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> None:
    compare(piper.compile(job(batches(1), strategy=MOST, optimizer=make)), batches(6))


@pytest.mark.parametrize("make", [Recent, by_values, Joined, Container])
def test_tensors_in_lists_and_groups_by_values_move_with_their_parameter(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> None:
    compare(piper.compile(job(batches(1), strategy=MOST, optimizer=make)), batches(6))


def everything(run: Run) -> dict[str, Tensor]:
    """Parameters, and what the optimizer keeps."""
    kept = {f"{key} {n}": v for key in ("exp_avg", "exp_avg_sq") for n, v in run.optimizer_state(key).items()}
    return kept | run.state_dict()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_move_there_and_back_changes_no_bit(precision: str) -> None:
    given = replace(job(batches(1), strategy=MOST), precision=cast(JobPrecision, precision))
    program = piper.compile(given)
    with piper.launch(program) as run:
        for batch in batches(3):
            run.step(batch)
        before = everything(run)
        run.evaluate([rows(4, 16)])  # in the other layout
        after = everything(run)
    assert len(before) == 3 * 9 and before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("taken", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_resumes_bit_for_bit_from_either_layout(program: Program, tmp_path: Path, taken: int) -> None:
    data = batches(6)
    with piper.launch(program) as run:
        for batch in data[:taken]:
            run.step(batch)
        run.save(tmp_path / "saved")
        wanted = [run.step(batch).loss for batch in data[taken:]]
    with piper.launch(program, resume=tmp_path / "saved") as run:
        assert [run.step(batch).loss for batch in data[taken:]] == wanted


def test_a_lost_worker_is_replaced_in_either_layout(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, watch = batches(6), Watcher.watch
    breaks = {2: 3, 3: 1}  # the device that fails, by steps: the third has long rows, the fourth short ones

    def watched(self: Watcher, place: int, ins: Instr, run: Bound) -> Bound:
        def act() -> None:
            if ins.op == "update" and breaks.get(len(losses)) == self.device:
                del breaks[len(losses)]
                raise BrokenError("lost")
            run()

        return watch(self, place, ins, act)

    with piper.launch(program) as run:
        wanted = [run.step(batch).loss for batch in data]
        state = run.state_dict()
    monkeypatch.setattr(Watcher, "watch", watched)
    losses: list[float] = []
    with recovering(program, "inline", Options(), retries=4) as run:
        for batch in data:
            losses.append(run.step(batch).loss)
        assert losses == wanted and not breaks
        assert all(torch.equal(value, state[name]) for name, value in run.state_dict().items())


def test_a_run_that_copies_its_state_after_every_step_moves_it_only_for_another_layout(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved: list[int] = []
    run_move = Movement.run

    def counted(self: Movement) -> None:
        moved.append(self.me)
        run_move(self)

    monkeypatch.setattr(Movement, "run", counted)
    data = [rows(4, length, seed) for seed, length in enumerate((4, 16, 16, 16, 4))]
    with recovering(program, "inline", Options(), retries=1) as run:
        for batch in data[:4]:
            run.step(batch)
        run.save(tmp_path / "saved")
        assert sorted(moved) == [*DEVICES]
        run.step(data[4])
        assert sorted(moved) == sorted([*DEVICES] * 2)


def bytes_held(*states: DeviceState) -> int:
    """What a device has in several layouts, counted from the memory itself."""
    tensors = [holding.flat for state in states for holding in state.holdings.values()]
    for state in states:
        kept = state.optimizer.state.values() if state.optimizer is not None else ()
        tensors += [value for each in kept for value in each.values() if value.dim()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def held_now(run: Run) -> dict[int, int]:
    """What each device has in the layout of the last step."""
    workers = cast(InlineWorkerGroup, run.session.group).workers
    return {device: bytes_held(worker.holder) for device, worker in workers.items()}


@pytest.mark.parametrize("name", ["zero 3 and TP x zero 3", "zero 3 in groups and stages"])
def test_the_memory_of_a_move_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = piper.compile(job(batches(1), strategy=LAYOUTS[name]))
    other = program.shaped(rows(4, 16))
    state_bytes = program.work.settings.state_bytes
    most, pairs = dict[int, int](), ((program, other), (other, program))
    move = Movement.move

    def watched(self: Movement, *given: Any) -> None:  # noqa: ANN401
        move(self, *given)
        most[self.me] = max(most.get(self.me, 0), bytes_held(self.before, self.after))

    monkeypatch.setattr(Movement, "move", watched)
    with piper.launch(program) as run:
        for (before, after), length in zip(pairs, (16, 4), strict=True):
            run.step(rows(4, 20 - length))
            most.clear()
            first = held_now(run)
            run.step(rows(4, length))
            both = sum(first.values()) + sum(held_now(run).values())
            assert sum(most.values()) < both  # what has moved is given up
            buckets = before.plans.buckets, after.plans.buckets
            moved = moving_plans(*buckets, (*DEVICES,), state_bytes).plans[0].instrs
            exchanged = 2 * max(ins.nbytes for ins in moved)
            peak = peak_while_moving(before.plans, after.plans, state_bytes)
            assert peak - exchanged <= 1.02 * max(most.values()) and max(most.values()) <= peak


def test_a_length_that_no_step_had_is_evaluated_with_its_strategy(caplog: pytest.LogCaptureFixture) -> None:
    program = piper.compile(job(batches(1), strategy=MOST))
    with piper.launch(program) as run:
        alone = run.evaluate([rows(1, 16)]).loss  # one sample cannot be sliced for two replicas
        assert not program.shapes and "Batches up to 16 are evaluated with the first strategy" in caplog.text
    with piper.launch(program) as run:
        assert run.evaluate([rows(4, 16)]).loss > 0
        (other,) = program.shapes.values()
        assert [directive.verb for directive in other.graph.directives] == ["replicate", "shard"]
        assert run.evaluate([rows(1, 16)]).loss == pytest.approx(alone, abs=1e-12)


def test_one_rank_alone_moves_its_part(program: Program) -> None:
    with piper.launch(program, on="rank:1") as run:
        for batch in batches(3):
            run.step(batch)


@pytest.mark.slow
def test_a_killed_process_is_replaced_in_either_layout(program: Program) -> None:
    data = batches(8)
    with piper.launch(program) as run:
        wanted = [run.step(batch).loss for batch in data]
        state = run.state_dict()
    losses: list[float] = []
    with recovering(program, "local", Options(), retries=3) as run:
        for number, batch in enumerate(data):
            if number in (3, 6):
                os.kill(cast(LocalWorkerGroup, run.session.group).processes[number % 4], signal.SIGKILL)
            losses.append(run.step(batch).loss)
        assert losses == wanted
        assert all(torch.equal(value, state[name]) for name, value in run.state_dict().items())
