"""Traces that Perfetto and Chrome open: a process for each device or program, a thread for each stream."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from piper.ir.devices import in_words
from piper.plan.plan import Plan
from piper.simulate.account import Timeline
from piper.simulate.profile import Profile
from piper.view.provenance import Subject

MICRO = 1e6
WORTH = 1e-6  # seconds of waiting that are shown
Event = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A device or program in a trace, in some steps."""

    name: str
    plan: Plan
    steps: Mapping[int, tuple[float, Timeline]]  # by number: when it begins, in seconds, and its times
    made_by: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by node


def chrome_trace(processes: Iterable[Process], about: Mapping[str, object]) -> str:
    """Return the JSON text of a trace."""
    events = [event for pid, process in enumerate(processes) for event in events_of(pid, process)]
    other = {**about, "by": "Piper"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def events_of(pid: int, process: Process) -> Iterator[Event]:
    """Yield the events of one process: its name, its threads, then each instruction of each step."""
    instrs = process.plan.instrs
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process.name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    streams = {stream: i for i, stream in enumerate(dict.fromkeys(ins.stream for ins in instrs))}
    for stream, thread in streams.items():
        yield {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": stream}}
    for step, (begin, timeline) in process.steps.items():
        for place, (ins, span) in enumerate(zip(instrs, timeline.spans, strict=True)):
            where = {"ph": "X", "pid": pid, "tid": streams[ins.stream]}
            if span.waited > WORTH:
                long = times(begin + span.start - span.waited, span.waited)
                yield {**where, "name": f"wait for peers of {ins.node}", "cat": "wait", **long}
            args: Event = {"instruction": place, "op": ins.op, "step": step}
            if ins.comm:
                args |= {"communicator": ins.comm, "bytes": ins.nbytes}
            if ins.node in process.made_by:
                args["made by"] = list(process.made_by[ins.node])
            long = times(begin + span.start, span.end - span.start)
            yield {**where, "name": ins.node, "cat": ins.op, **long, "args": args}


def times(start: float, seconds: float) -> Event:
    """Return a start and a length in microseconds, as traces have them."""
    return {"ts": round(start * MICRO, 4), "dur": round(seconds * MICRO, 4)}


def profile_trace(profile: Profile) -> str:
    """Return the trace of all recorded steps of all devices, on one clock."""
    begins = [min(row[0] for t in profile.tracks for row in t.steps[n]) for n in range(profile.count)]
    steps = [profile.timelines(number) for number in range(profile.count)]
    processes = (
        Process(
            name=f"device {track.device}",
            plan=profile.plans.of(track.device),
            steps={
                profile.first + number: (begin - begins[0], steps[number][track.device])
                for number, begin in enumerate(begins)
            },
        )
        for track in profile.tracks
    )
    about = {"recipe": profile.recipe, "on": profile.on, "clock_error_us": profile.error * MICRO}
    return chrome_trace(processes, about)


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
