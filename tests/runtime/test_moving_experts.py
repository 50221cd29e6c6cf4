"""Experts with clones on other devices have the numbers of plain PyTorch, wherever their rows are computed."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import piper
from piper import Directive, at, replicate, shard, split
from piper.compiler import Program
from piper.errors import ConfigError, ScheduleError
from piper.plan.expert_table import (
    NOTHING,
    ExpertTable,
    balanced_tables,
    first_table,
    fits,
    without_clones,
)
from piper.plan.text import read_plans, show_plans
from piper.proof.values import value_problems
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.runtime.expert_exchange import Division
from piper.runtime.worker import Options
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.routing import best_tables, routed_step
from piper.workers.local import LocalWorkerGroup
from tests import plain
from tests.runtime.moving import ROWS, Layer, PlainMixture, adam, batches, cloned, loss, program

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
    "protected state": [*cloned(), piper.protect(at(), copies=1, apart="device")],
    "several buckets": [replicate(at(), range(4), zero=3, bucket_mb=0.0001), *cloned()[1:]],
    "zero bubble": [*STAGES[:5], *piper.schedules.zero_bubble(stages=2, microbatches=2)],
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
    for clones in (7, 1.5, "1"):
        with pytest.raises(ScheduleError, match=f"a device cannot have {clones!r} clones of these experts"):
            program(cloned(clones=clones))  # type: ignore[arg-type]
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


def skewed_table(rows: Sequence[int]) -> ExpertTable:
    return list(balanced_tables(rows, 4, 2))[-1]


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_that_move_after_each_step_have_the_numbers_of_one_device(
    zero: int, wanted: plain.Trained
) -> None:
    tables = [
        first_table(4, 2, 2),
        without_clones(4, 2, 2),
        skewed_table([40, 9, 3, 3, 2, 2, 2, 3]),
        ExpertTable(  # the first expert is computed by all devices but its owner
            experts=((0, 1, 7, -1), (2, 3, 0, 4), (4, 5, 0, -1), (6, 7, 3, 0)),
            shares=((0, 5, 3, 0), (1, 1, 2, 1), (1, 1, 7, 0), (1, 1, 3, 4)),
        ),
    ]
    losses = []
    with launch_inline(program([*cloned(zero=zero), MICROBATCHES])) as run:
        regions = list(run.program.plans.cloned)
        for number, batch in enumerate(batches(3)):
            run.move_experts({regions[0]: tables[number], regions[1]: tables[number + 1]})
            losses.append(run.step(batch).loss)
            assert [sum(rows) for rows in run.routed.values()] == [ROWS, ROWS]
        state = run.state_dict()
    assert losses == pytest.approx(wanted.losses, abs=1e-12)
    assert plain.largest_difference(wanted.state, state) < 1e-12


def test_rows_are_counted_by_expert() -> None:
    layer = plain_layer()
    chosen = layer.router(layer.dense(batches(1)[0]["x"])).argmax(-1)
    for ways in (4, 2):
        with launch_inline(program(cloned(ways=ways))) as run:
            run.step(batches(1)[0])
            assert list(next(iter(run.routed.values()))) == torch.bincount(chosen, minlength=8).tolist()


def plain_layer() -> Layer:
    torch.manual_seed(0)
    layer = PlainMixture().double().layers[0]
    assert isinstance(layer, Layer)
    return layer


@given(rows=st.lists(st.integers(0, 500), min_size=8, max_size=8), clones=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_each_further_clone_makes_the_busiest_device_less_busy(rows: list[int], clones: int) -> None:
    busiest = []
    for table in balanced_tables(rows, 4, clones):
        assert fits(table, 4, 2, clones)
        assert sum(table.loads(rows)) == pytest.approx(sum(rows))
        busiest.append(max(table.loads(rows)))
    assert all(after <= before + 1e-9 for before, after in pairwise(busiest))


@given(counts=st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_rows_of_an_expert_are_divided_among_its_copies(counts: list[list[int]]) -> None:
    table = skewed_table([sum(each) for each in zip(*counts, strict=True)])
    given_to = Division.of(table, torch.device("cpu")).rows(torch.tensor(counts)).view(4, 4, 4).tolist()
    for expert, copies in table.copies().items():
        for sender in range(4):
            assert sum(given_to[sender][place][slot] for place, slot in copies) == counts[sender][expert]
    unused = [(p, s) for p, row in enumerate(table.experts) for s, e in enumerate(row) if e == NOTHING]
    assert all(given_to[sender][place][slot] == 0 for sender in range(4) for place, slot in unused)


@pytest.mark.parametrize(
    "table",
    [
        first_table(4, 2, 1),
        ExpertTable(experts=((0, 1, 1, -1),) * 4, shares=((1, 1, 1, 0),) * 4),
        replace(without_clones(4, 2, 2), shares=((0, 1, 0, 0),) * 4),
        replace(without_clones(4, 2, 2), shares=((1, 1, 1, 0),) * 4),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: ExpertTable) -> None:
    with launch_inline(program(cloned())) as run:
        with pytest.raises(ConfigError, match="the table of experts does not fit its region"):
            run.move_experts({next(iter(run.program.plans.cloned)): table})
        with pytest.raises(ConfigError, match="'elsewhere' has no experts that could move"):
            run.move_experts({"elsewhere": first_table(4, 2, 2)})


def test_a_clock_moves_hot_experts_and_joins_them_when_they_are_cold() -> None:
    with launch_inline(program(cloned())) as run:
        assert run.balance_experts() == 1.0  # nothing is counted yet
        run.step(batches(1)[0])
        first, second = run.program.plans.cloned
        hot, even = [900, 20, 20, 20, 20, 20, 0, 0], [125] * 8
        assert run.balance_experts("h100", {first: hot, second: even}, least=-1.0) > 1.0
        places = run.expert_places()
        assert sum(row.count(0) for row in places[first][0]) > 1  # the hot expert has copies
        assert [row[2:] for row in places[second][0]] == [[NOTHING, NOTHING]] * 4
        run.balance_experts("h100", {first: even, second: even}, least=-1.0)
        assert [row[2:] for row in run.expert_places()[first][0]] == [[NOTHING, NOTHING]] * 4


def test_the_busiest_device_and_clones_take_time_on_the_clock() -> None:
    compiled = program(cloned())
    plans, outline, costs = compiled.plans, compiled.outline, Roofline(load_cluster("cpu"))
    rows = {region: [700, 50, 50, 50, 50, 50, 25, 25] for region in plans.cloned}
    even = {region: [125] * 8 for region in plans.cloned}

    def seconds(rows: dict[str, list[int]], table: ExpertTable) -> float:
        return routed_step(plans, outline, costs, rows, dict.fromkeys(plans.cloned, table)).seconds

    none, some = without_clones(4, 2, 2), first_table(4, 2, 2)
    assert seconds(even, none) < seconds(rows, none)
    assert seconds(even, none) < seconds(even, some)
    assert best_tables(plans, outline, costs, even).seconds == seconds(even, none)


def test_a_resumed_run_computes_experts_where_it_did_to_the_last_bit(tmp_path: Path) -> None:
    def moved() -> Program:
        callbacks = [piper.callbacks.MoveExperts(every=2, costs="cpu", least=-1.0)]
        return program([*cloned(zero=3), MICROBATCHES], callbacks=callbacks, steps=4)

    with launch_inline(moved()) as run:
        losses = [result.loss for result in run.train(3)]
        places = run.expert_places()
        assert places
        run.save(tmp_path / "checkpoint")
        losses += [result.loss for result in run.train(1)]
        state = run.state_dict()
    with launch_inline(moved()) as run:
        run.load(tmp_path / "checkpoint")
        assert run.expert_places() == places
        assert [result.loss for result in run.train(1)] == losses[3:]
        for name, value in run.state_dict().items():
            assert torch.equal(value, state[name])
    with launch_inline(program([replicate(at(), devices=[0, 1])])) as run:  # any other layout loads it
        run.load(tmp_path / "checkpoint")
        assert [result.loss for result in run.train(1)] == pytest.approx(losses[3:], abs=1e-12)


def test_a_killed_worker_is_replaced_and_its_steps_have_the_tables_that_they_had() -> None:
    def moved() -> Program:
        callbacks = [piper.callbacks.MoveExperts(every=1, costs="cpu", least=-1.0)]
        return program(cloned(), callbacks=callbacks, steps=4)

    with launch_inline(moved()) as run:
        losses = [result.loss for result in run.train()]
    events: list[str] = []
    got = []
    with recovering(moved(), "local", Options(), retries=2, notify=lambda e: events.append(e.event)) as run:
        for number, result in enumerate(run.train()):
            got.append(result.loss)
            if number == 2:
                os.kill(cast(LocalWorkerGroup, run.session.group).processes[3], signal.SIGKILL)
    assert got == losses
    assert "recovery" in events and "mismatch" not in events
