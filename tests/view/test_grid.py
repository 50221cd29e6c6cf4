"""The pipeline grid of plans agrees with the schedule it was compiled from."""

import time
from collections.abc import Sequence
from inspect import cleandoc

import pytest

from piper import at, place, remat, replicate, schedules, split
from piper.directives import Directive, apply
from piper.ir.chunk import Batch, CapturedModel
from piper.ir.graph import start
from piper.ir.ids import Pass, Phase
from piper.ir.select import At
from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans
from piper.schedules.grid import NAMES, grid_for
from piper.view.cells import grid, of_plans, picture, plan_rows, stage_tags
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.outlines import SCALAR, Drawing

V_SHAPED = ("zbv", "v-half", "v-min", "dualpipe-v", "dualpipe")  # and both ways at once


def drawn(stages: int, strategy: Sequence[Directive], experts: int = 0) -> str:
    outline = chain(stages, experts=experts)
    plans, _ = lower(apply(start(outline), strategy))
    return grid(plans, {chunk.name: chunk.tags for chunk in outline.chunks})


def test_1f1b_drains_one_backward_per_forward() -> None:
    strategy = [
        place(at(PP=0), [0]),
        place(at(PP=1), [1]),
        split(at(), parts=3),
        *schedules.one_f_one_b(2, 3),
    ]
    assert drawn(2, strategy) == cleandoc("""
        0  0F0 0F1 .   .   0B0 --  0F2 0B1 --  .   0B2 --
        1  .   1F0 1B0 --  1F1 1B1 --  1F2 1B2 --  .   .
    """)


def test_without_an_order_a_pipeline_runs_1f1b() -> None:
    strategy: list[Directive] = [*(place(at(PP=s), [s]) for s in range(3)), split(at(), parts=4)]
    assert drawn(3, strategy) == drawn(3, [*strategy, *schedules.one_f_one_b(3, 4)])


def test_a_stage_that_keeps_only_its_input_runs_its_forwards_again_before_its_backwards() -> None:
    strategy = [
        *(place(at(PP=stage), [stage]) for stage in range(2)),
        remat(at(PP=0), budget=1, across="PP"),
        split(at(), parts=3),
        *schedules.one_f_one_b(2, 3),
    ]
    assert drawn(2, strategy) == cleandoc("""
        0  0F0 0F1 0R0 .   0B0 --  0F2 0R1 0B1 --  0R2 0B2 --
        1  .   1F0 1B0 --  1F1 1B1 --  1F2 1B2 --  .   .   .
    """)
    assert drawn(2, strategy, experts=4) == drawn(2, strategy)


def test_rows_of_many_recomputed_microbatches_take_linear_time() -> None:
    """Where a recompute stands in its row is found without a walk through all of the row."""
    kinds: list[tuple[Phase, bool]] = [("F", False), ("F", True), ("B", False)]
    passes = [
        Pass(phase=phase, chunk="PP=0", part=(("MB", number),), again=again)
        for number in range(10_000)
        for phase, again in kinds
    ]
    instrs = tuple(Instr(op="compute", node=str(run), stream="compute", payload=run) for run in passes)
    plan = Plan(devices=(0,), instrs=instrs, slots={}, residents={})
    plans = Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False, axes={"MB": 10_000})
    begin = time.process_time()
    (row,) = plan_rows(plans, {"PP=0": (("PP", 0),)})
    assert time.process_time() - begin < 5  # 0.6 s; with a walk for each 15 s
    assert [cell.label for cell in row] == [f"0{letter}{i}" for i in range(10_000) for letter in "FRB"]


def test_pieces_that_run_again_one_by_one_stand_together_before_their_backward() -> None:
    strategy = [
        *(place(at(PP=stage), [stage]) for stage in range(2)),
        remat(at(EP="*"), budget=1, across="EP"),
        split(at(), parts=2),
        *schedules.gpipe(2, 2),
    ]
    outline = chain(2, experts=4)
    plans, _ = lower(apply(start(outline), strategy))
    order = [ins.node[0] for ins in plans.plans[0].instrs if ins.op == "compute" and "MB=0" in ins.node]
    assert "".join(order) == "FFFBRBB", "one piece's backward has run when another runs again"
    assert drawn(2, strategy, experts=4) == cleandoc("""
        0  0F0 0F1 0R0 .   .   .   0B0 --  0R1 0B1 --
        1  .   1F0 1F1 1R0 1B0 --  1R1 1B1 --  .   .
    """)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in V_SHAPED])
def test_forwards_that_run_again_leave_a_schedule_as_it_is(name: str) -> None:
    wanted = grid_for(name, 3, 6)
    places: list[Directive] = [place(at(PP=s), [s % 3]) for s in range(wanted.stages)]
    rest = [split(at(), parts=6), *orders(name, 3, 6)]
    once = drawn(wanted.stages, [*places, *rest])
    twice = drawn(wanted.stages, [*places, remat(at(), budget=1, across="PP"), *rest])
    for before, after in zip(once.splitlines(), twice.splitlines(), strict=True):
        kept = [cell for cell in after.split() if "R" not in cell]
        assert [cell for cell in kept if cell != "."] == [cell for cell in before.split() if cell != "."]
        firsts = [cell.replace("F", "R") for cell in kept if "F" in cell]
        assert sorted(firsts) == sorted(cell for cell in after.split() if "R" in cell)


def test_an_expert_region_is_one_block_with_its_stage() -> None:
    strategy = [*(place(at(PP=s), [s]) for s in range(2)), split(at(), parts=2), *schedules.gpipe(2, 2)]
    assert drawn(2, strategy, experts=4) == drawn(2, strategy)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in V_SHAPED])
