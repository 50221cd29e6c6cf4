"""Profiles: their folder, one clock, who waited, the trace, and what is refused."""

import json
from pathlib import Path

import pytest

from piper import schedules
from piper.errors import ConfigError
from piper.plan.plan import Plans
from piper.simulate.profile import (
    Profile,
    Track,
    fingerprint,
    read_profile,
    works_of,
    write_profile,
)
from piper.simulate.simulate import Simulation
from piper.view.plan_trace import profile_trace
from tests.chain import chain
from tests.simulate.pipelines import pipeline
from tests.simulate.test_simulate import Timed, job, run, step


def measured(plans: Plans, found: Simulation, steps: int = 1, scale: float = 1e-3) -> Profile:
    """A simulated step as if it had been recorded, again and again."""
    tracks = []
    for plan, timeline in zip(plans, found.timelines, strict=True):
        rows = [
            tuple(
                (
                    scale * (span.start - span.waited) + n,
                    scale * span.end + n,
                    scale * (span.end - span.start),
                )
                for span in timeline.spans
            )
            for n in range(steps)
        ]
        tracks += [Track(device=device, steps=tuple(rows), error=1e-5) for device in plan.devices]
    return Profile(plans=plans, tracks=tuple(tracks), model="m", recipe="r.py:f", on="local", first=3)


def meeting() -> Profile:
    sender = [
        step("compute", "a", "c", signals=0),
        step("send", "t", "send", waits=(0,), comm="0>1", nbytes=4),
    ]
    receiver = [step("recv", "t", "recv", comm="0>1", nbytes=4)]
    plans = job(sender, receiver, comms={"0>1": ((0, 1),)})
    return measured(plans, run(plans)[0], steps=3)


def test_a_communication_starts_when_its_last_member_is_ready() -> None:
    timelines = meeting().timelines(0)
    received = timelines[1].spans[0]
    assert (received.start, received.end) == pytest.approx((1e-3, 5e-3))
    assert received.waited == pytest.approx(1e-3)
    assert timelines[0].spans[1].waited == 0


def test_the_clock_may_be_off_by_what_two_devices_are() -> None:
    assert meeting().error == pytest.approx(2e-5)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    plans, outline, _ = pipeline(schedules.one_f_one_b, 2, 3, replicas=2)
    found = run(plans, Timed())[0]
    profile = Profile(
        plans=plans,
        tracks=measured(plans, found, steps=2).tracks,
        model=fingerprint(outline),
        recipe="r.py:f",
        on="local",
        first=3,
        works=works_of(outline.chunks),
    )
    write_profile(profile, tmp_path / "profile")
    again = read_profile(tmp_path)
    assert (again.plans, again.works, again.model) == (profile.plans, profile.works, profile.model)
    assert again.count == 2
    assert again.seconds(0) == pytest.approx(found.step * 1e-3)
    ours, theirs = again.timelines(1), profile.timelines(1)
    for device in range(4):
        for a, b in zip(ours[device].spans, theirs[device].spans, strict=True):
            assert (a.start, a.end, a.waited) == pytest.approx((b.start, b.end, b.waited), abs=1e-6)


def test_models_that_differ_have_different_fingerprints() -> None:
    assert fingerprint(chain(2)) == fingerprint(chain(2))
    assert len({fingerprint(chain(2)), fingerprint(chain(3)), fingerprint(chain(2, width=8))}) == 3


def test_a_trace_has_a_process_for_each_device_and_a_thread_for_each_stream() -> None:
    trace = json.loads(profile_trace(meeting()))
    names = {
        (e["pid"], e.get("tid"), e["args"]["name"])
        for e in trace["traceEvents"]
        if "name" in e.get("args", {})
    }
    assert names == {
        (0, None, "device 0"), (0, 0, "c"), (0, 1, "send"), (1, None, "device 1"), (1, 0, "recv"),
    }  # fmt: skip
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e.get("args", {}).get("step") == 3]
    assert [(e["pid"], e["name"], e["cat"]) for e in spans] == [
        (0, "a", "compute"),
        (0, "t", "send"),
        (1, "t", "recv"),
    ]
    assert spans[2]["ts"] == pytest.approx(1000) and spans[2]["dur"] == pytest.approx(4000)
    assert any(e["name"] == "wait for peers of t" and e["pid"] == 1 for e in trace["traceEvents"])


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    return str(caught.value)


def test_a_run_folder_without_a_profile(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"{tmp_path}: there is no profile\n"
        f"  looked: for {tmp_path}/profile/profile.json\n"
        "  hint:   record one: piper train RECIPE --profile 5 --out DIR"
    )


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    assert refusal(path) == (
        f"{path}: there is no such folder\n"
        f"  looked: for {path}/profile/profile.json\n"
        "  hint:   record one: piper train RECIPE --profile 5 --out DIR"
    )


def test_a_profile_that_is_broken(tmp_path: Path) -> None:
    write_profile(meeting(), tmp_path)
    (tmp_path / "device-1.json").unlink()
    assert refusal(tmp_path) == (
        f"{tmp_path}: this profile cannot be read\n"
        f"  why:  No such file or directory: {tmp_path}/device-1.json\n"
        "  hint: record it again: piper train RECIPE --profile 5 --out DIR"
    )


def test_a_profile_of_other_plans(tmp_path: Path) -> None:
    write_profile(meeting(), tmp_path)
    other = json.loads((tmp_path / "device-1.json").read_text())
    for name in ("start_s", "end_s", "cpu_s"):
        other[name] = [row * 2 for row in other[name]]
    (tmp_path / "device-1.json").write_text(json.dumps(other))
    assert refusal(tmp_path) == (
        f"{tmp_path}: this profile cannot be read\n"
        "  why:  device 1 has not one time for each of its 1 instructions\n"
        "  hint: record it again: piper train RECIPE --profile 5 --out DIR"
    )


def test_a_profile_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        write_profile(meeting(), tmp_path / "profile")
    assert str(caught.value) == (
        f"{tmp_path}/profile: the profile cannot be written\n"
        "  why:  File exists\n"
        "  hint: name a folder you own, on a disk with room: --out DIR"
    )
