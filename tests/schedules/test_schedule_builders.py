"""The builders: their pictures, their bubbles, what they hold, and what they refuse."""

from collections.abc import Callable
from inspect import cleandoc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper import schedules
from piper.directives.order import Order, order
from piper.errors import ScheduleError
from piper.ir.select import at
from piper.schedules.grid import NAMES, grid_for, is_overlap, orders
from piper.schedules.timing import makespan, timeline
from piper.schedules.torch_csv import validate
from piper.view.cells import picture
from tests.schedules.activations import peak_activations

BUILDERS: dict[str, Callable[..., list[Order]]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved-1f1b": schedules.interleaved_1f1b,
    "zero-bubble": schedules.zero_bubble,
    "interleaved-zero-bubble": schedules.interleaved_zero_bubble,
    "zbv": schedules.zbv,
    "v-half": schedules.v_half,
    "v-min": schedules.v_min,
    "dualpipe-v": schedules.dualpipe_v,
    "dualpipe": schedules.dualpipe,
}
DRAWN = {
    "gpipe": (2, 3),
    "1f1b": (3, 4),
    "interleaved-1f1b": (2, 3),
    "zero-bubble": (3, 4),
    "interleaved-zero-bubble": (2, 3),
    "zbv": (2, 3),
    "v-half": (3, 3),
    "v-min": (3, 3),
    "dualpipe-v": (2, 4),
    "dualpipe": (4, 8),
}
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 5, 8, 15, 16, 19)]


