"""Lose one of three hosts made of namespaces: the third takes its place, from a copy in memory."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from math import isclose
from pathlib import Path

import pytest

from tests.chaos.parts import Asked, Seen
from tests.hosts.machines import Host, hosts, obstacle
from tests.hosts.training import events, losses, on_one_device, torchrun, wait_for_events, wait_for_step


def lose_hosts(
    asked: Asked,
    begin: Callable[[Sequence[Host], Path], subprocess.Popen[str]],
    choose: Callable[[Sequence[Host]], Host],
) -> Seen:
    """Kill or unplug hosts in turn; `begin`: starts training and returns the driver; `choose`: who is lost."""
    if (why := obstacle()) is not None:
        pytest.skip(why)
    seen = Seen(identical=True)
    with tempfile.TemporaryDirectory() as name:
        wanted = on_one_device(Path(name) / "alone")
        for number in asked.numbers():
            run = Path(name) / f"run-{number}"
            with hosts(3) as made:
                driver = begin(made, run)
                wait_for_step(run, 12, driver)
                lost, began = choose(made), time.monotonic()
                (lost.kill if number % 2 else lost.unplug)()
                seen.events += 1
                wait_for_events(run, 2, driver)
                took = time.monotonic() - began
                wait_for_step(run, len(wanted), driver)
            found = losses(run)
            same = len(found) == len(wanted) and all(
                map(lambda a, b: isclose(a, b, abs_tol=1e-12), found, wanted)
            )
            seen.identical &= same
            if events(run) == [("failure", None), ("recovery", "memory")]:
                seen.recovered += 1
                seen.seconds.append(took)
    return seen


def torchrun_hosts(asked: Asked) -> Seen:
    """Lose hosts of torchrun that has a rank more than devices."""

    def begin(made: Sequence[Host], run: Path) -> subprocess.Popen[str]:
        words = ("--spares", "1")
        started = [torchrun(h, n, made[0], run, *words, job="copied", hosts=3) for n, h in enumerate(made)]
        return started[0]

    return lose_hosts(asked, begin, lambda made: made[1])
