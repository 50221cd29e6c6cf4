"""Synthesis: how short its schedules are, what they hold, and that the compiler agrees."""

from collections.abc import Iterator
from inspect import cleandoc
from itertools import permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piper import schedules
from piper.directives.order import order
from piper.errors import ScheduleError
from piper.ir.select import at
from piper.schedules import Memory, Placement, StageCosts, bound, synthesise
from piper.schedules.grid import NAMES, Action, Grid, grid_for, orders
from piper.schedules.synthesis.synthesise import synthesised
from piper.schedules.timing import makespan, peak_bytes, timeline
from piper.schedules.torch_csv import validate
from piper.view.cells import picture
from tests.schedules.synthesis_cases import Case, cases, compiled_step, replay, transfers_meet


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "stages_per_rank", "memory", "last", "longest"),
    [
        (4, 8, 2, 1.0, 1.0, 51),
        (4, 8, 4, 1.0, 1.0, 49.5),
        (4, 8, 8, 1.0, 1.0, 48.75),
        (4, 8, 2, 0.75, 1.0, 53),
        (4, 8, 2, 0.5, 1.0, 59),
        (4, 8, 2, 1.0, 1.5, 60),
        (8, 20, 2, 1.0, 1.0, 127),
        (8, 20, 4, 1.0, 1.0, 123.5),
        (8, 20, 8, 1.0, 1.0, 121.75),
        (8, 20, 2, 1.0, 1.5, 150),
        slow(8, 20, 2, 0.75, 1.0, 133),
        slow(8, 20, 2, 0.5, 1.0, 147),
    ],
)
def test_the_makespans(
    ranks: int, microbatches: int, stages_per_rank: int, memory: float, last: float, longest: float
) -> None:
    """In units in which a rank's forwards of one microbatch take 2, whatever its number of stages."""
    found, _ = synthesised(ranks, microbatches, stages_per_rank, memory=memory, last=last)
    slower = [1.0] * (ranks * stages_per_rank - 1) + [last]
    home = {action.stage: rank for rank, row in enumerate(found.grid.rows) for (action,) in row}
    stages = ranks * stages_per_rank
    case = Case(
        costs=StageCosts(forward=slower, inputs=slower, weights=slower),
        placement=Placement(ranks=[home[stage] for stage in range(stages)]),
        microbatches=microbatches,
        memory=Memory(saved=[1] * stages, carried=[1] * stages, limit=stages),
    )
    validate(found.grid)
    replayed = replay(found.grid, case)
    assert replayed.end == found.makespan
    assert replayed.end * 2 / stages_per_rank <= longest
    assert max(replayed.peaks) <= memory * stages_per_rank * ranks
    assert found.bound <= found.makespan


def named(case: Case) -> Iterator[Grid]:
    """The named schedules with a case's placement, that there are for its microbatches."""
    ranks, stages = case.placement.count, len(case.placement.ranks)
    for name, entry in NAMES.items():
        if name == "dualpipe" or (name == "dualpipe-v" and case.microbatches < 2 * ranks):
            continue
        per_rank, rest = divmod(stages, ranks)
        if rest or (entry.instead and entry.stages_per_rank != per_rank):
            continue
        grid = grid_for(name, ranks, case.microbatches, per_rank)
        homes = {(action.stage, rank) for rank, row in enumerate(grid.rows) for g in row for action in g}
        if homes == set(enumerate(case.placement.ranks)):
            yield grid


