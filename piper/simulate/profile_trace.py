"""A profile as a trace that Perfetto and Chrome open: a process for each device, a thread for each stream."""

import json
from collections.abc import Iterator

from piper.plan.instr import Instr
from piper.simulate.profile import Profile

MICRO = 1e6
WORTH = 1e-6  # seconds of waiting that are shown


def chrome_trace(profile: Profile) -> str:
    """Return the JSON text of a trace of all recorded steps of all devices, on one clock."""
    events = list(events_of(profile))
    about = {"recipe": profile.recipe, "on": profile.on, "clock_error_us": profile.error * MICRO}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def events_of(profile: Profile) -> Iterator[dict[str, object]]:
    """Yield the events of a trace, the names of processes and threads first."""
    origin = min((row[0] for t in profile.tracks for step in t.steps for row in step), default=0.0)
    threads: dict[int, dict[str, int]] = {}
    for track in profile.tracks:
        names = dict.fromkeys(ins.stream for ins in instrs(profile, track.device))
        threads[track.device] = {stream: number for number, stream in enumerate(names)}
    for device, streams in threads.items():
        yield {"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"device {device}"}}
        for stream, number in streams.items():
            yield {"ph": "M", "pid": device, "tid": number, "name": "thread_name", "args": {"name": stream}}
    for step in range(profile.count):
        begin = min(row[0] for track in profile.tracks for row in track.steps[step]) - origin
        for device, timeline in profile.timelines(step).items():
            for ins, span in zip(instrs(profile, device), timeline.spans, strict=True):
                where = {"ph": "X", "pid": device, "tid": threads[device][ins.stream]}
                if span.waited > WORTH:
                    start = (begin + span.start - span.waited) * MICRO
                    name = f"wait for peers of {ins.node}"
                    yield {**where, "name": name, "cat": "wait", "ts": start, "dur": span.waited * MICRO}
                args = {"op": ins.op, "step": profile.first + step, "bytes": ins.nbytes}
                times = {"ts": (begin + span.start) * MICRO, "dur": (span.end - span.start) * MICRO}
                yield {**where, "name": ins.node, "cat": ins.op, **times, "args": args}


def instrs(profile: Profile, device: int) -> tuple[Instr, ...]:
    """Return the instructions of one device."""
    return profile.plans.of(device).instrs
