"""Rows that travel to experts in blocks of a fixed size have the numbers of plain PyTorch, however they are routed."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import piper
from piper import Directive, at, replicate, shard, split
from piper.check.check import check
from piper.compiler import Program, compile
from piper.directives import Shard
from piper.errors import ScheduleError, WorkerError
from piper.plan.instr import Instr
from piper.plan.ops import Routing
from piper.plan.text import read_plans, show_plans
from piper.proof.values import value_problems
from piper.run.launch import launch, launch_inline
from piper.runtime.expert_exchange import _sorted_places
from piper.runtime.worker import Options
from tests import plain
from tests.runtime import divided, moving
from tests.runtime.inline_workers import workers_of
from tests.runtime.memory_meter import measured, meter_of, planned_bytes
from tests.runtime.moving import WIDTH, loss

Optimize = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
STEPS, ROWS = 10, 128
MICROBATCHES = split(at(), axis="MB", parts=2)


class Mixture(moving.Mixture):
    """The same, less skewed, with a buffer in which each microbatch is counted."""

    def __init__(self) -> None:
        super().__init__()
        flatten(self)
        self.register_buffer("seen", torch.zeros(1))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            self.seen.add_(1)
            x = self.layers[0](x)
        with piper.annotate("PP"):
            x = self.layers[1](x)
        return x


class PlainMixture(moving.PlainMixture):
    def __init__(self) -> None:
        super().__init__()
        flatten(self)


def flatten(model: torch.nn.Module) -> None:
    """Let rows go to all experts."""
    for layer in cast(Iterable[moving.Layer], model.layers):
        layer.router.bias.data.zero_()
        layer.router.weight.data.mul_(8)


def batches(steps: int = STEPS) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(7)
    return [{"x": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=rng)} for _ in range(steps)]


class Clipped(torch.optim.Adam):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.3)
        super().step(closure)


def clipped(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return Clipped(params, lr=0.02)


def program(strategy: list[Directive], optimizer: Optimize = moving.adam) -> Program:
    return moving.program(strategy, optimizer, model=Mixture, clip_norm=0.3, data=batches)


def blocks(capacity: float, ways: int = 4, zero: int = 0) -> list[Directive]:
    return [
        replicate(at(), devices=range(4), zero=zero),
        shard(at(EP="*"), devices=range(4), ways=ways, capacity=capacity),
    ]


STAGES = [
    replicate(at(PP=0), devices=[0, 1], zero=2),
    replicate(at(PP=1), devices=[2, 3], zero=2),
    shard(at(PP=0, EP="*"), devices=[0, 1], capacity=1.6),
    shard(at(PP=1, EP="*"), devices=[2, 3], capacity=2),
    MICROBATCHES,
    *piper.schedules.one_f_one_b(stages=2, microbatches=2),
]
STRATEGIES: dict[str, list[Directive]] = {
    "room for any routing": [*blocks(4), MICROBATCHES],
    "ZeRO-1, two groups": [*blocks(1.6, ways=2, zero=1), MICROBATCHES],
    "ZeRO-3, remat": [*blocks(3, zero=3), MICROBATCHES, piper.remat(at(), 0.3)],
    "1F1B, ZeRO-2": STAGES,
    "recomputed, zero bubble": [
        *STAGES[:5], piper.remat(at(), 0), *piper.schedules.zero_bubble(stages=2, microbatches=2),
    ],
    "activations on the host": [*blocks(3, zero=2), MICROBATCHES, piper.offload(at(), what="activations")],
    "kept for the step, in another order": [
        replicate(at(), devices=[3, 1, 0, 2], zero=3, keep="step"),
        shard(at(EP="*"), devices=[3, 1, 0, 2], ways=2, capacity=1.6), MICROBATCHES,
    ],
    "protected, state on the host": [
        *blocks(2.5), MICROBATCHES, piper.protect(at(), copies=1, apart="device"),
        piper.offload(at(), what="optimizer"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def wanted() -> plain.Trained:
    return plain.train(PlainMixture, loss, batches(), optimizer=clipped)


def assert_trained(run: piper.Run, losses: list[float], wanted: plain.Trained) -> None:
    assert losses == pytest.approx(wanted.losses, abs=1e-12)
    state = run.state_dict()
    assert float(state.pop("seen")) == 2 * STEPS
    assert plain.largest_difference(wanted.state, state) < 1e-12


@pytest.mark.parametrize("name", STRATEGIES)
def test_blocks_have_the_numbers_of_one_device(name: str, wanted: plain.Trained) -> None:
    with launch_inline(program(STRATEGIES[name])) as run:
        results = [run.step(batch) for batch in batches()]
        assert_trained(run, [result.loss for result in results], wanted)
    repeated = [result.repeated for result in results]
    assert any(repeated) == (name != "room for any routing")
    assert not all(repeated)


def test_rows_that_exceed_their_blocks_are_evaluated_and_saved_as_on_one_device(
    tmp_path: Path, wanted: plain.Trained
) -> None:
    given = batches()
    with launch(program([*blocks(1, zero=3), MICROBATCHES]), on="local") as run:
        losses = [run.step(batch).loss for batch in given[:5]]
        evaluated = run.evaluate([given[5]]).loss
        run.save(tmp_path / "checkpoint")
    with launch_inline(program([*blocks(2, ways=2), MICROBATCHES])) as run:
        run.load(tmp_path / "checkpoint")
        results = [run.step(batch) for batch in given[5:]]
        assert results[0].loss == pytest.approx(evaluated, abs=1e-12)
        assert_trained(run, [*losses, *(result.loss for result in results)], wanted)


@pytest.mark.parametrize("name", ["tp2ep2", "sp2ep4", "cp2ep4"])
@pytest.mark.parametrize("tight", [True, False])
def test_blocks_beside_other_axes_have_the_numbers_of_one_device(name: str, tight: bool) -> None:
    made = divided.job("moe", name)
    *others, experts = cast(list[Directive], made.strategy)
    assert isinstance(experts, Shard)
    capacity = 1 if tight else experts.ways
    report = check(
        compile(replace(made, strategy=[*others, replace(experts, capacity=capacity)])),
        launch_inline,
        divided.batches(),
        tol=1e-9,
    )
    assert report.ok, report


def test_groups_that_train_apart_have_the_same_numbers_in_blocks_for_any_rows() -> None:
    def trained(capacity: float | None) -> dict[str, Tensor]:
        strategy = [
            replicate(at(), range(4)), shard(at(EP="*"), range(4), ways=2, capacity=capacity),
            piper.average(at(), across=[0, 2], every=2),
        ]  # fmt: skip
        with launch_inline(program(strategy)) as run:
            for batch in batches(3):
                run.step(batch)
            return run.state_dict()

    assert plain.largest_difference(trained(None), trained(2)) < 1e-12


def test_gradients_are_those_of_the_step_that_was_run_again(wanted: plain.Trained) -> None:
    with launch_inline(program([*blocks(1), MICROBATCHES]), Options(keep_gradients=True)) as run:
        assert run.step(batches(1)[0]).repeated
        assert plain.largest_difference(wanted.gradients, run.gradients()) < 1e-12


def test_a_plan_knows_the_sizes_of_blocks() -> None:
    def exchanges(capacity: float | None) -> list[Instr]:
        strategy = [replicate(at(), range(4)), shard(at(EP="*"), range(4), capacity=capacity), MICROBATCHES]
        plans = program(strategy).plans
        assert read_plans(show_plans(plans)) == plans
        rows = {slot: held.nbytes for slot, held in plans.plans[0].slots.items()}
        found = [ins for ins in plans.plans[0].instrs if ins.op == "exchange"]
        outward = {rows[ins.writes[0]] for ins in found if cast(Routing, ins.payload).outward}
        assert outward == {(2 if capacity else 1) * row * 16}
        return found

    row = WIDTH * 8
    assert {ins.nbytes for ins in exchanges(None)} == {row * 12}  # 12 of 16 rows leave, if they leave evenly
    fixed = exchanges(2)
    assert {ins.nbytes for ins in fixed} == {row * 24}  # three blocks of 8 rows
    assert {ins.workspace for ins in fixed} == {2 * row * 32}  # rows before they leave, and as they arrive
    assert {(ins.payload.rows, ins.payload.block) for ins in fixed} == {(16, 8)}  # type: ignore[union-attr]


@pytest.mark.parametrize("capacity", [4, 3])
def test_a_plan_predicts_the_memory_of_each_instruction(capacity: float) -> None:
    with measured(), launch_inline(program([*blocks(capacity), MICROBATCHES])) as run:
        assert not run.step(batches(1)[0]).repeated
        for worker in workers_of(run).values():
            assert meter_of(worker).live == planned_bytes(worker)


def test_a_plan_in_which_an_overflow_goes_unseen_is_not_proven() -> None:
    compiled = program(blocks(2))
    (plan,) = compiled.plans.plans

    def problems(op: str, kind: str) -> list[str]:
        instrs = tuple(
            replace(ins, reads=tuple(slot for slot in ins.reads if slot.kind != kind))
            if ins.op == op
            else ins
            for ins in plan.instrs
        )
        changed = replace(compiled.plans, plans=(replace(plan, instrs=instrs),))
        return list(value_problems(changed, compiled.graph))

    assert len([problem for problem in problems("norm", "term") if "leaves out" in problem]) == 2
    assert any("does not read the sums" in problem for problem in problems("update", "total"))


@pytest.mark.parametrize("capacity", [0.9, 4.1, True, "2"])
def test_a_capacity_that_makes_no_sense_is_refused(capacity: float) -> None:
    with pytest.raises(ScheduleError, match=f"blocks of rows cannot have room for {capacity!r} even shares"):
        program(blocks(capacity))


class Miscounting(moving.Mixture):
    """The first layer counts one row too few."""

    def forward(self, x: Tensor) -> Tensor:
        layer = cast(moving.Layer, self.layers[0])
        with piper.annotate("PP"):
            counts = (
                torch.full((moving.EXPERTS,), len(x) // moving.EXPERTS)
                - (torch.arange(moving.EXPERTS) < 1).int()
            )
            with piper.annotate("EP"):
                rows, received = piper.route(layer.dense(x), counts)
                hidden = piper.grouped_mm(rows, layer.up, received)
                return piper.unroute(piper.grouped_mm(hidden, layer.down, received), received, len(x))


@pytest.mark.parametrize(("capacity", "why"), [(2, "split_sizes"), (4, "counts of a route do not add up")])
def test_counts_that_leave_rows_out_are_refused_as_without_blocks(capacity: float, why: str) -> None:
    miscounts = moving.program(blocks(capacity), model=Miscounting, data=batches)
    with launch_inline(miscounts) as run, pytest.raises(WorkerError, match=why):
        run.step(batches(1)[0])


class Poles(torch.nn.Module):
    """Experts that give infinity for rows of the other half of the experts. Every second expert has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Parameter(torch.randn(moving.EXPERTS, WIDTH, WIDTH))
        self.sign = torch.nn.Parameter(torch.ones(moving.EXPERTS, 1))
        self.sign.data[moving.EXPERTS // 2 :] = -1

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            chosen = 4 * (x[:, 0] > 0.3) + 2 * (x[:, 1] > 0.3)
            x, order = self.dense(x), chosen.argsort(stable=True)
            half = torch.where(chosen < moving.EXPERTS // 2, 1.0, -1.0).to(x)
            rows = torch.cat([x, half[:, None]], 1)[order]
            counts = torch.zeros(moving.EXPERTS, dtype=torch.int64)
            counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
            return self.routed(rows, counts, chosen[order])[order.argsort()]

    def routed(self, rows: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
        with piper.annotate("EP"):
            rows, mine = piper.route(rows, counts)
            up = piper.grouped_mm(rows[:, :WIDTH].contiguous(), self.up, mine)
            sign = self.sign[torch.repeat_interleave(mine, output_size=rows.shape[0])]
            result: Tensor = piper.unroute(up / (rows[:, WIDTH:] * sign + 1), mine, len(chosen))
        return result


class PlainPoles(Poles):
    def routed(self, rows: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
        up = torch.einsum("nd,ndf->nf", rows[:, :WIDTH], self.up[chosen])
        return up / (rows[:, WIDTH:] * self.sign[chosen] + 1)


@pytest.mark.parametrize("capacity", [4, 3])
def test_rows_that_fill_blocks_give_no_infinity_that_sent_rows_do_not(capacity: float) -> None:
    given = batches(2)
    wanted = plain.train(PlainPoles, loss, given)
    with launch_inline(moving.program(blocks(capacity), plain.sgd, model=Poles, data=batches)) as run:
        results = [run.step(batch) for batch in given]
        assert not any(result.repeated for result in results)
        assert [result.loss for result in results] == pytest.approx(wanted.losses, abs=1e-9)
        assert plain.largest_difference(wanted.state, run.state_dict()) < 1e-9


def test_what_does_not_go_with_blocks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="blocks of rows cannot have room for 2 even shares"):
        program([*blocks(2)[:1], shard(at(EP="*"), range(4), capacity=2, clones=1)])
    apart = [
        replicate(at(), range(4)), shard(at(EP="*"), range(4), ways=2, capacity=1.5),
        piper.average(at(), across=[0, 2], every=2),
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match="groups that train apart cannot run a step again"):
        program(apart)


@given(
    taken=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=4),
    size=st.integers(1, 9),
)
@settings(max_examples=80, deadline=None)
def test_rows_that_arrive_are_sorted_by_expert_and_then_by_sender(taken: list[list[int]], size: int) -> None:
    target, counts, used = _sorted_places(torch.tensor(taken), torch.arange(size))
    labels = []
    for sender, rows in enumerate(taken):
        expert = [(e, sender) for e, count in enumerate(rows) for _ in range(count)][:size]
        labels += expert + [(3, sender)] * (size - len(expert))
    arranged: list[tuple[int, int]] = [(-1, -1)] * len(labels)
    for place, label in zip(target.tolist(), labels, strict=True):
        arranged[place] = label
    assert arranged == sorted(labels)
    numbers = [sum(expert == e for expert, _ in labels) for e in range(4)]
    last = max((e for e in range(3) if numbers[e]), default=0)
    assert counts.tolist() == [numbers[e] + (numbers[3] if e == last else 0) for e in range(3)]
    assert used == sum(numbers[:3])


class Repeated(Poles):
    """Repeats what belongs to experts by their counts of rows, which torch cannot trace."""

    def routed(self, rows: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
        with piper.annotate("EP"):
            rows, mine = piper.route(rows, counts)
            sign = self.sign.repeat_interleave(mine, dim=0)
            result: Tensor = piper.unroute(rows[:, :WIDTH] * sign, mine, len(chosen))
        return result


def test_a_parameter_repeated_by_the_rows_of_its_experts_says_what_to_write() -> None:
    with pytest.raises(piper.CaptureError) as caught:
        moving.program(blocks(4), plain.sgd, model=Repeated, data=batches)
    assert "test_expert_blocks.py:" in caught.value.by
    assert caught.value.hint == ("write w[torch.repeat_interleave(counts, output_size=rows.shape[0])]")