def test_the_grid_is_the_schedule(name: str) -> None:
    ranks, microbatches = 3, 6
    wanted = grid_for(name, ranks, microbatches)
    places: list[Directive] = [place(at(PP=s), [s % ranks]) for s in range(wanted.stages)]
    shown = drawn(
        wanted.stages, [*places, split(at(), parts=microbatches), *orders(name, ranks, microbatches)]
    )
    expected = picture(wanted)
    if (
        "zero-bubble" in name
    ):  # the first stage has no input gradients: its I is not there, its W may come earlier
        assert [cells(line, "I") for line in shown.splitlines()][1:] == [
            cells(line, "I") for line in expected.splitlines()
        ][1:]
    else:
        assert [line.split()[1:] for line in shown.splitlines()] == [
            line.split()[2:] for line in expected.splitlines()
        ]


def cells(line: str, letter: str) -> list[str]:
    return [cell for cell in line.split() if letter in cell]


def orders(name: str, ranks: int, microbatches: int) -> list[Directive]:
    from piper.schedules.grid import orders as say

    return list(say(grid_for(name, ranks, microbatches)))


def by_stages(stages: Sequence[At], schedule: Sequence[Directive]) -> str:
    outline = chain(4)
    places = [place(stage, [number]) for number, stage in enumerate(stages)]
    graph = apply(start(outline), [*places, split(at(), parts=2), *schedule])
    plans, _ = lower(graph)
    return grid(plans, stage_tags(outline, graph.orderings))


def test_regions_that_a_schedule_always_names_together_are_one_stage() -> None:
    stages = [at(PP=0), at(PP=range(1, 4))]
    assert by_stages(stages, schedules.one_f_one_b(2, 2, stage=stages)) == cleandoc("""
        0  0F0 0F1 .   .   0B0 --  .   0B1 --
        1  .   1F0 1B0 --  1F1 1B1 --  .   .
    """)


def test_regions_that_no_order_names_stay_stages_of_their_own() -> None:
    stages = [at(PP=[0, 1]), at(PP=[2, 3])]
    one_of_two = schedules.one_f_one_b(2, 2, stage=stages)[:1]
    assert "3F1" in by_stages(stages, one_of_two)
    assert "3F1" in by_stages(stages, [])


def test_a_backward_waits_for_the_gradients_of_all_who_read_its_output() -> None:
    """The last of three stages reads both others: the first one's backward needs gradients of two stages."""
    drawing = Drawing()
    first = drawing.chunk("PP=0", (("PP", 0),), [Batch(field="x")], [drawing.param("a", 4)])
    second = drawing.chunk("PP=1", (("PP", 1),), [first], [drawing.param("b", 4)])
    last = drawing.chunk("PP=2", (("PP", 2),), [first, second], [drawing.param("c", 4)], outputs=[SCALAR])
    outline = drawing.outline(last)
    plans, _ = lower(apply(start(outline), [place(at(PP=stage), [stage]) for stage in range(3)]))
    rows = plan_rows(plans, {chunk.name: chunk.tags for chunk in outline.chunks})
    assert [[cell.start for cell in row] for row in rows] == [[0, 7], [1, 5], [2, 3]]


def test_a_cell_waits_for_others_alone_where_its_experts_lie_on_its_devices_in_another_order() -> None:
    strategy = [
        replicate(at(PP=0), [0, 1]),
        replicate(at(PP=0, EP="*"), [1, 0]),
        replicate(at(PP=1), [2, 3]),
        replicate(at(PP=1, EP="*"), [3, 2]),
        split(at(), parts=3),
    ]
    assert drawn(2, strategy, experts=4) == cleandoc("""
        0,1  0F0 0F1 0F2 .   .   .   0B0 --  0B1 --  0B2 --
        2,3  .   1F0 1F1 1F2 1B0 --  1B1 --  1B2 --  .   .
    """)


def around(parts: int) -> tuple[Plans, CapturedModel]:
    """Plans in which stage 0 has the first and the last chunk, as where a head is beside its embedding."""
    drawing = Drawing()
    first = drawing.chunk("PP=0", (("PP", 0),), [Batch(field="x")], [drawing.param("a", 4)])
    middle = drawing.chunk("PP=1", (("PP", 1),), [first], [drawing.param("b", 4)])
    last = drawing.chunk("PP=0 #1", (("PP", 0),), [middle], [drawing.param("c", 4)], outputs=[SCALAR])
    outline = drawing.outline(last)
    graph = apply(
        start(outline), [*(place(at(PP=stage), [stage]) for stage in range(2)), split(at(), parts=parts)]
    )
    return lower(graph)[0], outline


def test_a_stage_that_runs_before_and_after_another_overlaps_no_cell_of_its_row() -> None:
    plans, outline = around(2)
    pipeline = of_plans(plans, {chunk.name: chunk.tags for chunk in outline.chunks}, "")
    assert [[f"{cell.label} {cell.start}" for cell in row] for row in pipeline.rows] == [
        ["0F0 0", "0F1 1", "0B0 2", "0B1 4"],
        ["1F0 1", "1F1 2", "1B0 4", "1B1 6"],
    ]
    assert pipeline.idle == 1 - 12 / 16


def test_many_microbatches_of_a_stage_before_and_after_another_take_linear_time() -> None:
    """No cell of the first stage can start but by its row, so each of them cuts a circle."""
    plans, outline = around(1500)
    begin = time.process_time()
    rows = plan_rows(plans, {chunk.name: chunk.tags for chunk in outline.chunks})
    assert time.process_time() - begin < 2  # 0.3 s; with a sort of all cells for each 8 s
    assert [len(row) for row in rows] == [3000, 3000]
