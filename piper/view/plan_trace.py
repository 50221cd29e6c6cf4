"""A subject as a trace for Perfetto and Chrome: a process per program and clock."""

from collections.abc import Iterator

from piper.ir.devices import in_words
from piper.simulate.trace_events import Process, chrome_trace
from piper.view.provenance import Subject

MARK = '"Piper"'  # shows that Piper wrote a trace, which may then be replaced


def plan_trace(subject: Subject) -> str:
    """Return the trace of planned times of every program, each followed by measured times of its devices."""
    return chrome_trace(processes_of(subject), {"title": subject.title, "clock": subject.clock})


def processes_of(subject: Subject) -> Iterator[Process]:
    """Yield the processes of a trace in order of devices, planned before measured."""
    titles = [said.title for said in subject.strategy]
    made_by = {
        node: [titles[number] for number in numbers if number < len(titles)]
        for node, numbers in subject.origins.items()
    }
    for plan, timeline in zip(subject.plans, subject.planned.timelines, strict=True):
        named = in_words(plan.devices)
        yield Process(name=f"{named}, planned", plan=plan, steps={0: (0.0, timeline)}, made_by=made_by)
        for device in plan.devices:
            if device in subject.measured:
                name, run = f"device {device}, measured", subject.measured[device]
                yield Process(name=name, plan=plan, steps={0: (0.0, run)}, made_by=made_by)