def check_case(case: Case, trials: int) -> None:
    """Everything that holds for every pipeline."""
    found = synthesise(case.costs, case.placement, case.microbatches, case.memory, trials=trials)
    validate(found.grid)
    assert list(found) == orders(found.grid)
    replayed = replay(found.grid, case)
    assert replayed.end == pytest.approx(found.makespan, rel=1e-12)
    assert schedules.bound(case.costs, case.placement, case.microbatches, case.memory) == pytest.approx(
        found.bound, rel=1e-9
    )
    assert found.bound <= found.makespan

    def fits(peaks: tuple[int, ...]) -> bool:
        return case.memory is None or all(
            peak <= case.memory.limit_of(rank) for rank, peak in enumerate(peaks)
        )

    assert fits(replayed.peaks)
    for grid in named(case):
        other = replay(grid, case)
        if fits(other.peaks):
            assert found.makespan <= other.end * (1 + 1e-12)
    step = compiled_step(case, found)
    assert step >= found.makespan * (1 - 1e-9)
    if not transfers_meet(case, replayed):
        assert step == pytest.approx(found.makespan, rel=1e-9)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(ranks=3, stages_per_rank=2, microbatches=5))
def test_small_pipelines(case: Case) -> None:
    check_case(case, trials=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(ranks=5, stages_per_rank=4, microbatches=12))
def test_larger_pipelines(case: Case) -> None:
    check_case(case, trials=80)


def rows_of_two(stage: int) -> list[tuple[Action, ...]]:
    """Every order of one stage's split passes over two microbatches."""
    actions = [Action(stage=stage, phase=phase, microbatch=m) for m in (0, 1) for phase in ("F", "BI", "BW")]
    return [
        row
        for row in permutations(actions)
        if all(
            row.index(first) < row.index(then)
            for first, then in ((actions[i], actions[i + 1]) for i in (0, 1, 3, 4))
        )
    ]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.1, 3.0), min_size=6, max_size=6), st.sampled_from([0.0, 0.5]))
def test_nothing_is_shorter_on_a_pipeline_small_enough_to_try_everything(
    times: list[float], hop: float
) -> None:
    costs = StageCosts(forward=times[:2], inputs=times[2:4], weights=times[4:], hop=hop)
    found = synthesise(costs, Placement.loop(2, 1), 2)
    shortest = float("inf")
    for first, second in product(rows_of_two(0), rows_of_two(1)):
        grid = Grid(rows=(tuple((a,) for a in first), tuple((a,) for a in second)))
        try:
            shortest = min(shortest, makespan(grid, costs))
        except ScheduleError:
            continue  # the ranks wait for each other
    assert found.bound <= shortest * (1 + 1e-9)
    assert found.makespan == pytest.approx(shortest, rel=1e-9)


def test_the_same_arguments_give_the_same_schedule() -> None:
    costs = StageCosts(forward=[1, 2, 1.5, 1], inputs=[1, 1, 2, 1], weights=[0.5, 1, 1, 1], hop=0.2)
    memory = Memory(saved=[3, 2, 2, 1], carried=[1, 2, 1, 1], limit=7)
    one, other = (synthesise(costs, Placement.v(2), 6, memory, trials=60) for _ in range(2))
    assert (one, one.makespan, one.bound) == (other, other.makespan, other.bound)


@pytest.mark.parametrize(("limit", "end"), [(8, 51), (6, 53), (4, 59)])
def test_named_schedules_cost_no_search(limit: int, end: int) -> None:
    """With one trial the result is the best named schedule that fits: ZB-V, V-Half or V-Min."""
    memory = Memory(saved=[1] * 8, carried=[1] * 8, limit=limit)
    assert synthesise(StageCosts.even(8), Placement.v(4), 8, memory, trials=1).makespan == end


def test_a_synthesised_schedule_is_a_list_of_orders() -> None:
    found = synthesise(StageCosts.even(2), Placement.loop(2, 1), 1, stage="S", part="P")
    assert found == [
        order([at(S=0, P=0, PASS="F"), at(S=0, P=0, PASS="B")]),
        order([at(S=1, P=0, PASS="F"), at(S=1, P=0, PASS="BI"), at(S=1, P=0, PASS="BW")]),
    ]
    assert (found.makespan, found.bound) == (5.0, 5.0)


