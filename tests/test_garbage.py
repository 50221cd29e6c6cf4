"""Garbage of the tests is left alone while there is memory, and collected when it runs short."""

import gc
import weakref
from pathlib import Path

import pytest

from tests import garbage


class Cycle:
    def __init__(self) -> None:
        self.own = self


def dropped() -> "weakref.ref[Cycle]":
    """Return a reference to an object that only the collector can remove."""
    return weakref.ref(Cycle())


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test see no other garbage than its own, on a machine that says how much memory is left."""
    if not Path("/proc/meminfo").exists():
        pytest.skip("nobody says how much memory is left")
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.mark.usefixtures("disabled")
def test_garbage_is_collected_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    stash = pytest.Stash()
    with garbage.left_alone():
        monkeypatch.setattr(garbage, "memory_left", lambda: garbage.LEAST - 1)
        monkeypatch.setattr(garbage, "resident", lambda: garbage.STEP + 1)
        one = dropped()
        assert garbage.after_test(stash) and one() is None
        other = dropped()
        assert not garbage.after_test(stash), "it has not grown"
        assert other() is not None
        stash[garbage.HAD] = 0
        monkeypatch.setattr(garbage, "memory_left", lambda: garbage.LEAST)
        assert not garbage.after_test(stash)
        gc.collect()
        assert other() is not None, "it is out of sight"


def test_the_collector_runs_again_where_nobody_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.isenabled()
    gc.enable()
    try:
        with garbage.left_alone():
            assert gc.isenabled() == (not Path("/proc/meminfo").exists())
        assert gc.isenabled()
        monkeypatch.setattr(garbage, "memory_left", lambda: None)
        with garbage.left_alone():
            assert gc.isenabled() and not garbage.after_test(pytest.Stash())
    finally:
        if not before:
            gc.disable()


@pytest.mark.parametrize(
    ("machine", "limit", "stat", "left"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    3 kB\n", None, None, 3 << 10),
        ("MemAvailable: 3 kB\n", "max", "anon 1\n", 3 << 10),
        ("MemAvailable: 3 kB\n", "2000", "file 1500\nanon 700\n", 1300),
        ("MemAvailable: 1 kB\n", "2000", "anon 700\n", 1 << 10),
        ("MemFree: 3 kB\n", "2000", "anon 700\n", None),
        (None, "2000", "anon 700\n", None),
    ],
)
def test_what_is_left_of_a_machine_or_a_container(
    tmp_path: Path, machine: str | None, limit: str | None, stat: str | None, left: int | None
) -> None:
    for name, text in (("meminfo", machine), ("memory.max", limit), ("memory.stat", stat)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert garbage.memory_left(tmp_path / "meminfo", tmp_path) == left
