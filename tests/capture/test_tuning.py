"""Which form of a kernel is the fastest is measured once, and kept with its code."""

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.benchmarking import InductorBenchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from piper.capture.compile import tuning
from piper.capture.compile.cache import Cache, CacheEntry
from piper.capture.compile.tuning import keep_measured, measuring_kernels, tuning_in

FORMS = [SimpleNamespace(kwargs={"XBLOCK": size}, num_warps=4, num_stages=1) for size in (64, 128)]


def kernel() -> Any:  # noqa: ANN401  (a kernel as it lies in an artifact; the real ones need a GPU)
    made: Any = CachingAutotuner.__new__(CachingAutotuner)
    made.filename = "/folder/of/another/process/ab/abcdef.py"
    made.inductor_meta, made.save_cache_hook = {"autotune_local_cache": True}, None
    made.compile_results = [SimpleNamespace(config=form) for form in FORMS]
    return made


def load(cache: Cache) -> tuple[Any, list[Path]]:
    found = kernel()
    with tuning_in(cache.working_folder()) as unmeasured:
        found.recheck_autotune_cache(lambda: None)
    return found, unmeasured


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(CachingAutotuner, "is_statically_launchable", lambda self: True)
    made = Cache(folder=tmp_path / "cache", key=tmp_path / "key")
    made.keep("name", CacheEntry(artifact=b"code", files={"ab/abcdef.py": b"source"}))
    return made


def next_process(cache: Cache) -> None:
    """Leave in the working folder what a process finds that loads the entry."""
    for file in cache.working_folder().rglob("*"):
        if file.is_file():
            file.unlink()
    entry = cache.find("name")
    assert entry is not None
    cache.restore(entry)


def test_the_next_process_loads_the_fastest_form_alone(cache: Cache) -> None:
    first, unmeasured = load(cache)
    assert len(first.compile_results) == 2 and len(unmeasured) == 1
    first.save_cache_hook(FORMS[1], 5_000_000)
    keep_measured("name", cache, unmeasured)
    entry = cache.find("name")
    assert entry is not None and entry.artifact == b"code"
    assert sorted(Path(path).suffix for path in entry.files) == [".best_config", ".py"]
    next_process(cache)
    later, unmeasured = load(cache)
    assert [result.config.kwargs for result in later.compile_results] == [{"XBLOCK": 128}]
    assert unmeasured == []


def test_what_was_not_measured_is_measured_by_the_next_process(cache: Cache) -> None:
    _, unmeasured = load(cache)
    keep_measured("name", cache, unmeasured)
    entry = cache.find("name")
    assert entry is not None and list(entry.files) == ["ab/abcdef.py"]
    next_process(cache)
    later, unmeasured = load(cache)
    assert len(later.compile_results) == 2 and len(unmeasured) == 1


def test_a_cache_that_cannot_be_written_does_not_end_the_step(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, unmeasured = load(cache)
    first.save_cache_hook(FORMS[0], 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("piper.capture.compile.cache.tempfile.mkstemp", full)
    keep_measured("name", cache, unmeasured)
    assert caplog.messages == [
        "Which kernels are the fastest is not kept for the next run: the cache cannot be written"
    ]


def test_kernels_are_measured_by_our_clock_while_code_first_runs(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(tuning, "milliseconds", lambda call: call())
    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", lambda kernel, ran: ran())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("nothing is under way"))
    monkeypatch.setattr(fcntl, "flock", lambda *_: order.append("locked"))
    plain = InductorBenchmarker.benchmark_gpu
    benchmarker = InductorBenchmarker()

    def measure() -> float:
        assert (cache.working_folder().parent / "benchmark.lock").exists()
        found: float = benchmarker.benchmark_gpu(lambda: 0.25, rep=40)
        return found

    with measuring_kernels(cache):
        assert CachingAutotuner.benchmark_all_configs(kernel(), measure) == 0.25
    assert InductorBenchmarker.benchmark_gpu is plain
    # What is under way may wait for another device, which would wait for the lock.
    assert order == ["nothing is under way", "locked"]
