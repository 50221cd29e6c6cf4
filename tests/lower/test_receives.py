"""When receives are issued: in time for their readers, and no earlier, since they take part of the device."""

from collections.abc import Callable, Sequence

import pytest

from piper.directives import Directive, place, replicate, split
from piper.ir.select import at
from piper.plan.plan import Plan, Plans
from piper.schedules import interleaved_1f1b, one_f_one_b, zbv, zero_bubble
from tests.chain import chain
from tests.lower.test_lines import compiled

STAGES = {"1f1b": 4, "zero-bubble": 4, "interleaved": 8, "zbv": 8}


def pipeline(kind: str, *, zero: int | None = None) -> Plans:
    """Four ranks, one chunk a stage; `zero`: two replicas of each."""
    orders: dict[str, Callable[[], Sequence[Directive]]] = {
        "1f1b": lambda: one_f_one_b(4, 8),
        "zero-bubble": lambda: zero_bubble(4, 8),
        "interleaved": lambda: interleaved_1f1b(4, 8),
        "zbv": lambda: zbv(4, 8),
    }
    strategy: list[Directive] = [split(at(), parts=8)]
    for stage in range(STAGES[kind]):
        rank = stage % 4 if kind != "zbv" or stage < 4 else 7 - stage
        if zero is None:
            strategy.append(place(at(PP=stage), rank))
        else:
            strategy.append(replicate(at(PP=stage), [2 * rank, 2 * rank + 1], zero=zero))
    return compiled(chain(STAGES[kind], width=64), *strategy, *orders[kind]())


def before(plan: Plan) -> list[set[int]]:
    """For each instruction, those that are over when it begins."""
    signals = {ins.signals: place for place, ins in enumerate(plan.instrs)}
    over: list[set[int]] = []
    last: dict[str, int] = {}
    for number, ins in enumerate(plan.instrs):
        waited = [signals[event] for event in ins.waits]
        if ins.stream in last:
            waited.append(last[ins.stream])
        over.append({done for other in waited for done in (*over[other], other)})
        last[ins.stream] = number
    return over


@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("kind", STAGES)
def test_a_receive_overlaps_only_the_last_computations_before_its_reader(kind: str, zero: int | None) -> None:
    seen = 0
    for plan in pipeline(kind, zero=zero):
        over = before(plan)
        computes = [number for number, ins in enumerate(plan.instrs) if ins.op == "compute"]
        for number, ins in enumerate(plan.instrs):
            if ins.op != "recv":
                continue
            reader = next(
                later
                for later in range(number, len(plan.instrs))
                if ins.writes[0] in plan.instrs[later].reads
            )
            earlier = [other for other in computes if other < min(number, reader)]
            ahead = [other for other in computes if other < reader]
            held_back = [other for other in earlier if other != ahead[-1]]
            assert set(held_back) <= over[number], f"{ins.node} begins beside an earlier computation"
            beside = [other for other in ahead if other not in over[number]]
            assert len(beside) <= 2, f"{ins.node} is issued {len(beside)} computations before its reader"
            seen += len(earlier) > 1
    assert seen > 10
