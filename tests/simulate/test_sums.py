"""Sums of the simulation on cases small enough to add up by hand."""

import io
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from piper.cli.diff import longest_run
from piper.cli.profile import print_rows, rows_of
from piper.ir.chunk import Chunk, PhaseSpec, TensorSpec
from piper.ir.ids import Pass, SlotId
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.plan.plan import Plan, Plans, Slot
from piper.simulate.account import Span, Timeline, account_of, merged, uncovered
from piper.simulate.calibrate import calibrate
from piper.simulate.cluster import Cluster, Link
from piper.simulate.costs import Roofline
from piper.simulate.engine import touched
from piper.simulate.measured import Line, Measured, line_through, share_of, two_features
from piper.simulate.profile import ChunkWork, Profile, Times, Track
from tests.slots import slot, slots

CLUSTER = Cluster(
    name="small",
    links=(Link(name="wire", bandwidth=10.0, latency=0.5),),
    flops={"float32": 10.0, "bfloat16": 40.0},
    memory=100.0,
    memory_bandwidth=20.0,
    attained=0.5,
    launch=1.0,
)


def chunk(phases: Mapping[str, tuple[int, int]]) -> Chunk:
    specs = {name: PhaseSpec(flops=flops, bytes_moved=moved) for name, (flops, moved) in phases.items()}
    out = TensorSpec(shape=(1,), dtype="float32", nbytes=4)
    return Chunk(name="PP=0", tags=(("PP", 0),), key="k", outputs=(out,), phases=specs)  # type: ignore[arg-type]


def plan_of(*instrs: Instr) -> Plan:
    return Plan(devices=(0,), instrs=instrs, slots={}, residents={})


def test_time_that_two_communications_share_counts_for_the_first() -> None:
    """Busy from 0 to 2; a send from 1 to 5 and a gather from 3 to 7: of 5 s of bubble 3 and 2 are theirs."""
    ops: list[tuple[Op, str]] = [
        ("compute", "compute"),
        ("send", "send"),
        ("gather", "gather"),
        ("load", "load"),
    ]
    plan = plan_of(*(Instr(op=op, node=op, stream=stream) for op, stream in ops))
    times = [(0.0, 2.0), (1.0, 5.0), (3.0, 7.0), (4.0, 6.0)]
    spans = tuple(Span(start=start, end=end, waited=0.0) for start, end in times)
    found = account_of(plan, Timeline(devices=(0,), spans=spans), 8.0)
    assert (found.busy, found.bubble) == (2.0, 6.0)
    assert found.exposed == {"send": 3.0, "gather": 2.0}
    assert found.communication == {"send": 4.0, "gather": 4.0}
    assert found.rate == 0.75


def test_intervals() -> None:
    assert merged([(4.0, 5.0), (0.0, 1.0), (1.0, 2.0), (1.5, 3.0), (7.0, 7.0)]) == [(0.0, 3.0), (4.0, 5.0)]
    assert uncovered(2.0, 8.0, [(0.0, 3.0), (4.0, 5.0), (7.0, 9.0)]) == 3.0


def test_communication_of_a_long_step_is_uncovered_in_linear_time() -> None:
    """Of what computes only the intervals beside a communication are looked at."""
    busy = [(number, number + 0.5) for number in range(60_000)]
    begin = time.process_time()
    assert sum(uncovered(start + 0.25, start + 0.75, busy) for start, _ in busy) == 15_000
    assert time.process_time() - begin < 3  # 0.1 s; with a copy of the rest of the step for each 8 s


def test_a_roofline_is_the_longer_of_the_two_at_the_part_that_is_attained() -> None:
    costs = Roofline(CLUSTER)
    assert costs.compute(chunk({"F": (100, 60)}), "F") == 1 + 10 / 0.5
    assert costs.compute(chunk({"F": (10, 60)}), "F") == 1 + 3 / 0.5
    assert costs.touch("add", 40) == 1 + 40 / (20 * 0.5)
    assert CLUSTER.peak("bfloat16") == 40.0 and CLUSTER.peak("float16") == 10.0


def test_a_line_goes_through_the_median_of_each_size() -> None:
    found = line_through([(1.0, 2.0), (1.0, 90.0), (1.0, 1.0), (3.0, 6.0)])
    assert (found.base, found.slope) == pytest.approx((0.0, 2.0))
    alone = line_through([(4.0, 3.0)], Line(base=2.0, slope=0.1))
    assert (alone.base, alone.slope) == pytest.approx((2.6, 0.1))
    assert line_through([]) == Line(base=0.0, slope=0.0)


def test_two_features_are_fitted_in_relative_terms() -> None:
    """z = 2x + 3y on all points: a plain fit and a relative one agree; of two that contradict, the mean."""
    points = [(1.0, 1.0, 5.0), (2.0, 0.0, 4.0), (0.0, 100.0, 300.0)]
    assert two_features(points) == pytest.approx((2.0, 3.0))
    a, b = two_features([(1.0, 0.0, 1.0), (1.0, 0.0, 100.0)])
    assert b == 0.0 and a == pytest.approx((1 + 0.01) / (1 + 0.0001))


COSTS = Measured(
    model="m",
    source="s",
    chunks={"k": {"F": 5.0, "B": 8.0}},
    arithmetic=2.0,
    traffic=0.5,
    gap=1.0,
    talks={"send": Line(base=2.0, slope=0.25)},
)


