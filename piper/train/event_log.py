"""`events.jsonl`: what happened to a run's workers, one object for each event, and in words for a display."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import assert_never

from piper.run.run_events import Event
from piper.train.run_folder import EVENTS, LinesFile

SHOWN = 0.1  # seconds of waiting for agents that the display shows


class EventLog:
    """Writes events to the run's folder as they come. The file is made with the first."""

    def __init__(
        self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self.file, self.say, self.clock = LinesFile(folder / EVENTS), say, clock

    def __call__(self, event: Event) -> None:
        fields = {name: value for name, value in asdict(event).items() if value not in (None, {})}
        self.file.write({"time": round(self.clock(), 3), **fields})
        self.say(described(event))


def described(event: Event) -> str:
    """Return an event in one line."""
    match event.event:
        case "failure":
            where = "" if event.instruction is None else f", at {event.instruction}"
            left = f"{event.left} {'retry' if event.left == 1 else 'retries'} left"
            return f"Step {event.step}: {event.who}: {event.what}{where}. Recovering, {left}"
        case "warm":
            return f"Step {event.step}: the {event.who} is warm after {event.seconds:.1f} s, as a spare"
        case "recovery":
            again = f"{event.replayed} {'step' if event.replayed == 1 else 'steps'} repeated"
            cold = event.phases.get("warm", 0.0)
            waited = f", of which {cold:.1f} s until agents were warm," if cold >= SHOWN else ""
            return (
                f"Step {event.step}: recovered in {event.seconds:.1f} s{waited} from the state after step "
                f"{event.version} in {event.source}, {again}"
            )
        case "mismatch":
            return f"Warning: step {event.step} gave another result when it was repeated: {event.what}"
        case "straggler":
            return f"Step {event.step}: {event.who} is a straggler: {event.what}"
        case "skipped":
            return f"Step {event.step}: {event.who} is passed over: {event.what}"
        case "preemption" | "resize":
            return f"Step {event.step}: {event.what}"
    assert_never(event.event)
