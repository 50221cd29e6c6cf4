"""Where the streams of an accelerator are, as the events of a step tell while the host waits for its end."""

from piper.plan.plan import Plan
from piper.runtime.stream_executor import before_waits, places_of_streams
from piper.workers.blame import Failure, Watcher, private_marks
from tests.runtime.grid import Cell, compiled


def plan_of(device: int) -> Plan:
    return compiled(Cell(case="mlp", schedule="1f1b", dp=2, zero=3)).plans.of(device)


def ran(plan: Plan, places: list[int]) -> list[int]:
    """Return the places with an event, of those that ran."""
    known = before_waits(plan)
    return [place for place in places if plan.instrs[place].signals is not None or place in known]


def test_streams_are_at_what_they_wait_for_nothing_to_begin() -> None:
    """In whatever order a step runs, all that runs next is shown, and nothing that waits for it."""
    plan = plan_of(2)
    signalled = {ins.signals: place for place, ins in enumerate(plan.instrs) if ins.signals is not None}
    for length in range(len(plan.instrs)):  # a step as it is issued, up to some instruction
        done, ended = list(range(length)), set()
        for stream in {ins.stream for ins in plan.instrs}:
            if all(place < length for place, ins in enumerate(plan.instrs) if ins.stream == stream):
                ended.add(stream)
        found = places_of_streams(plan, ran(plan, done), ended)
        assert set(found).isdisjoint(ended)
        for stream, place in found.items():
            ins = plan.instrs[place]
            assert ins.stream == stream
            assert place not in ran(plan, done)
            assert all(signalled[event] < length for event in ins.waits)
        shown = plan.instrs[length]
        assert found[shown.stream] <= length, "it runs next, or one before it that has no event"


def test_a_gather_that_never_ends_is_shown_alone() -> None:
    """A stage that has nothing without its parameters: computation waits for them and is not shown."""
    plan = plan_of(2)
    first = next(place for place, ins in enumerate(plan.instrs) if ins.op == "gather")
    others = [place for place, ins in enumerate(plan.instrs) if ins.op in ("load", "recv")]
    found = places_of_streams(plan, ran(plan, others), {plan.instrs[place].stream for place in others})
    assert found == {plan.instrs[first].stream: first}


def test_a_stream_that_waits_for_a_value_is_not_shown_at_what_it_computed_before() -> None:
    """Another device is late with the gradient of the second microbatch: this one computes nothing."""
    plan = plan_of(0)
    late = [place for place, ins in enumerate(plan.instrs) if ins.op == "recv"][-1]
    reader = next(place for place, ins in enumerate(plan.instrs) if plan.instrs[late].signals in ins.waits)
    before = [place for place in range(reader) if place != late]
    found = places_of_streams(plan, ran(plan, before), {"send", "load", "gather"})
    assert found == {"recv": late}


def test_marks_follow_the_streams() -> None:
    plan, failures = plan_of(2), list[Failure]()
    watcher = Watcher(2, private_marks(), failures.append)
    for place, ins in enumerate(plan.instrs):
        watcher.watch(place, ins, lambda: None)
    gathers, computes = (watcher.streams[stream] for stream in ("gather", "compute"))
    watcher.show({"gather": 4, "compute": 0})
    assert (watcher.marks[gathers], watcher.marks[computes]) == (5, 1)
    watcher.show({"compute": 2})
    assert (watcher.marks[gathers], watcher.marks[computes]) == (0, 3)
    watcher.show({})
    assert not any(watcher.marks)
