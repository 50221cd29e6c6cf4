"""Published runs as strategies: what is counted as work, who is placed where, layers that are repeated."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("published")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_work_is_counted_as_the_sources_count_it(published: ModuleType) -> None:
    """Megatron-LM by its equation 3, with recomputation; Llama 3 by parameters and causal attention."""
    rows = published.rows_of(published.TABLE)
    assert len(rows) == 13
    work = {row.name: row.work for row in rows}
    assert work["1.7B on 32 A100"] == pytest.approx(1.5466830067924994e16)
    assert work["405B on 8192 H100"] == pytest.approx(4.2344954758862733e19)
    assert work["405B on 16384 H100, 128k tokens"] == pytest.approx(
        2**24 * (6 * 403_765_329_920 + 6 * 126 * 16384 * 131072), rel=1e-3
    )


def test_stages_and_their_devices(published: ModuleType) -> None:
    rows = {row.name: row for row in published.rows_of(published.TABLE)}
    llama = rows["405B on 8192 H100"]
    stages = published.stages_of(llama)
    assert len(stages) == 128 and stages[0] == range(1) and stages[-1] == range(127, 128)
    assert llama.microbatches == 32
    assert published.devices_of(llama)[1][:9] == [8, 9, 10, 11, 12, 13, 14, 15, 136]
    megatron = rows["529.6B on 2520 A100"]
    stages = published.stages_of(megatron)
    assert len(stages) == 105 and stages[0] == range(2) and stages[-1] == range(105, 107)
    assert megatron.microbatches == 280
    assert published.devices_of(megatron)[1] == list(range(72, 144))


def test_order_of_runs(published: ModuleType) -> None:
    assert published.rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1.0)
    assert published.rank_correlation([(1, 10), (1, 20), (3, 5)]) == pytest.approx(-0.866, abs=1e-3)


def small(published: ModuleType, layers: int) -> object:
    from published_models import Sizes  # type: ignore[import-not-found]

    row = published.rows_of(published.TABLE)[4]
    sizes = Sizes(layers=layers, dim=32, ffn=64, gated=False, heads=4, kv_heads=4, vocab=64, seq=8)
    return published.replace(row, sizes=sizes, tp=2, pp=1, dp=1, global_batch=16)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_repeated_layers_are_those_of_a_model_with_more(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers repeated to four are what four layers are captured as, but for the names of parameters."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = published.captured(small(published, 4))
    monkeypatch.setattr(published, "repeated", lambda outline, layers: outline)
    monkeypatch.setattr(published, "LAYERS", 4)
    whole = published.captured(small(published, 4))
    assert [chunk.name for chunk in made.chunks] == [chunk.name for chunk in whole.chunks]
    assert [chunk.key for chunk in made.chunks] == [chunk.key for chunk in whole.chunks]
    assert [chunk.inputs for chunk in made.chunks] == [chunk.inputs for chunk in whole.chunks]
    assert [len(chunk.params) for chunk in made.chunks] == [len(chunk.params) for chunk in whole.chunks]
    assert sorted(p.shape for p in made.parameters) == sorted(p.shape for p in whole.parameters)
    assert made.degrees == whole.degrees
    assert (made.loss, made.weight) == (whole.loss, whole.weight)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_step_is_that_of_a_full_pipeline_made_longer(published: ModuleType) -> None:
    """Two ranks and twelve microbatches, extrapolated from two shorter steps."""
    row = next(row for row in published.rows_of(published.TABLE) if row.model == "39.1B")
    outline, cluster = published.captured(row), published.load_cluster("a100")
    full = published.step_of(row, outline, cluster, full=True)
    assert published.step_of(row, outline, cluster, full=False) == pytest.approx(full, rel=0.01)
    proven = published.simulated(row, outline, cluster, row.microbatches, prove=True)
    assert proven.step == full


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_published_run(published: ModuleType) -> None:
    row = next(row for row in published.rows_of(published.TABLE) if row.model == "1.7B")
    assert published.predicted(row).error == pytest.approx(0.0, abs=0.15)
