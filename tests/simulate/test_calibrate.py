"""Costs from a profile: what was measured comes back, what was not is worked out, what is wrong is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from piper import schedules
from piper.errors import ConfigError
from piper.ir.ids import Pass
from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans
from piper.simulate.calibrate import calibrate
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.measured import (
    NOTHING,
    Line,
    Measured,
    Prices,
    line_through,
    read_costs,
    two_features,
    write_costs,
)
from piper.simulate.profile import ChunkWork, Profile, Track, fingerprint, works_of
from piper.simulate.simulate import simulate
from tests.chain import chain
from tests.simulate.pipelines import Schedule, pipeline
from tests.simulate.test_profiles import measured

OTHERS: list[tuple[Schedule, int]] = [
    (schedules.gpipe, 8),
    (schedules.one_f_one_b, 4),
    (schedules.zero_bubble, 8),
]


def calibrated() -> Measured:
    plans, outline, _ = pipeline(schedules.one_f_one_b, 4, 8)
    found = simulate(plans, outline, Roofline(load_cluster("h100")))
    profile = measured(plans, found, steps=2, scale=1.0)
    profile = replace(profile, model=fingerprint(outline), works=works_of(outline.chunks))
    return calibrate(profile)


@pytest.mark.parametrize(("schedule", "microbatches"), OTHERS)
def test_costs_of_one_strategy_foretell_others(schedule: Schedule, microbatches: int) -> None:
    plans, outline, _ = pipeline(schedule, 4, microbatches)
    truth = simulate(plans, outline, Roofline(load_cluster("h100")))
    foretold = simulate(plans, outline, calibrated())
    assert foretold.step == pytest.approx(truth.step, rel=0.02)


def test_communications_of_an_accelerator_that_start_late_count() -> None:
    """One of four transfers starts 8 ms late: their median delay is 0, and the mean is what a step sees."""
    plans, outline, _ = pipeline(schedules.one_f_one_b, 4, 8)
    found = simulate(plans, outline, Roofline(load_cluster("h100")))
    profile = replace(
        measured(plans, found, steps=3, scale=1.0),
        model=fingerprint(outline),
        works=works_of(outline.chunks),
        accelerator="cuda",
    )
    sent = [ins.node for plan in plans for ins in plan.instrs if ins.op == "send"]
    late = set(sent[::4])

    def shifted(track: Track) -> Track:
        instrs = plans.of(track.device).instrs
        shift = [8e-3 * (ins.op in ("send", "recv") and ins.node in late) for ins in instrs]
        steps = (
            tuple((start + by, end + by, host) for (start, end, host), by in zip(step, shift, strict=True))
            for step in track.steps
        )
        return replace(track, steps=tuple(steps))

    slow = replace(profile, tracks=tuple(map(shifted, profile.tracks)))
    on_time, costs = calibrate(profile), calibrate(slow)
    assert on_time.late["send"] == on_time.late["recv"] == pytest.approx(0, abs=1e-6)
    assert costs.late["send"] == pytest.approx(8e-3 * len(late) / len(sent), rel=1e-3)
    assert simulate(plans, outline, on_time).step == pytest.approx(found.step, rel=0.02)
    assert simulate(plans, outline, costs).step > found.step + 2 * costs.late["send"]
    assert not calibrate(replace(slow, accelerator="cpu")).late


def test_halves_of_a_backward_come_from_the_whole_and_the_other_way_round() -> None:
    chunk = chain(2, split_cost=(1, 3, 1)).chunks[1]
    costs = Measured(
        model="", source="", chunks={chunk.key: {"F": 1.0, "B": 8.0}}, arithmetic=1e-12, traffic=0.0, gap=0.5
    )
    assert costs.compute(chunk, "F") == 1.5
    assert costs.compute(chunk, "BI") == pytest.approx(6.5)
    assert costs.compute(chunk, "BW") == pytest.approx(2.5)
    halves = replace(costs, chunks={chunk.key: {"BI": 2.0, "BW": 1.0}})
    assert halves.compute(chunk, "B") == 3.5
    assert replace(costs, chunks={}).compute(chunk, "F") == pytest.approx(1.5)


def at_sizes(*flops: int) -> list[Profile]:
    """Return profiles of a chunk whose forward takes 2 s and 1 s for every 10 operations."""
    found = []
    for number in flops:
        took = 2.0 + number / 10
        ins = Instr(op="compute", node="F[PP=0]", stream="compute", payload=Pass(phase="F", chunk="PP=0"))
        plan = Plan(devices=(0,), instrs=(ins,), slots={}, residents={})
        found.append(
            Profile(
                plans=Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False),
                tracks=(Track(device=0, steps=(((0.0, took, took),),)),),
                model="m",
                works={"PP=0": ChunkWork(key=f"k{number}", phases={"F": (number, 0)})},
            )
        )
    return found


def test_two_sizes_give_the_time_of_any_other(tmp_path: Path) -> None:
    """Half a microbatch takes more than half the time: 2 s of it do not depend on the size."""
    made = chain(1).chunks[0]
    chunk = replace(
        made, key="k5", phases={"F": replace(made.phases["F"], flops=5, bytes_moved=0)}, name="PP=0"
    )
    path = tmp_path / "costs.json"
    write_costs(calibrate(*at_sizes(10, 20)), path)
    both = read_costs(path)
    assert both.chunks == {"k10": {"F": 3.0}, "k20": {"F": 4.0}}
    assert both.compute(chunk, "F") == pytest.approx(2.5)
    assert both.compute(replace(chunk, key="k10"), "F") == 3.0
    alone = calibrate(*at_sizes(10))
    assert alone.sizes == {}
    assert alone.compute(chunk, "F") == pytest.approx(1.5)


def test_profiles_of_two_models_are_refused() -> None:
    one, other = at_sizes(10, 20)
    with pytest.raises(ConfigError, match="these profiles are of two models"):
        calibrate(one, replace(other, model="n"))


def test_a_cluster_says_what_the_profile_does_not() -> None:
    plans, outline, _ = pipeline(schedules.one_f_one_b, 4, 8)
    found = simulate(plans, outline, Roofline(load_cluster("h100")))
    profile = replace(measured(plans, found, scale=1.0), works=works_of(outline.chunks))
    costs = calibrate(profile, cluster=load_cluster("a100"))
    assert costs.talk("gather", 10**9, (0, 1)).seconds == pytest.approx(1e9 / 235e9)
    assert calibrate(profile).talk("gather", 10**9, (0, 1)).seconds != pytest.approx(1e9 / 235e9)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs, path = replace(calibrated(), late={"send": 1e-3}), tmp_path / "costs.json"
    write_costs(costs, path)
    assert read_costs(path) == replace(costs, source=str(path))


def test_lines() -> None:
    line = line_through([(1, 4), (10, 22), (10, 22), (5, 12)])
    assert (line.base, line.slope) == pytest.approx((2, 2))
    assert line_through([]) == NOTHING
    assert line_through([(10, 30)]) == Line(base=0.0, slope=3.0)
    small = line_through([(10, 30)], Line(base=20, slope=0.1))
    assert (small.base, small.slope) == pytest.approx((29, 0.1))
    assert two_features([(1, 0, 3), (0, 1, 5), (1, 1, 8)]) == pytest.approx((3, 5))
    assert two_features([(1, 1, 2), (2, 2, 4)]) == pytest.approx((2, 0))


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_costs(path)
    return str(caught.value)


def test_costs_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert refusal(path) == (
        f"{path}: this file holds no costs\n"
        "  why:  No such file or directory\n"
        "  hint: make it again: piper profile DIR --calibrate FILE"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "KeyError: 'piper_costs'"),
        ('{"piper_costs": 9}', "it is of form 9, not 1"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
    ],
)
def test_a_file_without_costs(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert refusal(path) == (
        f"{path}: this file holds no costs\n"
        f"  why:  {why}\n"
        "  hint: make it again: piper profile DIR --calibrate FILE"
    )


def test_costs_of_another_model() -> None:
    costs = replace(calibrated(), source="costs.json")
    prices = Prices(costs=costs, name=costs.source, measured=costs)
    prices.check(chain(4))
    with pytest.raises(ConfigError) as caught:
        prices.check(chain(3))
    assert str(caught.value) == (
        "costs.json: these costs were measured on another model\n"
        f"  costs:  model {fingerprint(chain(4))}\n"
        f"  recipe: model {fingerprint(chain(3))}\n"
        "  hint:   profile this model: piper train RECIPE --profile 5 --out DIR, then "
        "piper profile DIR --calibrate FILE"
    )


def test_costs_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_costs(calibrated(), tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: the costs cannot be written\n"
        "  why:  Is a directory\n"
        "  hint: name a file in a folder that exists and that you own"
    )
