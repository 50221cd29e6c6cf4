"""Memory that crosses streams goes back only when the stream that took it runs after all who used it."""

import pytest

from piper.directives import Directive, apply, replicate, shard, split
from piper.ir.graph import start
from piper.ir.select import at
from piper.plan.memory_timeline import timeline
from piper.plan.plan import Plan, Plans
from piper.runtime.memory_release import predicted_peak, releases
from piper.schedules import one_f_one_b, zero_bubble
from tests.chain import chain
from tests.lower.lowering import lower


def pipeline(zero: int, *, experts: int = 0, parts: int = 4) -> Plans:
    strategy: list[Directive] = [split(at(), parts=parts)]
    for stage in range(2):
        devices = [2 * stage, 2 * stage + 1]
        strategy.append(replicate(at(PP=stage), devices, zero=zero))
        if experts:
            strategy.append(shard(at(EP=stage), devices))
    orders = one_f_one_b(2, parts) if experts else zero_bubble(2, parts)
    return lower(apply(start(chain(2, width=8, experts=experts)), [*strategy, *orders]))[0]


def reached(plan: Plan) -> list[set[int]]:
    """For each instruction, those that are over when it begins, with the waits that releases add."""
    handlings = releases(plan)
    signals = {ins.signals: place for place, ins in enumerate(plan.instrs)}
    before: list[set[int]] = []
    last: dict[str, int] = {}
    for place, (ins, handling) in enumerate(zip(plan.instrs, handlings, strict=True)):
        waited = [*(signals[event] for event in ins.waits), *handling.waits]
        if ins.stream in last:
            waited.append(last[ins.stream])
        before.append({done for other in waited for done in (*before[other], other)})
        last[ins.stream] = place
    return before


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_goes_back_is_used_by_nobody(zero: int, experts: int) -> None:
    for plan in pipeline(zero, experts=experts):
        users: dict[str, list[int]] = {}
        maker: dict[str, str] = {}
        for place, ins in enumerate(plan.instrs):
            for slot in (*ins.reads, *ins.writes, *ins.frees):
                users.setdefault(slot, []).append(place)
            for slot in ins.writes:
                maker.setdefault(slot, ins.stream)
        over = reached(plan)
        freed: set[str] = set()
        parked: set[str] = set()
        for place, (ins, handling) in enumerate(zip(plan.instrs, releases(plan), strict=True)):
            assert {*handling.frees, *handling.parks} == {*ins.frees}
            for slot in handling.frees:  # its memory may be taken again by whatever this stream does next
                assert maker[slot] == ins.stream
                assert all(user == place or user in over[place] for user in users[slot])
            for slot in handling.drops:
                assert maker[slot] == ins.stream
                assert over[place].issuperset(users[slot]), f"{slot} goes back too early at {ins.node}"
            freed.update(handling.frees, handling.drops)
            parked.update(handling.parks)
        assert freed | parked == plan.slots.keys()


def test_a_stream_waits_for_a_send_only_when_later_values_are_in_its_pipe() -> None:
    """A send ends when its receiver is ready: a stage that waited for it would be as late as its neighbour."""
    for plan in pipeline(0, parts=8):
        sends: dict[str | None, list[int]] = {}
        for place, (ins, handling) in enumerate(zip(plan.instrs, releases(plan), strict=True)):
            for waited in handling.waits:
                if plan.instrs[waited].op == "send":
                    pipe = sends[plan.instrs[waited].comm]
                    assert pipe.index(waited) < len(pipe) - 2, f"{ins.node} waits for {waited} at {place}"
            if ins.op == "send":
                sends.setdefault(ins.comm, []).append(place)
        early = {slot for pipe in sends.values() for place in pipe[:-3] for slot in plan.instrs[place].frees}
        assert early
        assert early <= {slot for handling in releases(plan) for slot in handling.drops}, "memory goes back"


def test_nothing_waits_for_the_last_send() -> None:
    """What is parked at the end of a step goes when the step is over: no stream has to wait for it."""
    plan = pipeline(0).of(2)
    parked = [slot for handling in releases(plan) for slot in handling.parks]
    dropped = {slot for handling in releases(plan) for slot in handling.drops}
    assert [slot for slot in parked if slot not in dropped]


def test_the_foretold_peak_counts_what_is_parked() -> None:
    for zero in (0, 2, 3):
        for plan in pipeline(zero):
            counted, predicted = timeline(plan).peak, predicted_peak(plan)
            assert counted <= predicted <= counted + max(slot.nbytes for slot in plan.slots.values()) * 3