def test_the_bound_counts_heads_work_and_tails() -> None:
    """One rank's way to its first pass, its passes, and what must follow them elsewhere."""
    even = StageCosts.even(4)
    assert schedules.bound(even, Placement.loop(4, 1), 8) == 3 + 24
    assert schedules.bound(even, Placement.loop(4, 1), 1) == 4 + 4 + 1
    # Without weight gradients the last rank's work is followed by the gradients' way up.
    assert schedules.bound(StageCosts.even(4, weights=0), Placement.loop(4, 1), 8) == 3 + 16 + 3
    assert schedules.bound(StageCosts.even(4, weights=0, hop=0.5), Placement.loop(4, 1), 8) == 4.5 + 16 + 4.5
    # A microbatch holds stage 0 for 4 + 4 + 1 units: one at a time, eight of them take 72.
    memory = Memory(saved=[1] * 4, carried=[1] * 4, limit=1)
    assert schedules.bound(even, Placement.loop(4, 1), 8, memory) == 72


def test_placements() -> None:
    assert Placement.v(3).ranks == (0, 1, 2, 2, 1, 0)
    assert Placement.v(2, 3).ranks == (0, 1, 1, 0, 0, 1)
    assert Placement.loop(2, 3).ranks == (0, 1, 0, 1, 0, 1)
    assert Placement(ranks=[1, 0, 1]).stages_of(1) == [0, 2]


def test_hops_may_differ_between_boundaries() -> None:
    costs = StageCosts(forward=[1, 1, 1], inputs=[1, 1, 1], weights=[1, 1, 1], hop=[0.5, 0.25])
    (first, second, third) = (
        tuple((Action(stage=stage, phase=phase, microbatch=0),) for phase in ("F", "B")) for stage in range(3)
    )
    grid = Grid(rows=(first, second, third))
    assert timeline(grid, costs).starts == ((0.0, 8.5), (1.5, 6.0), (2.75, 3.75))
    assert makespan(grid, costs) == 10.5


def test_bytes_of_whole_and_split_backwards() -> None:
    memory = Memory(saved=[4], carried=[6], limit=100)

    def peak(*names: str) -> int:
        phases = {"F": "F", "B": "B", "I": "BI", "W": "BW"}
        row = tuple((Action(stage=0, phase=phases[name[0]], microbatch=int(name[1])),) for name in names)  # type: ignore[arg-type]
        return peak_bytes(Grid(rows=(row,)), memory)[0]

    assert peak("F0", "F1", "B0", "B1") == 8
    assert peak("F0", "F1", "I0", "I1", "W0", "W1") == 12
    assert peak("F0", "I0", "F1", "W0", "I1", "W1") == 10


def test_a_tight_limit_leaves_one_microbatch_at_a_time() -> None:
    """More is carried than saved, so that only whole backwards fit."""
    memory = Memory(saved=[2, 2], carried=[5, 5], limit=2)
    found = synthesise(StageCosts.even(2), Placement.loop(2, 1), 2, memory)
    assert peak_bytes(found.grid, memory) == (2, 2)
    assert picture(found.grid) == cleandoc("""
        rank 0  0F0 .   .   .   0B0 --  0F1 .   .   .   0B1 --
        rank 1  .   1F0 1B0 --  .   .   .   1F1 1B1 --  .   .
    """)


def test_a_picture_is_to_scale() -> None:
    found, _ = synthesised(2, 2, 1, last=1.5)
    assert picture(found.grid, found.costs) == cleandoc("""
        rank 0  0F0 --  0F1 --  .   .   .   .   0B0 --  --  --  .   .   0B1 --  --  --  .   .
        rank 1  .   .   1F0 --  --  1I0 --  --  1F1 --  --  1I1 --  --  1W0 --  --  1W1 --  --
    """)


def test_what_the_command_line_says_of_a_schedule() -> None:
    _, tight = synthesised(4, 8, memory=0.5)
    assert tight == ("makespan 59, the bound is 51; a rank holds at most 4 forwards, 0.50 of 1F1B's 8")
    _, roomy = synthesised(4, 8)
    assert roomy == (
        "makespan 51, the bound: none is shorter; a rank holds at most 8 forwards, 1.00 of 1F1B's 8"
    )