def test_what_was_not_measured_is_worked_out() -> None:
    halves = chunk({"F": (1, 1), "B": (10, 10), "BI": (6, 4), "BW": (2, 4)})
    assert COSTS.compute(halves, "F") == 6.0
    assert share_of(halves, "BI") == (6 / 8 + 4 / 8) / 2
    assert COSTS.compute(halves, "BI") == 1.0 + 8.0 * 0.625
    assert COSTS.compute(halves, "BW") == 1.0 + 8.0 * 0.375
    two, four = (COSTS.talk("recv", 8, tuple(range(count))) for count in (2, 4))
    assert (two.latency, two.seconds) == (3.0, 2.0)
    assert (four.latency, four.seconds) == (7.0, 2.0)


def profile_of(*devices: tuple[Times, ...]) -> Profile:
    """Two computations, and a sum that waits for an event of theirs, on every device."""
    backward, total = Pass(phase="B", chunk="PP=0"), SlotId("loss")
    instrs = (
        Instr(op="compute", node="F[PP=0]", stream="compute", payload=Pass(phase="F", chunk="PP=0")),
        Instr(op="compute", node="B[PP=0]", stream="compute", payload=backward, signals=0),
        Instr(
            op="accumulate",
            node="a",
            stream="other",
            waits=(0,),
            writes=(total,),
            payload=backward,
        ),
    )
    plan = Plan(
        devices=tuple(range(len(devices))), instrs=instrs, slots={total: Slot(nbytes=8)}, residents={}
    )
    return Profile(
        plans=Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False),
        tracks=tuple(Track(device=number, steps=(rows,)) for number, rows in enumerate(devices)),
        model="m",
        works={"PP=0": ChunkWork(key="k", phases={"F": (1, 1), "B": (2, 2)})},
    )


ROWS: tuple[Times, ...] = ((0.0, 4.0, 3.0), (4.5, 9.5, 2.0), (10.25, 11.25, 0.5))


def test_a_profile_as_costs() -> None:
    """The second starts half a second after the first of its stream, the third 0.75 s after its event."""
    found = calibrate(replace(profile_of(ROWS), accelerator="cuda"))
    assert found.chunks == {"k": {"F": 4.0, "B": 5.0}}
    assert (found.gap, found.wake) == (0.5, 0.75)
    assert found.touches["accumulate"].at(8) == 1.0


def test_on_a_host_instructions_count_for_what_they_computed() -> None:
    """Whatever else the machine did meanwhile, and however many cores there are."""
    for cores in (1, 2):
        found = calibrate(profile_of(ROWS, ROWS), cores=cores)
        assert found.chunks == {"k": {"F": 3.0, "B": 2.0}}
        assert found.touches["accumulate"].at(8) == 0.5
    loaded: tuple[Times, ...] = ((0.0, 40.0, 3.0), (40.5, 90.5, 2.0), (91.25, 92.25, 0.5))
    assert calibrate(profile_of(loaded)).chunks == {"k": {"F": 3.0, "B": 2.0}}


def test_a_table_tells_of_one_device_in_one_step() -> None:
    """Two devices and two steps: in each, two computations of 9 s in all."""
    profile = profile_of(ROWS, ROWS)
    twice = replace(profile, tracks=tuple(replace(track, steps=track.steps * 2) for track in profile.tracks))
    console = Console(file=io.StringIO(), width=160, markup=False)
    print_rows(rows_of(twice, by_node=False), "op", 18.0, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert next(line.split() for line in lines if line.startswith("compute"))[:5] == [
        "compute",
        "2",
        "9",
        "s",
        "50.0",
    ]


@pytest.mark.parametrize(
    ("places", "kept"),
    [
        ([0, 1, 2], {0, 1, 2}),
        ([2, 0, 1, 3], {1, 2, 3}),
        ([3, 2, 1], {2}),
        ([], set()),
        ([0, 3, 1, 2], {0, 2, 3}),
    ],
)
def test_the_longest_part_that_only_rises(places: list[int], kept: set[int]) -> None:
    assert longest_run(places) == kept


def test_an_instruction_touches_what_it_reads_and_writes() -> None:
    ins = Instr(op="add", node="a", stream="compute", reads=slots("a", "w"), writes=slots("b"))
    held = {slot("a"): Slot(nbytes=1, shares=((slot("s"), 4),)), slot("b"): Slot(nbytes=16)}
    plan = Plan(devices=(0,), instrs=(ins,), slots=held, residents={slot("w"): Slot(nbytes=64)})
    assert touched(plan, ins) == 1 + 4 + 16 + 64


def test_what_waited_for_another_stream_counts_from_its_end() -> None:
    """The second of its stream could start at 6, when the other stream's event came, and did at 7."""
    instrs = (
        Instr(op="compute", node="F[PP=0]", stream="compute", payload=Pass(phase="F", chunk="PP=0")),
        Instr(op="accumulate", node="a", stream="other", writes=slots("x"), signals=0),
        Instr(
            op="compute", node="B[PP=0]", stream="compute", payload=Pass(phase="B", chunk="PP=0"), waits=(0,)
        ),
    )
    profile = profile_of(((0.0, 4.0, 1.0), (0.0, 6.0, 1.0), (7.0, 9.0, 1.0)))
    plan = replace(profile.plans.plans[0], instrs=instrs)
    found = calibrate(replace(profile, plans=replace(profile.plans, plans=(plan,))))
    assert (found.gap, found.wake) == (0.0, 1.0)
