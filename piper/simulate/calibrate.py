"""Makes a profile into costs: the time of chunks, copies and communication over all recorded steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from piper.errors import ConfigError
from piper.plan.ops import COMMUNICATION
from piper.plan.plan import Plan
from piper.simulate.account import Timeline
from piper.simulate.cluster import Cluster
from piper.simulate.engine import touched
from piper.simulate.measured import Line, Measured, by_size, line_through, two_features
from piper.simulate.profile import ChunkWork, Profile

LEAST = 1e-7  # seconds: the clock cannot tell a shorter time from zero
Points = list[tuple[float, float]]  # size, seconds


@dataclass(slots=True)
class MeasuredTimes:
    """The times that a profile holds, before they are made into costs."""

    chunks: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by a chunk's key and phase
    touches: dict[str, Points] = field(default_factory=dict)
    talks: dict[str, Points] = field(default_factory=dict)
    late: dict[str, list[float]] = field(default_factory=dict)  # how late communications start, by op
    gaps: list[float] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)


def calibrate(profile: Profile, *others: Profile, cores: int = 0, cluster: Cluster | None = None) -> Measured:
    """Make a profile into costs. On a host, `cores` is how many its devices share.

    others: more profiles of the model. If their microbatches have another size, the time of a chunk at any
    size follows from a line through the sizes that were measured.

    On a host, an instruction that computes costs the time for which its thread was computing, so that other
    work of a loaded machine does not count. The simulation models devices that share cores by itself. On an
    accelerator it costs the time from its start to its end. There a few communications of a step may start or
    end late, by more than all the others take: means over a step count these, and their median over steps
    leaves out the steps that something else has slowed down.
    cluster: gives the cost of the kinds and sizes of communication that the profile does not have.
    """
    samples = MeasuredTimes()
    for one in (profile, *others):
        check_same_model(profile, one)
        collect_times(one, samples, by_thread=one.accelerator == "cpu")
    chunks = {
        key: {phase: median(times) for phase, times in phases.items()}
        for key, phases in samples.chunks.items()
    }
    works = {work.key: work.phases for one in (profile, *others) for work in one.works.values()}
    arithmetic, traffic = two_features(
        [
            (*amounts.get(phase, (0, 0)), seconds)
            for key, amounts in works.items()
            for phase, seconds in chunks.get(key, {}).items()
        ]
    )
    any_touch = line_through([point for points in samples.touches.values() for point in points])
    any_talk = line_through([point for points in samples.talks.values() for point in points])
    if cluster is not None:
        link = cluster.links[0]
        any_talk = Line(base=link.latency, slope=1 / link.bandwidth)
    return Measured(
        model=profile.model,
        source=profile.recipe,
        chunks=chunks,
        sizes=sizes_of((profile, *others), chunks),
        arithmetic=arithmetic,
        traffic=traffic,
        touches={"": any_touch, **{op: line_through(at, any_touch) for op, at in samples.touches.items()}},
        talks={"": any_talk, **{op: line_through(at, any_talk) for op, at in samples.talks.items()}},
        late={op: median(times) for op, times in samples.late.items()},
        gap=median(samples.gaps) if samples.gaps else 0.0,
        wake=median(samples.wakes) if samples.wakes else 0.0,
        cores=cores,
        node=64,
    )


def collect_times(profile: Profile, samples: MeasuredTimes, *, by_thread: bool) -> None:
    """Add the times of all recorded steps. by_thread: of computing threads, not of the wall clock."""
    for step in range(profile.count):
        timelines = profile.timelines(step)
        found = samples if by_thread else replace(samples, talks={}, late={})
        for track in profile.tracks:
            plan, timeline = profile.plans.of(track.device), timelines[track.device]
            host = [row[2] for row in track.steps[step]] if by_thread else None
            add_times(found, profile.works, plan, timeline, host)
        if not by_thread:
            for op, points in found.talks.items():
                samples.talks.setdefault(op, []).extend(
                    (size, mean(times)) for size, times in by_size(points)
                )
            for op, times in found.late.items():
                samples.late.setdefault(op, []).append(mean(times))


def add_times(
    samples: MeasuredTimes,
    works: Mapping[str, ChunkWork],
    plan: Plan,
    timeline: Timeline,
    host: list[float] | None,
) -> None:
    """Add the times of one device's instructions in one step, and their delays after what let them start.

    What lets an instruction start is on its own stream or on another. host: the seconds for which its thread
    computed. On a host a communication is a call like any other. On an accelerator (None) its delays are of
    their own kind.
    """
    last: dict[str, int] = {}
    signalled = plan.signallers
    for place, (ins, span) in enumerate(zip(plan.instrs, timeline.spans, strict=True)):
        communicates = ins.op in COMMUNICATION
        took = max(span.end - span.start if communicates or host is None else host[place], LEAST)
        if not communicates and ins.op == "compute":
            by_phase = samples.chunks.setdefault(works[ins.computes.chunk].key, {})
            by_phase.setdefault(ins.computes.phase, []).append(took)
        elif not communicates:
            samples.touches.setdefault(ins.op, []).append((touched(plan, ins), took))
        elif ins.comm is not None:
            samples.talks.setdefault(ins.travels_as, []).append((ins.nbytes, took))
        own = timeline.spans[last[ins.stream]].end if ins.stream in last else None
        others = [timeline.spans[signalled[event]].end for event in ins.waits]
        before = others if own is None else [own, *others]
        if before:
            delays = samples.gaps if own == max(before) else samples.wakes
            if communicates and host is None:
                delays = samples.late.setdefault(ins.travels_as, [])
            delays.append(max(0.0, span.start - span.waited - max(before)))
        last[ins.stream] = place


def check_same_model(one: Profile, other: Profile) -> None:
    """Refuse profiles of two models."""
    if one.model != other.model:
        raise ConfigError(
            "these profiles are of two models",
            by=other.recipe or "profile",
            facts={one.recipe or "the first": f"model {one.model}", "this one": f"model {other.model}"},
            hint="profile one model at several microbatch sizes: only its strategy may differ",
        )


def sizes_of(
    profiles: Sequence[Profile], chunks: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Line]]:
    """Return the lines of the chunks that were measured at several sizes, by name and phase."""
    points: dict[tuple[str, str], Points] = {}
    for profile in profiles:
        for name, work in profile.works.items():
            for phase, seconds in chunks.get(work.key, {}).items():
                if phase in work.phases:
                    points.setdefault((name, phase), []).append((float(sum(work.phases[phase])), seconds))
    found: dict[str, dict[str, Line]] = {}
    for (name, phase), measured in points.items():
        if len({size for size, _ in measured}) > 1:
            found.setdefault(name, {})[phase] = line_through(measured)
    return found