def refusal(build: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        build(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_in_the_docstring_is_real(name: str) -> None:
    assert picture(grid_for(name, *DRAWN[name])) in cleandoc(BUILDERS[name].__doc__ or "")


@pytest.mark.parametrize("name", NAMES)
def test_a_builder_says_its_grid_in_directives(name: str) -> None:
    grid = grid_for(name, *DRAWN[name])
    built = BUILDERS[name](*DRAWN[name], stage="S", part="P")
    assert built == orders(grid, stage="S", part="P")
    assert BUILDERS[name](*DRAWN[name]) == orders(grid)
    assert all(directive.source.startswith("test_schedule_builders.py:") for directive in built)


def test_a_grid_is_built_once() -> None:
    assert grid_for("v-half", 4, 8) is grid_for("v-half", 4, 8)


def test_one_order_per_rank_one_group_per_action() -> None:
    first, second, third = schedules.one_f_one_b(3, 4)
    assert third == order([at(PP=2, MB=i // 2, PASS="FB"[i % 2]) for i in range(8)])
    assert second.groups[:3] == (
        (at(PP=1, MB=0, PASS="F"),),
        (at(PP=1, MB=1, PASS="F"),),
        (at(PP=1, MB=0, PASS="B"),),
    )
    assert len(first.groups) == 8
    assert schedules.zero_bubble(1, 1) == [order([at(PP=0, MB=0, PASS=phase) for phase in ("F", "BI", "BW")])]


def test_an_overlapped_pair_is_one_group_of_two() -> None:
    (only,) = schedules.dualpipe_v(1, 2)
    assert only.groups[4] == (at(PP=1, MB=1, PASS="F"), at(PP=0, MB=0, PASS="B"))


def test_stages_are_dealt_round_or_in_a_v() -> None:
    def stages(name: str) -> list[set[int]]:
        return [{action.stage for group in row for action in group} for row in grid_for(name, 3, 6).rows]

    assert stages("interleaved-1f1b") == stages("interleaved-zero-bubble") == [{0, 3}, {1, 4}, {2, 5}]
    for name in ("zbv", "v-half", "v-min", "dualpipe-v"):
        assert stages(name) == [{0, 5}, {1, 4}, {2, 3}]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(NAMES)), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_every_size_is_a_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> None:
    if name == "dualpipe-v":
        microbatches += 2 * ranks - 1
    if name == "dualpipe":
        ranks, microbatches = 2 * ranks, 4 * ranks + 2 * (microbatches - 1)
    interleaved = name.startswith("interleaved")
    grid = grid_for(name, ranks, microbatches, stages_per_rank if interleaved else None)
    assert all(grid.rows)
    assert all(len(group) == 1 or is_overlap(group) for row in grid.rows for group in row)
    validate(grid)
    assert (len(grid.rows), grid.microbatches) == (ranks, microbatches)
    assert grid.stages == ranks * (stages_per_rank if interleaved else NAMES[name].stages_per_rank)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_the_bubble_of_gpipe_and_1f1b(stages: int, microbatches: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert makespan(grid_for(name, stages, microbatches)) == 3 * microbatches + 3 * (stages - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), [size for size in SIZES if size[0] <= size[1]])
def test_the_bubbles_of_full_pipelines(ranks: int, microbatches: int) -> None:
    """(F + B) and (F + B - 2W) for each rank but one, whatever the number of stages on a rank."""
    assert makespan(grid_for("zero-bubble", ranks, microbatches)) == 3 * microbatches + ranks - 1
    for per_rank in (1, 2, 3):
        work = 3 * per_rank * microbatches
        assert makespan(grid_for("interleaved-1f1b", ranks, microbatches, per_rank)) == work + 3 * (ranks - 1)
        assert (
            makespan(grid_for("interleaved-zero-bubble", ranks, microbatches, per_rank)) == work + ranks - 1
        )


@pytest.mark.parametrize(("ranks", "microbatches"), [size for size in SIZES if 2 * size[0] <= size[1]])
def test_the_bubbles_of_v_shapes(ranks: int, microbatches: int) -> None:
    v = timeline(grid_for("zbv", ranks, microbatches))
    assert v.end == 6 * microbatches + ranks - 1
    for starts in v.starts:
        assert starts == tuple(range(int(starts[0]), int(starts[0]) + 6 * microbatches)), "a rank waits"
    pair_and_backward_less_weights = 3 + 2 - 3
    assert makespan(grid_for("dualpipe-v", ranks, microbatches)) == (
        6 * microbatches + (ranks - 1) * pair_and_backward_less_weights
    )


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_activations_stay_within_bounds(ranks: int, microbatches: int) -> None:
    """1F1B's own bound, and nowhere more than its first rank holds (a V has two stages on each rank)."""
    own = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    assert peak_activations(grid_for("1f1b", ranks, microbatches)) == own
    split = grid_for("zero-bubble", ranks, microbatches)
    assert peak_activations(split, freed_by="BI") == own
    assert max(peak_activations(split)) <= min(ranks, microbatches)
    assert max(peak_activations(grid_for("zbv", ranks, microbatches))) <= 2 * min(ranks, microbatches)
    if microbatches >= 2 * ranks:
        assert max(peak_activations(grid_for("dualpipe-v", ranks, microbatches))) <= 2 * ranks + 1


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "end", "held"),
    [
        ("v-half", 4, 8, 53, 6),
        ("v-half", 5, 20, 129, 7),
        ("v-half", 8, 20, 137, 10),
        ("v-half", 16, 32, 233, 18),
        ("v-min", 4, 8, 59, 4),
        ("v-min", 5, 20, 135, 6),
        ("v-min", 6, 12, 89, 6),
        ("v-min", 8, 20, 147, 8),
        ("v-min", 16, 32, 251, 12),
    ],
)
def test_v_half_and_v_min_hold_half_and_a_third(
    name: str, ranks: int, microbatches: int, end: int, held: int
) -> None:
    """The published sizes: ranks + 2, and 2(ranks + 4) / 3, of the 2 ranks forwards that 1F1B's first rank holds."""
    grid = grid_for(name, ranks, microbatches)
    assert (makespan(grid), max(peak_activations(grid))) == (end, held)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_v_half_and_v_min_stay_within_their_memory(ranks: int, microbatches: int) -> None:
    assert max(peak_activations(grid_for("v-half", ranks, microbatches))) <= ranks + 2
    assert max(peak_activations(grid_for("v-min", ranks, microbatches))) <= 2 * (ranks + 4) / 3


def test_dualpipe_overlaps_every_group_of_its_main_phase() -> None:
    for rank, row in enumerate(grid_for("dualpipe-v", 4, 12).rows):
        pairs = [position for position, group in enumerate(row) if is_overlap(group)]
        main = 2 * (12 - 8 + rank + 1) - (rank == 3)
        assert pairs[:main] == list(range(pairs[0], pairs[0] + main))
        assert len(pairs) == main + (3 - rank)


@pytest.mark.parametrize("name", NAMES)
def test_large_grids_are_valid(name: str) -> None:
    validate(grid_for(name, 32, 128))  # benchmarks/compile_scale.py times these and larger ones


@pytest.mark.parametrize("bad", [0, -1, 2.0, "4", True, None])
def test_numbers_that_are_not_whole(bad: object) -> None:
    for name in ("gpipe", "1f1b", "zero-bubble"):
        builder = BUILDERS[name]
        by = builder.__name__
        assert (
            refusal(builder, bad, 4)
            == f"{by}: stages must be a whole number from 1, got {bad!r}\n  hint: stages=1 is the least"
        )
    for builder in BUILDERS.values():
        by = builder.__name__
        assert refusal(builder, 4, bad) == (
            f"{by}: microbatches must be a whole number from 1, got {bad!r}\n  hint: microbatches=1 is the least"
        )
    for name in ("interleaved-1f1b", "interleaved-zero-bubble"):
        builder = BUILDERS[name]
        by = builder.__name__
        assert refusal(builder, 4, 8, bad) == (
            f"{by}: stages_per_rank must be a whole number from 1, got {bad!r}\n  hint: stages_per_rank=1 is the least"
        )
    assert (
        refusal(schedules.zbv, bad, 4)
        == f"zbv: ranks must be a whole number from 1, got {bad!r}\n  hint: ranks=1 is the least"
    )


def test_too_few_microbatches_for_dualpipe() -> None:
    assert refusal(schedules.dualpipe_v, 4, 7) == (
        "dualpipe_v: microbatches=7 cannot fill both directions of ranks=4\n"
        "  needs: at least 8 microbatches, one for each of the 8 stages\n"
        "  hint:  split into 8 parts or more, or use zbv, which takes any number"
    )


@pytest.mark.parametrize(("stage", "part"), [("PP", "PP"), ("PASS", "MB"), ("PP", "PASS")])
def test_tags_that_collide(stage: str, part: str) -> None:
    assert refusal(schedules.gpipe, 2, 2, stage=stage, part=part) == (
        f"orders: stage={stage!r} and part={part!r} cannot both be tags\n"
        '  hint: use two different tags, neither of them PASS: stage="PP", part="MB"'
    )


KNOWN = (
    "gpipe, 1f1b, interleaved-1f1b, zero-bubble, interleaved-zero-bubble, zbv, v-half, v-min, dualpipe-v,"
    " dualpipe, synthesised"
)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zero_bubble", "did you mean zero-bubble?"),
        ("DualPipeV", "did you mean dualpipe-v?"),
        ("synthesized", "did you mean synthesised?"),
        ("chimera", "use one of the known names"),
    ],
)
def test_an_unknown_schedule(name: str, hint: str) -> None:
    assert refusal(grid_for, name, 2, 4) == (
        f"schedule: there is no schedule {name!r}\n  known: {KNOWN}\n  hint:  {hint}"
    )


