"""What every test may use: golden texts, and the rule that GPU tests need a GPU. Workers get a core each."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import pytest

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[str, str], None]
RUN = "PIPER_TEST_RUN"  # names this run of pytest to all processes that it starts
# A test compiles one kernel or two. Headers compiled in advance, and the trial compilations that find out which
# vector instructions there are (the kernel says so too), take longer than the kernels themselves.
COMPILER = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# Dynamo would collect garbage after each of its own compilations: see `tests/garbage.py`.
COMPILER["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ instead of comparing")
    parser.addoption("--quick", action="store_true", help="leave out the tests of tests/extended.toml")


def pytest_configure() -> None:
    """Prepare this process, before torch is imported."""
    for name, value in COMPILER.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(RUN, uuid4().hex)
    heed_signals()
    one_core_for_each_worker()


def heed_signals() -> None:
    """Heed Ctrl-C and a terminal that closes, also where the tests were started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def one_core_for_each_worker() -> None:
    """Keep a worker of a parallel run, and all that it starts, to one core, where each can have its own.

    Threads of one process on two cores take the interpreter from each other at every operation, which costs
    more than the second core gives: it is busy with the next worker's tests.
    """
    worker, workers = (
        os.environ.get("PYTEST_XDIST_WORKER", ""),
        os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"),
    )
    if not worker.startswith("gw") or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if 1 < int(workers) <= len(cores):
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw"))]})


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported: to look through a million objects again and again takes a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage while tests run, unless memory is short, or garbage may hold that of a GPU."""
    from tests.garbage import left_alone

    on_gpu = any(item.get_closest_marker("gpu") and not skipped(item) for item in session.items)
    with nullcontext() if on_gpu else left_alone():
        return (yield)


def skipped(item: pytest.Item) -> bool:
    """Return whether a test is skipped whatever it is."""
    return item.get_closest_marker("skip") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Look after each test whether memory is short."""
    from tests.garbage import after_test

    result = yield
    after_test(item.config.stash)
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let tests share captures and a warm process. Take what is imported out of the garbage collector's sight: a million objects."""
    if "torch" in sys.modules:  # tests that do not need it should not pay for it
        from tests.captures import share_captures
        from tests.joints import share_joints
        from tests.warm import warm_fork_servers, warm_raylets

        # Where a logger does not propagate, pytest adds handlers to it, and for those torch would write out each graph it traces.
        logging.getLogger("torch.__trace").propagate = True
        share_captures()
        share_joints()
        warm_fork_servers()
        if any(item.get_closest_marker("ray") for item in session.items):
            warm_raylets()
    if not gc.get_freeze_count():  # a test may run pytest in this process, whose heap is large by then
        gc.collect()
        gc.freeze()
        # Graphs and plans are many objects that live on: looking at each took 5 %, and single passes took seconds.
        gc.set_threshold(100_000, 10, 10)
        gc.callbacks.append(freeze_survivors)


def freeze_survivors(phase: str, about: dict[str, int]) -> None:
    """Take what has survived a full collection out of the garbage collector's sight. `gc.unfreeze()` brings it back."""
    if phase == "stop" and about["generation"] == 2:
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        leave_out_extended(config, items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return  # without asking torch: tests that do not need it should not pay for it
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def leave_out_extended(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what `tests/extended.toml` names, but for the parameters that it keeps."""
    from tests.extended import extended

    left_out = extended()
    out = [item for item in items if left_out(item.nodeid)]
    items[:] = [item for item in items if not left_out(item.nodeid)]
    config.hook.pytest_deselected(items=out)


@pytest.fixture
def own_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test capture its models itself, whatever tests before it have captured."""
    from piper.compiler import build
    from tests.captures import new_recordings

    monkeypatch.setattr(build, "new_recordings", new_recordings)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with `tests/golden/<name>.txt`: `golden("name", text)`. --update-golden writes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(
                f"there is no {path.name} yet; look at this, then run with --update-golden:\n{text}", False
            )
        wanted = path.read_text(encoding="utf-8")
        if text != wanted:
            pytest.fail(
                f"{path.name} differs; if the new text is right, run with --update-golden\n"
                f"wanted:\n{wanted}\ngot:\n{text}",
                pytrace=False,
            )

    return compare
