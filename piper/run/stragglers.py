"""Finds stragglers: devices that compute much longer than others that run the same program."""

from collections.abc import Mapping
from statistics import median

from piper.ir.devices import show
from piper.plan.plan import Plans
from piper.run.run_events import Event

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
