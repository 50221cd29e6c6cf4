"""Experts with clones on other devices have the numbers of plain PyTorch, wherever their rows are computed."""

from dataclasses import replace

import pytest
import torch

import piper
from piper import Directive, at, replicate, shard, split
from piper.errors import ScheduleError
from piper.plan.expert_table import first_table
from piper.plan.text import read_plans, show_plans
from piper.proof.values import value_problems
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import plain
from tests.runtime.moving import PlainMixture, adam, batches, cloned, loss, program

MICROBATCHES = split(at(), axis="MB", parts=2)
STAGES = [
    replicate(at(PP=0), devices=[0, 1], zero=2),
    replicate(at(PP=1), devices=[2, 3], zero=2),
    shard(at(PP=0, EP="*"), devices=[0, 1], clones=1),
    shard(at(PP=1, EP="*"), devices=[2, 3], clones=3),
    MICROBATCHES,
    *piper.schedules.one_f_one_b(stages=2, microbatches=2),
]
STRATEGIES: dict[str, list[Directive]] = {
    "over all devices": cloned(),
    "as many clones as experts of others": cloned(clones=6),
    "two groups": cloned(ways=2, clones=1),
    "ZeRO-1, two groups": cloned(ways=2, zero=1),
    "ZeRO-2, microbatches": [*cloned(ways=2, zero=2), MICROBATCHES],
    "ZeRO-3, microbatches": [*cloned(ways=2, zero=3), MICROBATCHES],
    "remat": [*cloned(), MICROBATCHES, piper.remat(at(), 0.3)],
    "remat of regions": [*cloned(), MICROBATCHES, piper.remat(at(), 0, across="PP")],
    "1F1B": STAGES,
    "offloaded state": [*cloned(), piper.offload(at(), what="optimizer")],
}


@pytest.fixture(scope="module")
def wanted() -> plain.Trained:
    return plain.train(PlainMixture, loss, batches(3), optimizer=adam)


@pytest.mark.parametrize("name", STRATEGIES)
def test_clones_have_the_numbers_of_one_device(name: str, wanted: plain.Trained) -> None:
    with launch_inline(program(STRATEGIES[name]), Options(keep_gradients=True)) as run:
        losses = [run.step(batches(3)[0]).loss]
        gradients = run.gradients()
        losses += [run.step(batch).loss for batch in batches(3)[1:]]
        state = run.state_dict()
    assert losses == pytest.approx(wanted.losses, abs=1e-12)
    assert plain.largest_difference(wanted.gradients, gradients) < 1e-12
    assert plain.largest_difference(wanted.state, state) < 1e-12


def test_a_plan_with_clones_reads_back() -> None:
    plans = program(cloned()).plans
    assert read_plans(show_plans(plans)) == plans
    assert {bucket.clones for bucket in plans.buckets.values()} == {0, 2}


def test_the_first_table_gives_each_copy_the_same_share() -> None:
    table = first_table(4, own=2, clones=1)
    assert table.experts == ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 0))
    assert table.loads([4] * 8) == [8.0] * 4
    assert table.skew([12, 0, 0, 0, 0, 0, 0, 0]) == 2.0  # half of them on two of four devices


def test_a_plan_with_other_clones_than_asked_is_not_proven() -> None:
    compiled = program(cloned())
    name, bucket = next((name, b) for name, b in compiled.plans.buckets.items() if b.clones)
    more = {**compiled.plans.buckets, name: replace(bucket, clones=3)}
    problems = list(value_problems(replace(compiled.plans, buckets=more), compiled.graph))
    assert problems == [f"{name} has room for 3 clones; its chunks ask for another number"]


def test_a_plan_in_which_the_gradient_of_clones_does_not_come_back_is_not_proven() -> None:
    compiled = program(cloned())
    (plan,) = compiled.plans.plans
    kept = tuple(ins for ins in plan.instrs if ins.op != "reduce_scatter")
    lost = replace(compiled.plans, plans=(replace(plan, instrs=kept),))
    problems = list(value_problems(lost, compiled.graph))
    assert any("grad_shard" in problem for problem in problems)


def test_clones_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ScheduleError, match="a device cannot have 7 clones of these experts"):
        program(cloned(clones=7))
    with pytest.raises(ScheduleError, match="these experts cannot be cloned on other devices"):
        program([replicate(at(), devices=range(4), zero=3, within=2), *cloned(ways=2)[1:]])


def test_memory_of_a_step_counts_clones() -> None:
    with_clones, without = (
        program([replicate(at(), range(4)), shard(at(EP="*"), range(4), clones=n)]).plans for n in (2, 0)
    )
    expert = torch.float64.itemsize * 2 * 6 * 5
    gathered = next(ins for ins in with_clones.plans[0].instrs if ins.op == "gather")
    assert gathered.nbytes == 2 * expert
    assert with_clones.plans[0].slots[gathered.writes[0]].nbytes == (2 + 2) * expert
    assert not any(ins.op == "gather" for ins in without.plans[0].instrs)
