"""What pictures and pages say, on cases of two or three cells."""

from typing import cast

from piper.plan.instr import Instr
from piper.plan.plan import Plan
from piper.simulate.account import MemoryUse, Span, Timeline
from piper.view.cells import Cell, Pipeline, lone_unpaired
from piper.view.facts import TickScale, data_edges, memory_facts
from piper.view.plan_trace import Process, events_of
from piper.view.svg import pair_spans
from tests.slots import slots


def cell(start: float, cost: float = 1, pair: int = -1) -> Cell:
    return Cell(start=start, cost=cost, phase="F", stage=0, part=(0,), pair=pair)


def plan_of(*instrs: Instr) -> Plan:
    return Plan(devices=(0,), instrs=instrs, slots={}, residents={})


def test_idle_is_a_share_of_all_rows() -> None:
    """Two rows of four units, of which six are busy."""
    pipeline = Pipeline(title="t", names=("a", "b"), rows=((cell(0, 4),), (cell(1, 2),)))
    assert (pipeline.end, pipeline.idle) == (4, 0.25)
    assert Pipeline(title="t", names=(), rows=()).idle == 0.0


def test_a_cell_whose_mate_runs_elsewhere_is_no_pair() -> None:
    row = [cell(0, pair=1), cell(1, pair=1), cell(2, pair=7), cell(3)]
    assert [found.pair for found in lone_unpaired(row)] == [1, 1, -1, -1]


def test_a_pair_is_outlined_as_one_only_where_nothing_lies_between() -> None:
    assert [*pair_spans((cell(0, 1, 1), cell(1, 2, 1)))] == [(0, 3)]
    assert [*pair_spans((cell(0, 1, 1), cell(2, 2, 1)))] == [(0, 1), (2, 4)]


def test_an_edge_begins_where_a_slot_was_written_last() -> None:
    write = Instr(op="compute", node="w", stream="compute", writes=slots("a"))
    again = Instr(op="accumulate", node="s", stream="compute", reads=slots("a"), writes=slots("a"))
    read = Instr(op="send", node="r", stream="send", reads=slots("a"))
    assert [*data_edges(plan_of(write, again, read))] == [(0, 1), (1, 2)]


def test_memory_is_told_only_where_it_changes() -> None:
    memory = MemoryUse(
        resident=1, times=(0.0, 1.0, 2.0, 3.0), live=(1, 5, 5, 2), peak=5, peak_at=0, at_peak=(("a", 4),)
    )
    found = memory_facts(memory, cast(TickScale, int))
    assert (found["times"], found["live"]) == ([0, 1, 3], [1, 5, 2])


def test_a_trace_is_in_microseconds() -> None:
    plan = plan_of(Instr(op="compute", node="F[PP=0]", stream="compute"))
    timeline = Timeline(devices=(0,), spans=(Span(start=0.5, end=0.75, waited=0.0),))
    device = Process(name="device 0", plan=plan, steps={0: (0.0, timeline)})
    event = [*events_of(3, device)][-1]
    assert (event["ts"], event["dur"], event["pid"]) == (500_000.0, 250_000.0, 3)
