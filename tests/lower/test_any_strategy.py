"""Random strategies over small graphs: each one is proven and computes what one device would, or is refused."""

from collections import Counter

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from piper.directives import apply
from piper.errors import ScheduleError
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.lower.state import Settings
from piper.plan.memory_timeline import timeline
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.machine import examine
from tests.lower.outlines import ROWS, fitted, frozen, layered, mixture, normed, skips
from tests.lower.random_strategies import strategy_of
from tests.plan.test_memory import held_at

OUTLINES: dict[str, CapturedModel] = {
    "chain": chain(3, width=6, rows=ROWS),
    "tied chain": chain(3, width=6, rows=ROWS, tied=True, layers=2),
    "expert chain": chain(2, width=6, rows=ROWS, experts=4),
    "tied expert chain": chain(2, width=6, rows=ROWS, experts=4, tied=True),
    "skips": skips(),
    "skips, halves apart": skips("tangents"),
    "skips, nothing saved": skips("inputs"),
    "layers": layered(),
    "layers, halves apart": layered("tangents"),
    "layers, nothing saved": layered("inputs"),
    "normed": normed(),
    "mixture": mixture(),
    "mixture, halves apart": mixture(halves="tangents"),
    "tied experts": mixture(tied=True),
    "frozen": frozen(),
}
NUMBERS = st.integers(0, 2**24)


ACCEPTED = 0.375  # at least, of some 0.43: a compiler that refuses everything is right about everything
EACH = 0.008  # at least, of each outline
# At most, about twice what is usual: refusals that are no mistake of the draw, such as a tag that nothing has.
RARE = {
    "this order can never run": 80,
    "cannot be resliced by samples": 80,
    "are not sharded alike": 60,
    "would live in two places": 50,
    "is placed on no device": 50,
}


@pytest.mark.timeout(180)  # about 10 s a thousand on an idle machine
@pytest.mark.parametrize("examples", [1000, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_strategy_is_right_or_refused(examples: int) -> None:
    accepted: Counter[str] = Counter()
    refused: list[str] = []

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(list(OUTLINES)), NUMBERS, st.lists(NUMBERS, max_size=3), st.booleans())
    def every(name: str, scaffold: int, others: list[int], clip: bool) -> None:
        outline = OUTLINES[name]
        strategy = strategy_of(outline, scaffold, others)
        note("\n".join(map(str, strategy)))
        try:
            graph = apply(start(outline), strategy)
            plans, work = lower(graph, Settings(clip=clip), fitted(graph))  # which proves them
        except ScheduleError as error:
            assert "hint:" in str(error)
            refused.append(str(error).splitlines()[0])
            return
        accepted[name] += 1
        examine(plans, work.graph, scaffold, clip=clip)
        for plan in plans:
            held = timeline(plan)
            assert held.peak == held_at(plan, held.peak_at) >= held.resident

    every()
    assert accepted.total() + len(refused) >= examples
    assert accepted.total() >= ACCEPTED * examples
    assert min(accepted[name] for name in OUTLINES) >= EACH * examples, accepted
    for what, most in RARE.items():
        assert 0 < sum(what in text for text in refused) <= most, what