def test_ranks_that_are_not_whole_by_name() -> None:
    assert (
        refusal(grid_for, "1f1b", 0, 4)
        == "1f1b: ranks must be a whole number from 1, got 0\n  hint: ranks=1 is the least"
    )


@pytest.mark.parametrize(
    ("name", "needs", "instead"),
    [
        ("gpipe", 1, "interleaved-1f1b"),
        ("1f1b", 1, "interleaved-1f1b"),
        ("zero-bubble", 1, "interleaved-zero-bubble"),
        ("zbv", 2, "interleaved-zero-bubble"),
        ("v-half", 2, "synthesised"),
        ("v-min", 2, "synthesised"),
        ("dualpipe-v", 2, "interleaved-zero-bubble"),
        ("dualpipe", 1, "dualpipe-v"),
    ],
)
def test_stages_per_rank_that_a_schedule_cannot_have(name: str, needs: int, instead: str) -> None:
    assert grid_for(name, 2, 4, needs) == grid_for(name, 2, 4)
    assert refusal(grid_for, name, 2, 4, 3) == (
        f"{name}: stages_per_rank=3\n"
        f"  needs: stages_per_rank={needs}\n"
        f"  hint:  leave stages_per_rank out, or use {instead}"
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 2), (3, 2), (4, 2), (4, 3), (4, 4), (5, 3)])
def test_few_microbatches_go_through_a_v_as_if_each_were_alone(ranks: int, microbatches: int) -> None:
    assert makespan(grid_for("zbv", ranks, microbatches)) == 3 * ranks + 4 * microbatches - 1
