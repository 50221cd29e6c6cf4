"""What of a communication stays in sight, and how little of an expert exchange DualPipe-V leaves there."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from benchmarks.exposure import Exposure, exposure, main_phase
from piper import at, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.chunk import Chunk, Phase
from piper.ir.devices import Devices
from piper.ir.graph import start
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.plan.plan import Plan
from piper.simulate.account import Span
from piper.simulate.costs import Talk
from piper.simulate.simulate import Simulation, simulate
from tests.chain import chain
from tests.lower.lowering import lower

EXCHANGES: tuple[Op, ...] = ("exchange",)
COMPUTE: dict[Phase, float] = {"F": 1.0, "B": 2.0, "BI": 1.0, "BW": 1.0}


def drawn(*times: tuple[Op, float, float]) -> tuple[Plan, list[Span]]:
    """A device's instructions and when they ran."""
    instrs = tuple(Instr(op=op, node=f"{op} {i}", stream=op) for i, (op, _, _) in enumerate(times))
    spans = [Span(start=begin, end=end) for _, begin, end in times]
    return Plan(devices=(0,), instrs=instrs, slots={}, residents={}), spans


def test_what_computes_hides_what_travels() -> None:
    found = exposure(*drawn(("compute", 0, 4), ("exchange", 1, 3), ("exchange", 3, 6)), EXCHANGES)
    assert found == Exposure(window=(0, 6), computing=4, communication=5, exposed=2)
    assert found.share == pytest.approx(0.4)
    assert found.seconds == 6


def test_what_is_in_sight_twice_counts_once() -> None:
    found = exposure(*drawn(("compute", 0, 1), ("exchange", 1, 3), ("exchange", 2, 4)), EXCHANGES)
    assert (found.communication, found.exposed) == (4, 3)


def test_other_communication_neither_hides_nor_counts() -> None:
    found = exposure(
        *drawn(("send", 0, 4), ("load", 0, 4), ("accumulate", 3, 4), ("exchange", 2, 4)), EXCHANGES
    )
    assert (found.communication, found.exposed) == (2, 1)


def test_outside_the_window_nothing_counts() -> None:
    drawing = drawn(("compute", 0, 2), ("exchange", 1, 5), ("exchange", 8, 9), ("compute", 4, 9))
    found = exposure(*drawing, EXCHANGES, (1, 6))
    assert found == Exposure(window=(1, 6), computing=3, communication=4, exposed=2)


def test_without_communication_nothing_is_in_sight() -> None:
    assert exposure(*drawn(("compute", 0, 2)), EXCHANGES).share == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Attention and experts of a unit each, little after them, and exchanges of a time of their own."""

    exchange: float
    cores: int = 0
    node: int = 8
    period: int = 1
    wake: float = 0.0

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        assert chunk is not None
        return COMPUTE[phase] * (0.1 if chunk.name.endswith("#1") else 1.0)

    def touch(self, op: Op, nbytes: int) -> float:
        return 0.0

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        return Talk(seconds=self.exchange if op == "exchange" else 0.0)


def experts_in_a_v(
    ranks: int, microbatches: int, ratio: float, orders: Sequence[Directive]
) -> tuple[Simulation, list[tuple[Exposure | None, Exposure]]]:
    """A step with a layer a stage whose exchanges take `ratio` of what it computes; by rank, what is exposed."""
    stages = 2 * ranks
    homes = [
        range(2 * rank, 2 * rank + 2) for rank in (min(stage, stages - 1 - stage) for stage in range(stages))
    ]
    strategy: list[Directive] = [replicate(at(PP=stage), homes[stage]) for stage in range(stages)]
    strategy += [shard(at(PP=stage, EP="*"), homes[stage], ways=2) for stage in range(stages)]
    strategy += [split(at(), parts=microbatches), *orders]
    outline = chain(stages, experts=4)
    plans, work = lower(apply(start(outline), strategy))
    layer = 2.1 * (COMPUTE["F"] + COMPUTE["B"])
    found = simulate(plans, outline, Exchanged(exchange=ratio * layer / 4))
    exposures = []
    for plan, timeline in zip(plans, found.timelines, strict=True):
        window = main_phase(work.graph, plan, timeline.spans)
        paired = window and exposure(plan, timeline.spans, EXCHANGES, window)
        exposures.append((paired, exposure(plan, timeline.spans, EXCHANGES)))
    return found, exposures


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 8), (2, 16), (4, 24)])
def test_dualpipe_v_hides_exchanges_in_its_main_phase(ranks: int, microbatches: int) -> None:
    orders = schedules.dualpipe_v(ranks, microbatches)
    found, exposures = experts_in_a_v(ranks, microbatches, 0.5, orders)
    for paired, whole in exposures:
        assert paired is not None
        assert paired.share < 0.05
        assert paired.exposed <= whole.exposed
        assert paired.communication < whole.communication
        assert whole.communication == pytest.approx(0.5 * whole.computing, rel=0.02)
    computing, talking = (
        max(getattr(whole, name) for _, whole in exposures) for name in ("computing", "communication")
    )
    assert (computing + talking) / found.step > 1.2  # with what fills and drains the pipeline


def test_a_schedule_without_pairs_has_no_main_phase() -> None:
    _, exposures = experts_in_a_v(2, 8, 0.5, schedules.zbv(2, 8))
    assert [paired for paired, _ in exposures] == [None, None]
    assert all(whole.share > 0.2 for _, whole in exposures)
