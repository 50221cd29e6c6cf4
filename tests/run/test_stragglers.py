"""A straggler is named once, when it has been slow for twenty steps in a row."""

import random
from statistics import median
from types import SimpleNamespace
from typing import cast

from piper.plan.plan import Plans
from piper.run.run_events import Stragglers, median_without

PLANS = cast(Plans, [SimpleNamespace(devices=(0, 1, 2)), SimpleNamespace(devices=(3,))])


def named(stragglers: Stragglers, steps: range, busy: dict[int, float]) -> list[tuple[int, int | None]]:
    return [(e.step, e.device) for step in steps for e in stragglers.note(step, busy)]


def test_it_is_named_once_in_twenty_steps() -> None:
    stragglers = Stragglers(PLANS)
    slow = {0: 1.0, 1: 1.4, 2: 1.0, 3: 9.0}
    assert named(stragglers, range(1, 20), slow) == []
    (event,) = stragglers.note(20, slow)
    assert (event.event, event.step, event.device, event.who) == ("straggler", 20, 1, "device 1")
    assert event.what == "1.4 times as busy as the median of devices 0-2, and slow for 20 steps"
    assert named(stragglers, range(21, 60), slow) == []


def test_one_good_step_begins_the_count_again() -> None:
    stragglers = Stragglers(PLANS)
    slow, good = {0: 1.0, 1: 1.4, 2: 1.0}, {0: 1.0, 1: 1.3, 2: 1.0}
    assert named(stragglers, range(1, 20), slow) == []
    assert named(stragglers, range(20, 21), good) == []
    assert named(stragglers, range(21, 40), slow) == []
    assert named(stragglers, range(40, 42), slow) == [(40, 1)]


def test_times_that_are_not_known_name_none() -> None:
    stragglers = Stragglers(PLANS)
    assert named(stragglers, range(1, 50), {}) == []
    assert named(stragglers, range(1, 50), {1: 5.0}) == []
    assert named(stragglers, range(1, 50), dict.fromkeys(range(4), 0.0)) == []


def test_the_median_of_the_others() -> None:
    rng = random.Random(0)
    for count in (2, 3, 4, 7, 10):
        times = [rng.choice((1.0, 2.5, 4.0, rng.random())) for _ in range(count)]
        for number, time in enumerate(times):
            others = times[:number] + times[number + 1 :]
            assert median_without(time, sorted(times)) == median(others)
