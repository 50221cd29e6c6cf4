"""The search finds what trying everything finds, and its bounds hold."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import piper
from piper.compiler import compile
from piper.runtime.memory_release import predicted_peak
from piper.schedules.synthesis.synthesise import Synthesised, synthesise
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.measured import Measured, write_costs
from piper.simulate.simulate import simulate
from piper.tuning.bounds import LeastMemory, rank_memory
from piper.tuning.choice import StrategyChoice
from piper.tuning.evaluate import CandidateGroup, Evaluation, EvaluationsAhead, Leaf, Queue
from piper.tuning.forked_calls import run_together
from piper.tuning.space import even
from piper.tuning.strategy_search import StrategySearch
from piper.tuning.tune import tune
from tests.tuning.models import JOB, SMALL, Everything, everything, search_of
from tests.warm import children

ALL = 10**12
CLUSTERS = ("h100", pytest.param("cpu", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=CLUSTERS)
def whole(request: pytest.FixtureRequest) -> Everything:
    return everything(search_of(SMALL, 4, request.param), ALL)


@pytest.fixture(scope="module")
def search() -> StrategySearch:
    return search_of(SMALL, 4, "h100")


def test_the_space_has_what_it_should(whole: Everything) -> None:
    choices = [leaf.choice for leaf in whole.leaves]
    assert len(choices) == len(set(choices)) == 112
    assert {choice.schedule for choice in choices} == {"", "1f1b", "zero-bubble", "zbv", "synthesised"}
    assert {choice.microbatches for choice in choices} == {1, 2, 4}
    assert {choice.zeros for choice in choices if choice.ranks == 1} == {(0,), (1,), (2,), (3,)}
    assert {len(choice.sizes) for choice in choices} == {1, 2, 4}


def test_no_step_is_shorter_than_its_bound(whole: Everything) -> None:
    for leaf, found in zip(whole.leaves, whole.found, strict=True):
        assert leaf.bound <= found.step * (1 + 1e-9), leaf.choice.label


def test_no_peak_is_lower_than_its_bound(whole: Everything) -> None:
    for leaf, found in zip(whole.leaves, whole.found, strict=True):
        assert leaf.memory.total <= found.peak, leaf.choice.label


def test_the_search_finds_the_best_of_all(whole: Everything) -> None:
    best = whole.search.run(ALL, len(whole.found))
    assert best is not None
    assert best.step == min(found.step for found in whole.found)


def test_the_search_finds_the_best_few_of_all(whole: Everything) -> None:
    whole.search.wanted = 5
    whole.search.run(ALL, len(whole.found))
    whole.search.wanted = 1
    few: list[Evaluation] = []
    for found in sorted(whole.found, key=lambda one: one.step):
        if all(found.strategy != one.strategy for one in few):
            few.append(found)
    assert [one.step for one in whole.search.shortest] == [one.step for one in few[:5]]


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
def test_the_search_finds_the_best_that_fits(whole: Everything, share: float) -> None:
    limit = int(share * max(found.peak for found in whole.found))
    named = [one for one in whole.found if one.choice.schedule != "synthesised" and one.peak <= limit]
    best = whole.search.run(limit, len(whole.found))
    assert best is not None
    assert best.peak <= limit
    assert best.step <= min(found.step for found in named)


def test_bounds_discard_candidates_without_compiling_them(search: StrategySearch) -> None:
    search.run(ALL, 1000)
    assert 0 < len(search.evaluated) < 112
    assert search.discarded


def test_an_evaluation_is_what_a_compilation_of_its_own_gives(search: StrategySearch) -> None:
    best = search.run(ALL, 1000)
    assert best is not None
    program = compile(replace(JOB, strategy=best.strategy))
    found = simulate(program.plans, program.outline, Roofline(load_cluster("h100")))
    assert found.step == best.step
    assert max(memory.peak for memory in found.memories) <= best.peak


def test_the_same_inputs_give_the_same_file_with_any_number_of_processes(
    search: StrategySearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = search.model.capturing.recordings
    alone = tune(JOB, "h100", 4, space=SMALL, trials=12, captured=captured, workers=1)
    orders: list[int] = []
    forked: list[object] = []
    most = 0

    def counted(calls: Sequence[partial[object]]) -> list[object]:
        orders.extend(len(calls) for call in calls[:1] if call.func is synthesise)
        return run_together(calls)

    def started(ahead: EvaluationsAhead, leaf: Leaf) -> None:
        nonlocal most
        begin(ahead, leaf)
        forked.append(leaf.key)
        most = max(most, len(ahead.running))

    begin = EvaluationsAhead.start
    monkeypatch.setattr("piper.tuning.strategy_search.run_together", counted)
    monkeypatch.setattr(EvaluationsAhead, "start", started)
    several = tune(JOB, "h100", 4, space=SMALL, trials=12, captured=captured, workers=3)
    assert most == 3  # in spite of unexpanded groups
    assert len(forked) == len(set(forked)) > 6  # none is evaluated twice
    assert orders == [3, 3]
    assert several.json == alone.json
    assert several.evaluated == alone.evaluated
    assert several.discarded == alone.discarded
    assert not children(), "no process is left"


def test_candidates_of_equal_costs_share_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*args: object, **options: object) -> Synthesised:
        asked.append(args)
        return synthesise(*args, **options)  # type: ignore[arg-type]

    search = search_of(SMALL, 4, "h100")
    monkeypatch.setattr("piper.tuning.strategy_search.synthesise", counted)
    leaves = [leaf for group in search.groups() for leaf in search.leaves(group, ALL)[0] if leaf.open]
    made = [one for leaf in leaves for one in search.synthesised(leaf, ALL)]
    assert len(leaves) == len(made) == 48
    assert len(asked) == 24  # gradients are added up at level 0 as at level 1, and not at levels 2 and 3


def test_ranks_of_two_meshes_with_the_same_layers_in_other_stages(search: StrategySearch) -> None:
    """Layers 0 and 4 are stages 0 and 2 of rank 0 of two, and stages 0 and 4 of rank 0 of four."""
    two = StrategyChoice(ranks=2, replicas=1, rows=2, microbatches=2, sizes=(1, 3, 1, 3))
    four = replace(two, ranks=4, sizes=(1,) * 8)
    layers = search.model.layers(two).divided(1, 1)
    layers.layers *= 2
    assert rank_memory(two, layers, None, 0, 0) == rank_memory(four, layers, None, 0, 0)


def test_what_is_next_in_a_queue() -> None:
    def group(bound: float, ranks: int) -> CandidateGroup:
        choice = StrategyChoice(ranks=ranks, replicas=1, rows=1, microbatches=1, sizes=(4,))
        return CandidateGroup(choice=choice, bound=bound)

    def leaves(group: CandidateGroup) -> list[Leaf]:
        bounds = (group.bound, group.bound + 2)
        return [Leaf(choice=group.choice, bound=bound, memory=LeastMemory()) for bound in bounds]

    queue = Queue(0.0, lambda rows: True)
    queue.extend([group(2.0, 2), group(1.0, 1), group(9.0, 4)])
    found = [(leaf.choice.ranks, leaf.bound) for leaf in queue.upcoming(4.0, leaves)]
    assert found == [(1, 1.0), (2, 2.0), (1, 3.0)]
    assert [(entry.choice.ranks, entry.bound) for entry in queue.rest()] == [(1, 1.0), (2, 2.0), (4, 9.0)]


def test_ctrl_c_gives_the_best_so_far(search: StrategySearch) -> None:
    def stop(running: StrategySearch, found: object) -> None:
        if len(running.evaluated) == 3:
            raise KeyboardInterrupt

    captured = search.model.capturing.recordings
    found = tune(JOB, "h100", 4, space=SMALL, captured=captured, progress=stop)
    assert found.interrupted
    assert not found.complete
    assert len(found.evaluated) == 3


def test_what_is_called_fitting_fits_as_the_runtime_frees_memory(whole: Everything) -> None:
    """Streams return memory late: what the plan counts alone may be less than what a device holds."""
    limit = int(0.7 * max(found.needs for found in whole.found))
    fitting = [found for found in whole.found if found.needs <= limit][:8]
    assert len(fitting) == 8
    for found in fitting:
        plans = whole.search.model.compile(list(found.strategy)).plans
        assert max(map(predicted_peak, plans)) <= limit, found.choice.label


def test_trials_limit_what_is_compiled(search: StrategySearch) -> None:
    captured = search.model.capturing.recordings
    found = tune(JOB, "h100", 4, space=SMALL, trials=2, gap=0.0, captured=captured, front=False)
    assert len(found.evaluated) == 2
    assert not found.complete
    assert 0 < found.lowest < found.best.step


@pytest.mark.parametrize("sizes", [(2, 4, 8), (4, 8, 16)])  # 8 samples have as many tokens as a layer is wide
@pytest.mark.usefixtures("own_captures")
def test_two_recordings_give_the_costs_of_every_size(sizes: tuple[int, ...]) -> None:
    fresh = search_of(replace(SMALL, rows=sizes), 4, "h100").model
    assert fresh.recorded == list(sizes[:2])
    choice = StrategyChoice(ranks=1, replicas=1, rows=sizes[2], microbatches=1, sizes=(4,))
    estimated = fresh.layers(choice)
    assert sizes[2] not in fresh.recorded
    fresh.record(sizes[2])
    recorded = fresh.layers(choice)
    for one, other in zip(estimated.layers, recorded.layers, strict=True):
        assert one.work == pytest.approx(other.work, rel=1e-9)
        assert (one.saved, one.parameters, one.sends) == (other.saved, other.parameters, other.sends)


def test_a_deferred_weight_gradient_holds_the_gradient_of_its_output(search: StrategySearch) -> None:
    choice = StrategyChoice(ranks=1, replicas=1, rows=2, microbatches=1, sizes=(4,))
    layer = search.model.layers(choice).layers[1]
    assert layer.late["LAYER=1", "gradient0", -1] == 2 * 8 * 64 * 4
    assert layer.late["LAYER=0", "out0", -1] == 2 * 8 * 64 * 4  # what the layer reads


def test_nothing_fits(search: StrategySearch) -> None:
    captured = search.model.capturing.recordings
    with pytest.raises(piper.ConfigError) as error:
        tune(JOB, "h100", 4, space=SMALL, memory=300_000, captured=captured)
    text = str(error.value)
    assert text.startswith("tune: no strategy fits\n  limit:   293.0 KiB on each device of h100\n  least:")
    assert "KiB, most of it optimizer state: " in text
    assert "  missing: " in text
    assert "hint:    give at least " in text


def test_a_model_without_layers() -> None:
    from tests.tuning.models import Tower

    with pytest.raises(piper.ConfigError) as error:
        tune(replace(JOB, model=Tower), "h100", 4)
    assert str(error.value) == (
        "tune: the model has no repeated layers to divide into stages\n"
        "  regions: none\n"
        "  hint:    annotate them: model=lambda: piper.annotate_layers(Model()), or annotate_modules(...)"
    )


def test_costs_of_another_model(search: StrategySearch, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    other = Measured(model="0123abcd", source="other.py:job", chunks={}, arithmetic=1e-9, traffic=1e-9)
    write_costs(other, costs)
    captured = search.model.capturing.recordings
    with pytest.raises(piper.ConfigError) as error:
        tune(JOB, "h100", 4, space=SMALL, costs=costs, captured=captured)
    first, measured, recipe, hint = str(error.value).splitlines()
    assert first == f"{costs}: these costs were measured on another model"
    assert measured == "  costs:  model 0123abcd"
    assert recipe.startswith("  recipe: model ")
    assert hint.startswith("  hint:   profile this model: piper train RECIPE --profile 5")


def test_an_unknown_cluster() -> None:
    with pytest.raises(piper.ConfigError, match="there is no cluster 'h101'"):
        tune(JOB, "h101", 4)


@pytest.mark.parametrize(("name", "value"), [("devices", 0), ("trials", 0), ("memory", 0), ("workers", 0)])
def test_numbers_from_1(name: str, value: int) -> None:
    given: dict[str, int] = {"devices": 4, name: value}
    with pytest.raises(piper.ConfigError, match=f"tune: {name}=0"):
        tune(JOB, "h100", **given)  # type: ignore[arg-type]


def test_even_stages() -> None:
    assert even(32, 8) == (4,) * 8
    assert even(10, 4) == (3, 3, 2, 2)


def test_devices_of_a_mesh() -> None:
    wide = StrategyChoice(ranks=2, replicas=2, tensor=2, rows=1, microbatches=4, sizes=(1, 1), zeros=(0, 0))
    assert [wide.devices_of(rank) for rank in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    near = replace(wide, neighbours="ranks")
    assert [near.devices_of(rank) for rank in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
