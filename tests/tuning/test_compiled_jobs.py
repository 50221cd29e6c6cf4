"""What is predicted for a job that will be compiled is what its compiled program runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from piper.capture.recordings import Recordings
from piper.compiler import Program, compile
from piper.directives import Directive
from piper.runtime.memory_release import predicted_peak
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.measured import Prices
from piper.simulate.simulate import simulate
from piper.tuning.choice import StrategyChoice
from piper.tuning.evaluate import evaluate
from piper.tuning.model import captured_model
from piper.tuning.space import grid_of
from piper.tuning.strategy_search import StrategySearch
from tests.tuning.models import JOB, SMALL, Everything, everything

ALL = 10**12
COSTS = Roofline(load_cluster("h100"))


def compiled_search() -> StrategySearch:
    """A search for a job that will be compiled, which has not begun."""
    model = captured_model(JOB, Prices(costs=COSTS, name="h100"), SMALL, 4, compile=True)
    return StrategySearch(
        model=model,
        space=SMALL,
        gap=0.0,
        synthesis_trials=60,
        report=lambda search, found: None,
    )


@pytest.fixture(scope="module")
def whole() -> Everything:
    return everything(compiled_search(), ALL)


def compiled(strategy: Sequence[Directive], cache: Path, known: Program | Recordings | None) -> Program:
    job = replace(JOB, strategy=list(strategy))
    return compile(job, device="cpu", compile=True, cache=cache, captured=known)


def added_apart(program: Program) -> list[str]:
    """Return the instructions that add gradients to a sum and do nothing else."""
    adding = [ins for plan in program.plans for ins in plan.instrs if ins.op == "accumulate"]
    return [ins.node for ins in adding if any(slot.kind == "gradient" for slot in ins.reads)]


def test_a_prediction_is_that_of_the_compiled_program(whole: Everything, tmp_path: Path) -> None:
    program = None
    for microbatches in (1, 2, 4):
        some = [found for found in whole.found if found.choice.microbatches == microbatches]
        for found in some[:: len(some) // 4]:
            program = compiled(found.strategy, tmp_path, program)
            made = simulate(program.plans, program.outline, COSTS)
            peaks = [
                max(memory.peak, predicted_peak(plan))
                for memory, plan in zip(made.memories, program.plans, strict=True)
            ]
            assert (max(peaks), made.step) == (found.peak, found.step), found.choice.label


def test_compiled_backwards_that_add_gradients_are_predicted_to(whole: Everything) -> None:
    several = next(
        one for one in whole.found if one.choice.microbatches == 4 and set(one.choice.zeros) == {0}
    )
    program = whole.search.model.compile(list(several.strategy))
    assert not added_apart(program)
    assert any(ins.adds_to for plan in program.plans for ins in plan.instrs)
    assert added_apart(compile(replace(JOB, strategy=list(several.strategy)), device="cpu"))


def test_bounds_hold_for_compiled_jobs(whole: Everything) -> None:
    for leaf, found in zip(whole.leaves, whole.found, strict=True):
        assert leaf.bound <= found.step * (1 + 1e-9), leaf.choice.label
        assert leaf.memory.total <= found.peak, leaf.choice.label


def test_a_layer_that_adds_its_gradients_only_reads_the_sum(whole: Everything) -> None:
    model = whole.search.model
    one, several = (
        model.layers(
            StrategyChoice(
                ranks=1, replicas=1, rows=2, microbatches=number, sizes=(4,), recompute=SMALL.recompute[0]
            )
        ).layers[1]
        for number in (1, 2)
    )
    nbytes = sum(held.trained_bytes for held in one.parameters.values())
    assert several.adds == COSTS.touch("compute", nbytes)
    assert one.adds == COSTS.touch("accumulate", 3 * nbytes)


@pytest.mark.parametrize(("microbatches", "zeros"), [(1, (0, 0)), (1, (2, 0)), (1, (3, 3)), (2, (0, 0))])
def test_what_is_captured_before_an_evaluation_is_what_it_needs(
    microbatches: int, zeros: tuple[int, ...]
) -> None:
    model = compiled_search().model
    choice = StrategyChoice(
        ranks=2,
        replicas=2,
        rows=8 // microbatches,
        microbatches=microbatches,
        sizes=(1, 3),
        schedule="1f1b",
        zeros=zeros,
    )
    model.capture(choice)
    known = set(model.capturing.recordings.differentiated)
    evaluate(model, choice, grid_of(choice))
    assert set(model.capturing.recordings.differentiated) == known


def test_what_was_only_simulated_is_compiled_before_it_runs(whole: Everything, tmp_path: Path) -> None:
    """The search and a program that runs share recordings, but not code that is not compiled."""
    known = whole.search.model.capturing.complete
    program = compiled(whole.found[0].strategy, tmp_path, known)
    assert [code.cache is not None for code in program.codes.values()] == [True]
