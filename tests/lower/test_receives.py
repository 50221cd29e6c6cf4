"""Receives begin just before their readers: one that waits takes multiprocessors from computations."""

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
def test_a_receive_overlaps_only_the_last_computation_before_its_reader(kind: str, zero: int | None) -> None:
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
            overlapped = max((other for other in computes if other < reader), default=-1)
            assert {other for other in earlier if other != overlapped} <= over[number], (
                f"{ins.node} begins beside an earlier computation"
            )
            seen += len(earlier) > 1
    assert seen > 10
