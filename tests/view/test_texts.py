"""The text timeline and the trace tell of every instruction."""

import json
from dataclasses import replace
from inspect import cleandoc

from piper import at, place, schedules, split
from piper.simulate.simulate import simulate
from piper.view.subject import Subject
from piper.view.text import timeline_text
from piper.view.trace import chrome_trace
from tests.view.scenes import Talking, demo, measured, subject_of


def pipeline() -> Subject:
    strategy = [place(at(PP=0), [0]), place(at(PP=1), [1]), split(at(), parts=2), *schedules.gpipe(2, 2)]
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
        < receive, > send, B backward, F forward, a accumulate, l load, n norm, t total, u update, . idle
    """)


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
    events = json.loads(chrome_trace(run))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        "devices 0,1, planned",
        "device 0, measured",
        "devices 2,3, planned",
        "device 2, measured",
    ]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * sum(len(plan.instrs) for plan in subject.plans)
    first = next(event for event in spans if event["name"] == "F[PP=0 MB=0]")
    assert first["args"]["made by"] == [
        "replicate #0 (moe.py:4)",
        "split #8 (moe.py:4)",
        "order #9 (moe.py:5)",
    ]
    assert all(event["dur"] >= 0 for event in spans)
