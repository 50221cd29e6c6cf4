"""Plans as a trace for Perfetto and Chrome: a process per program and clock, a thread per stream."""

import json
from collections.abc import Iterator

from piper.devices import show
from piper.plan.plan import Plan
from piper.simulate.timeline import Timeline
from piper.view.subject import Subject

MICRO = 1e6
Event = dict[str, object]


def chrome_trace(subject: Subject) -> str:
    """Return the JSON text of a trace: planned times of every program, then measured times of its devices."""
    about = {"title": subject.title, "clock": subject.clock, "by": "Piper"}
    return json.dumps({"traceEvents": list(events(subject)), "displayTimeUnit": "ms", "otherData": about})


def events(subject: Subject) -> Iterator[Event]:
    """Yield the events of all processes, in order of devices, planned before measured."""
    number = 0
    for plan, timeline in zip(subject.plans, subject.planned.timelines, strict=True):
        named = f"device{'s' if len(plan.devices) > 1 else ''} {show(plan.devices)}"
        yield from process(subject, number, f"{named}, planned", plan, timeline)
        number += 1
        for device in plan.devices:
            if device in subject.measured:
                name = f"device {device}, measured"
                yield from process(subject, number, name, plan, subject.measured[device])
                number += 1


def process(subject: Subject, number: int, name: str, plan: Plan, timeline: Timeline) -> Iterator[Event]:
    """Yield the events of one process: its name, its threads, and each instruction."""
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
    titles = {i: said.title for i, said in enumerate(subject.strategy)}
    streams = {stream: i for i, stream in enumerate(dict.fromkeys(ins.stream for ins in plan.instrs))}
    for stream, thread in streams.items():
        yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": stream}}
    for place, (ins, span) in enumerate(zip(plan.instrs, timeline.spans, strict=True)):
        by = [titles[number] for number in subject.origins.get(ins.node, ()) if number in titles]
        args: Event = {"instruction": place, "op": ins.op, "made by": by}
        if ins.comm:
            args |= {"communicator": ins.comm, "bytes": ins.nbytes}
        yield {
            "ph": "X",
            "pid": number,
            "tid": streams[ins.stream],
            "name": ins.node,
            "cat": ins.op,
            "ts": round(span.start * MICRO, 4),
            "dur": round((span.end - span.start) * MICRO, 4),
            "args": args,
        }
