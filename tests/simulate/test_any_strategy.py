"""Random strategies on the clock: everything ends, in order, when all it needs is there, and adds up."""

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from piper.directives import apply
from piper.errors import ScheduleError
from piper.ir.graph import start
from piper.plan.plan import Plan, Plans
from piper.simulate.account import Timeline
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Costs, Roofline, Unit
from piper.simulate.simulate import Simulation, simulate
from tests.lower.lowering import lower
from tests.lower.outlines import fitted
from tests.lower.random_strategies import strategy_of
from tests.lower.test_any_strategy import NUMBERS, OUTLINES

COSTS: dict[str, Costs] = {
    "units": Unit(),
    "h100": Roofline(load_cluster("h100")),
    "cpu": Roofline(load_cluster("cpu")),
}
CLOSE = 1e-9


ACCEPTED = 75  # at least, of 200: strategies that are refused show nothing


@pytest.mark.timeout(180)  # about 5 s on an idle machine
def test_every_strategy_runs_on_the_clock() -> None:
    simulated: list[str] = []

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(
        st.sampled_from(list(OUTLINES)),
        NUMBERS,
        st.lists(NUMBERS, max_size=3),
        st.sampled_from(sorted(COSTS)),
    )
    def every(name: str, scaffold: int, others: list[int], costs: str) -> None:
        outline = OUTLINES[name]
        strategy = strategy_of(outline, scaffold, others)
        note("\n".join(map(str, strategy)))
        try:
            graph = apply(start(outline), strategy)
            plans, work = lower(graph, None, fitted(graph))
        except ScheduleError:
            return
        simulated.append(costs)
        found = simulate(plans, work.graph.outline, COSTS[costs])
        for plan, timeline in zip(plans, found.timelines, strict=True):
            everything_is_in_order(plan, timeline)
        communications_are_one_event(plans, found)
        it_adds_up(plans, found)

    every()
    assert len(simulated) >= ACCEPTED
    assert set(simulated) == set(COSTS)


def everything_is_in_order(plan: Plan, timeline: Timeline) -> None:
    streams: dict[str, float] = {}
    events: dict[int, float] = {}
    for ins, span in zip(plan.instrs, timeline.spans, strict=True):
        assert span.waited >= 0
        assert span.end >= span.start
        turn = span.start - span.waited
        assert turn >= streams.get(ins.stream, 0.0) - CLOSE, f"{ins.node} before its stream is free"
        assert all(turn >= events[event] - CLOSE for event in ins.waits), f"{ins.node} before its event"
        streams[ins.stream] = span.end
        if ins.signals is not None:
            events[ins.signals] = span.end


def communications_are_one_event(plans: Plans, found: Simulation) -> None:
    """All members of a group are in it at the same time, from its start to its end."""
    program = {device: number for number, plan in enumerate(plans) for device in plan.devices}
    times = [
        {(ins.node, ins.comm, ins.op): span for ins, span in zip(plan.instrs, timeline.spans, strict=True)}
        for plan, timeline in zip(plans, found.timelines, strict=True)
    ]
    for plan in plans:
        for ins in plan.instrs:
            if ins.comm is None:
                continue
            for group in plans.comms[ins.comm].groups:
                if plans.comms[ins.comm].kind == "pairs":
                    sides = [(group[0], "send"), (group[-1], "recv")]
                else:
                    sides = [(device, ins.op) for device in group]
                spans = {
                    (span.start, span.end)
                    for device, op in sides
                    if (span := times[program[device]].get((ins.node, ins.comm, op))) is not None  # type: ignore[arg-type]
                }
                assert len(spans) <= 1, ins.node


def it_adds_up(plans: Plans, found: Simulation) -> None:
    assert found.step == max((timeline.end for timeline in found.timelines), default=0.0)
    for account, memory in zip(found.accounts, found.memories, strict=True):
        assert account.busy + account.bubble == pytest.approx(found.step)
        assert sum(account.exposed.values()) <= account.bubble + CLOSE
        assert memory.peak == sum(nbytes for _, nbytes in memory.at_peak) >= memory.resident
        assert not memory.live or memory.live[-1] == memory.resident
        assert max(memory.live, default=memory.resident) <= memory.peak
    if found.path:
        assert found.path[0].reason == "first"
        assert found.path[-1].end == found.step
        for before, after in zip(found.path, found.path[1:], strict=False):
            assert before.end == pytest.approx(after.start, abs=CLOSE)
