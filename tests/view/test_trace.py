"""The trace tells of every instruction."""

import json
from dataclasses import replace

from piper.view.plan_trace import plan_trace
from tests.view.scenes import again, demo, measured


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