EVEN = StageCosts.even(4)
HINT = "give one number for each stage, in order; for `hop` one for each boundary between stages"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: synthesise(EVEN, Placement.v(2), 0),
            "synthesise: microbatches must be a whole number from 1, got 0\n  hint: microbatches=1 is the least",
        ),
        (
            lambda: synthesise(EVEN, Placement.v(2), 2, trials=0),
            "synthesise: trials must be a whole number from 1, got 0\n  hint: trials=1 is the least",
        ),
        (
            lambda: synthesise(EVEN, [0, 1, 1, 0], 2),  # type: ignore[arg-type]
            "synthesise: placement is a list\n  hint: give a piper.schedules.Placement",
        ),
        (
            lambda: bound(EVEN, Placement.v(3), 2),
            "bound: the inputs differ in their number of stages\n  costs:     4 stages\n"
            "  placement: 6 stages\n  hint:      give costs, placement and memory of the same stages",
        ),
        (
            lambda: bound(EVEN, Placement.v(2), 0),
            "bound: microbatches must be a whole number from 1, got 0\n  hint: microbatches=1 is the least",
        ),
        (
            lambda: synthesise(EVEN, Placement.v(3), 2),
            "synthesise: the inputs differ in their number of stages\n  costs:     4 stages\n"
            "  placement: 6 stages\n  hint:      give costs, placement and memory of the same stages",
        ),
        (
            lambda: synthesise(
                EVEN, Placement.v(2), 2, Memory(saved=[3] * 4, carried=[1] * 4, limit=[9, 9, 9])
            ),
            "synthesise: 3 limits for 2 ranks\n  hint: give one limit for all ranks, or one for each",
        ),
        (
            lambda: synthesise(EVEN, Placement.v(2), 2, Memory(saved=[3] * 4, carried=[1] * 4, limit=[9, 5])),
            "synthesise: rank 1 cannot hold one microbatch\n  needs: 6 bytes\n  limit: 5 bytes\n"
            "  hint:  raise the limit, use smaller microbatches, or put fewer stages on the rank",
        ),
        (
            lambda: StageCosts(forward=[1, -1], inputs=[1, 1], weights=[1, 1]),
            "StageCosts: forward=[1, -1]\n  needs: one or more numbers, each from 0 and finite\n"
            f"  hint:  {HINT}",
        ),
        (
            lambda: StageCosts(forward=[1, 1], inputs=[1], weights=[1, 1]),
            f"StageCosts: inputs=[1]\n  needs: 2 numbers, each from 0 and finite\n  hint:  {HINT}",
        ),
        (
            lambda: StageCosts.even(2, hop=float("nan")),
            f"StageCosts: hop=(nan,)\n  needs: 1 numbers, each from 0 and finite\n  hint:  {HINT}",
        ),
        (
            lambda: StageCosts.even(2, 0, 0, 0),
            "StageCosts: no pass of any stage takes time\n  hint: give at least one time above 0",
        ),
        (
            lambda: Placement(ranks=[0, 2]),
            "Placement: ranks=(0, 2)\n"
            "  hint: give the rank of each stage; ranks are 0, 1, ... and each has at least one stage",
        ),
        (
            lambda: Memory(saved=[1.5], carried=[1], limit=2),  # type: ignore[list-item]
            "Memory: saved has 1.5 bytes\n  hint: bytes are whole numbers: round them up",
        ),
        (
            lambda: synthesised(4, 8, memory=0.2),
            "synthesised: memory=0.2 holds no whole microbatch\n"
            "  needs: at least 0.25 of 1F1B's 8 forwards\n  hint:  raise the memory, or use more ranks",
        ),
        (
            lambda: synthesised(4, 8, last=0),
            "synthesised: last=0\n  hint: last takes numbers above 0, none infinite or NaN",
        ),
    ],
)
def test_what_is_refused(build: object, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build()  # type: ignore[operator]
    assert str(caught.value) == message
