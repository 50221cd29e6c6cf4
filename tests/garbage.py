"""Leaves garbage where it is while there is memory: to collect it took a twelfth of the time of the tests.

A trace leaves ten thousand objects in cycles. A process of the tests takes some gigabytes in the end, and returns them at once.
"""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LEAST = 4 << 30  # bytes that are left to others: with less, garbage is collected
STEP = 1 << 29  # bytes by which this process grows between two collections
HAD = pytest.StashKey[int]()  # bytes that this process had after the last collection
GROUP = Path("/sys/fs/cgroup")  # that of a container, as the container sees it


@contextmanager
def left_alone() -> Iterator[None]:
    """Let no garbage be collected inside, where somebody can say how much memory is left."""
    enabled = gc.isenabled() and memory_left() is not None
    if enabled:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def after_test(stash: pytest.Stash) -> bool:
    """Take what a test has left out of the collector's sight, or collect it. Return whether it was collected."""
    if gc.isenabled():
        return False
    short = resident() > stash.get(HAD, 0) + STEP and (memory_left() or 0) < LEAST
    if short:
        gc.unfreeze()
        gc.collect()
        stash[HAD] = resident()
    gc.freeze()  # so that a test which collects garbage does not look at that of all others
    return short


def resident() -> int:
    """Return the bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_left(machine: Path = Path("/proc/meminfo"), group: Path = GROUP) -> int | None:
    """Return the bytes that the machine has left, or this container. None: nobody can say."""
    if not machine.exists() or (said := re.search(r"MemAvailable: +(\d+) kB", machine.read_text())) is None:
        return None
    left = int(said[1]) << 10
    limit, used = group / "memory.max", group / "memory.stat"
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        taken = re.search(r"^anon (\d+)$", used.read_text(), re.MULTILINE)
        left = min(left, int(limit.read_text()) - (int(taken[1]) if taken else 0))
    return left
