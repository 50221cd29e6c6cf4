"""Small subjects for tests of drawings: compiled from a chain of stages, timed by the simulator."""

from collections.abc import Sequence
from functools import cache

from piper import at, place, remat, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.graph import start
from piper.simulate.account import Span, Timeline, communicators_of
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate
from piper.view.provenance import StrategyLine, Subject
from tests.chain import chain
from tests.lower.lowering import lower

SOURCE = '"""A recipe."""\n\nstrategy = [\n    replicate(...),\n    shard(...),\n]\n'


def v_shaped(ranks: int, microbatches: int) -> list[Directive]:
    """DualPipe-V over pairs of devices that shard their state and divide their experts."""
    strategy: list[Directive] = []
    for stage in range(2 * ranks):
        rank = min(stage, 2 * ranks - 1 - stage)
        devices = (2 * rank, 2 * rank + 1)
        strategy += [replicate(at(PP=stage), devices, zero=3), shard(at(PP=stage, EP="*"), devices)]
    return [*strategy, split(at(), parts=microbatches), *schedules.dualpipe_v(ranks, microbatches)]


def subject_of(
    stages: int, strategy: Sequence[Directive], *, experts: int = 4, title: str = "moe.py:demo"
) -> Subject:
    """A chain under a strategy, timed on h100."""
    outline = chain(stages, experts=experts)
    plans, work = lower(apply(start(outline), strategy))
    return Subject(
        title=title,
        plans=plans,
        planned=simulate(plans, outline, Roofline(load_cluster("h100"))),
        usable=tuple(load_cluster("h100").usable(communicators_of(plan)) for plan in plans),
        clock="h100",
        outline=outline,
        orderings=work.graph.orderings,
        strategy=tuple(
            StrategyLine(
                title=f"{said.verb} #{number} (moe.py:{4 + number % 2})",
                text=f"number {number}",
                source=f"moe.py:{4 + number % 2}",
            )
            for number, said in enumerate(strategy)
        ),
        origins={node.name: node.origin for node in work.sequence},
        temporal=work.temporal,
        source=SOURCE,
        source_name="moe.py",
    )


@cache
def demo() -> Subject:
    """Four stages with experts in a V on four devices: two programs, four microbatches."""
    return subject_of(4, v_shaped(2, 4))


@cache
def deep() -> Subject:
    """Sixteen stages and sixty-four microbatches."""
    places = [place(at(PP=stage), [stage]) for stage in range(16)]
    return subject_of(16, [*places, split(at(), parts=64), *schedules.one_f_one_b(16, 64)], experts=0)


@cache
def long() -> Subject:
    """More than a thousand instructions on each device."""
    return subject_of(4, v_shaped(2, 32))


@cache
def again() -> Subject:
    """Two stages with sharded state, of which the first keeps only its input and runs its forwards again."""
    stages = [replicate(at(PP=stage), [2 * stage, 2 * stage + 1], zero=3) for stage in range(2)]
    across = remat(at(PP=0), budget=1, across="PP")
    return subject_of(
        2, [*stages, across, split(at(), parts=4), *schedules.one_f_one_b(2, 4)], title="moe.py:again"
    )


def measured(subject: Subject, slow: str, factor: float = 3.0) -> dict[int, Timeline]:
    """A run of a subject: as planned, but twice as slow, and one node `factor` times slower still."""
    found = {}
    for plan, planned in zip(subject.plans, subject.planned.timelines, strict=True):
        late = 0.0
        spans = []
        for ins, span in zip(plan.instrs, planned.spans, strict=True):
            start, length = 2 * span.start + late, 2 * (span.end - span.start)
            if ins.node == slow:
                late += length * (factor - 1)
                length *= factor
            spans.append(Span(start=start, end=start + length))
        found[plan.devices[0]] = Timeline(devices=plan.devices[:1], spans=spans)
    return found
