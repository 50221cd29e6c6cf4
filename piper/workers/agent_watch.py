"""Looks for machines that join a running job, so that their agents are warm before one of them is needed."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from piper.workers.timeouts import TIMEOUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmAgent:
    """An agent that has become able to start a worker at once: it has torch imported."""

    address: str
    seconds: float  # since its machine was seen


class AgentWatch:
    """Calls a function in a thread again and again, until it is closed."""

    def __init__(self, look: Callable[[], bool]) -> None:
        """Prepare to call `look`, which returns whether an agent still starts."""
        self.look, self.ended = look, threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread. Idempotent."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._watch, name="agent watch", daemon=True)
            self.thread.start()

    def _watch(self) -> None:
        starting = True  # those of spares, when a job begins
        while not self.ended.wait(TIMEOUTS.warm_poll if starting else TIMEOUTS.agent_poll):
            starting = self.look()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join(TIMEOUTS.watch_end)
