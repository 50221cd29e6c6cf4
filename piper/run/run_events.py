"""Events of a run: what happened to its workers, and which of them are stragglers."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from piper.errors import LaunchError, WorkerError
from piper.ir.devices import show
from piper.plan.plan import Plans
from piper.runtime.worker import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run's workers.

    failure: a worker was lost, and the step ended. recovery: all workers run again. mismatch: a repeated step
    gave another result than before. resize: the run goes on with another number of devices. warm: the agent
    of a spare can start a worker at once. skipped: a spare could not be used.
    """

    event: Literal["failure", "recovery", "mismatch", "straggler", "preemption", "resize", "warm", "skipped"]
    step: int
    device: int | None = None
    who: str | None = None
    what: str | None = None
    instruction: str | None = None
    version: int | None = None  # the step whose state was taken
    source: str | None = None  # where it was taken from
    replayed: int | None = None  # steps that were repeated
    seconds: float | None = None  # from the failure, once it had a name; of an agent, since it was started
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of each
    left: int | None = None  # retries


Notify = Callable[[Event], None]


def failure_event(error: WorkerError | LaunchError, step: int, left: int) -> Event:
    """Return the event of a failure."""
    return Event(
        event="failure",
        step=step,
        device=error.device if isinstance(error, WorkerError) else None,
        who=error.by,
        what=error.what,
        instruction=error.facts.get("at"),
        left=left,
    )


SLOWER = 1.3  # times the median of the others
STEPS = 20  # in a row


class Stragglers:
    """Compares the busy times of devices that share a program."""

    def __init__(self, plans: Plans) -> None:
        self.groups = [plan.devices for plan in plans if len(plan.devices) > 1]
        self.slow: dict[int, int] = {}  # steps in a row that a device was slow

    def note(self, step: int, busy: Mapping[int, float]) -> list[Event]:
        """Note the busy times of a step. Return an event for each device that has just become a straggler."""
        events: list[Event] = []
        for group in self.groups:
            for device in group:
                others = [busy[other] for other in group if other != device and other in busy]
                usual = median(others) if others and device in busy else 0.0
                slow = usual > 0 and busy[device] > SLOWER * usual
                self.slow[device] = self.slow.get(device, 0) + 1 if slow else 0
                if self.slow[device] == STEPS:
                    times = busy[device] / usual
                    events.append(
                        Event(
                            event="straggler",
                            step=step,
                            device=device,
                            who=f"device {device}",
                            what=f"{times:.1f} times as busy as the median of devices {show(group)}, "
                            f"and slow for {STEPS} steps",
                        )
                    )
        return events


WINDOW, OFTEN = 50, 10  # steps that are looked at, and after how many that ran twice it is said


class Repeats:
    """Counts steps that were run again because rows exceeded their blocks."""

    def __init__(self) -> None:
        self.last: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # the fullest block of each step
        self.said = False

    def note(self, answers: Iterable[Sums]) -> str | None:
        """Note a step. Return one line, once, when more than a fifth of the last steps were run again."""
        self.last.append(max(sums.fullest for sums in answers))
        again = [fullest for fullest in self.last if fullest[0]]
        if self.said or len(again) <= OFTEN:
            return None
        self.said = True
        needs, room = max(again)
        return (
            f"Rows exceeded their blocks in {len(again)} of the last {len(self.last)} steps, which ran "
            f"twice: blocks have room for capacity={room:.3g}, and these steps need "
            f"capacity={math.ceil(100 * needs) / 100:g}"
        )
