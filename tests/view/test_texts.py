"""The text timeline and the trace tell of every instruction."""

import json
from dataclasses import replace
from inspect import cleandoc

from piper import at, place, remat, schedules, split
from piper.directives import Directive
from piper.simulate.simulate import simulate
from piper.view.plan_trace import plan_trace
from piper.view.subject import Subject
from piper.view.text_timeline import timeline_text
from tests.view.scenes import Talking, again, demo, measured, subject_of


def pipeline(*more: Directive) -> Subject:
    stages = [place(at(PP=0), [0]), place(at(PP=1), [1])]
    strategy = [*stages, *more, split(at(), parts=2), *schedules.gpipe(2, 2)]
    subject = subject_of(2, strategy, experts=0)
    return replace(subject, planned=simulate(subject.plans, None, Talking()), clock="whole units")


def test_a_timeline_has_a_line_per_stream() -> None:
    assert timeline_text(pipeline(), 40) == cleandoc("""
        device 0
          compute  FFFFFF..........BBBBBBBBBBBB.
          load     l............................
          send     ..>>>>>......................
          recv     ...............<<...<<<......
          reduce   ...........................tt
        device 1
          compute  ....FFFFFFBBBBBBBBBBB........
          recv     ..<<<<<......................
          send     ...............>>...>>>......
          reduce   ...........................tt
        < receive, > send, B backward, F forward, a sum, l load, n norm, t total, u update, . idle
    """)


def test_a_forward_that_runs_again_has_a_letter_of_its_own() -> None:
    text = timeline_text(pipeline(remat(at(PP=0), budget=1, across="PP")), 40).splitlines()
    assert text[1] == "  compute  FFFFFRRR.......BBBBBRRRBBBBB."
    assert "F forward, R forward again, a sum" in text[-1]
    assert "again" not in timeline_text(pipeline())


def test_measured_streams_stand_below_planned_ones() -> None:
    subject = pipeline()
    text = timeline_text(replace(subject, measured=measured(subject, "none")), 40).splitlines()
    assert text[0] == "device 0"
    planned = [line for line in text if line.startswith("  compute")]
    assert planned[0] == planned[1], "the same run, twice as slow, fills the same line"
    assert "device 0, measured" in text


def test_a_trace_has_an_event_for_each_instruction_of_each_clock() -> None:
    subject = demo()
    run = replace(subject, measured=measured(subject, "F[PP=0 MB=0]"))
    events = json.loads(plan_trace(run))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        "devices 0,1, planned",
        "device 0, measured",
        "devices 2,3, planned",
        "device 2, measured",
    ]
    spans = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    assert len(spans) == 2 * sum(len(plan.instrs) for plan in subject.plans)
    first = next(event for event in spans if event["name"] == "F[PP=0 MB=0]")
    assert first["args"]["made by"] == [
        "replicate #0 (moe.py:4)",
        "split #8 (moe.py:4)",
        "order #9 (moe.py:5)",
    ]
    assert all(event["dur"] >= 0 for event in spans)


def test_a_trace_names_forwards_that_run_again_and_what_made_them_so() -> None:
    events = json.loads(plan_trace(again()))["traceEvents"]
    found = [event for event in events if event["name"].startswith("R[")]
    assert len(found) == sum(ins.again for plan in again().plans for ins in plan.instrs) == 4 * 3
    assert {event["cat"] for event in found} == {"compute"}
    assert all("remat #2 (moe.py:4)" in event["args"]["made by"] for event in found)
