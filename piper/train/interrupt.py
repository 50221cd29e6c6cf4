"""Signals that ask a run to stop. All finish the step and save.

A second Ctrl-C or SIGHUP ends the run now. SIGTERM is preemption. It often comes twice, because a launcher
passes on what its group of processes got too, so a second one changes nothing. But the run has to end within
`grace` seconds of the first.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 30.0  # seconds: what torchrun and Kubernetes wait before they kill


class PreemptedError(KeyboardInterrupt):
    """Preempted, with no step under way or no time left to finish one. Nothing more is saved."""


class Interrupts:
    """What signals have asked of a run."""

    def __init__(self, asked: Callable[[int], None], grace: float) -> None:
        self.asked, self.grace = asked, grace
        self.seen = self.preempted = self.over = False
        self.timer: threading.Timer | None = None

    def __call__(self) -> bool:
        """Return whether an end was asked for."""
        return self.seen

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. Raise if the run has to end now."""
        if self.over:
            self.over = False  # what is done then is not interrupted again
            raise PreemptedError
        if number == signal.SIGTERM and self.preempted:
            return
        if self.seen and number != signal.SIGTERM:
            raise KeyboardInterrupt
        self.seen = True
        if number == signal.SIGTERM:
            self.preempted = True
            self.timer = threading.Timer(self.grace, self.end, [threading.get_ident()])
            self.timer.daemon = True
            self.timer.start()
        with suppress(OSError):  # a terminal that is gone takes no message, and the run is still to be saved
            self.asked(number)

    def end(self, main: int) -> None:
        """End what the main thread waits for: the time is over."""
        self.over = True
        signal.pthread_kill(main, signal.SIGTERM)


@contextmanager
def interrupts(asked: Callable[[int], None], grace: float = GRACE) -> Iterator[Interrupts]:
    """Yield whether an end was asked for; `asked` is called with the first signal when it comes."""
    signals = Interrupts(asked, grace)
    caught = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, signals.handle) for number in caught}
    try:
        yield signals
    finally:
        if signals.timer is not None:
            signals.timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def preemptible() -> Iterator[None]:
    """Raise PreemptedError inside the block on SIGTERM, once: for the time in which no step is under way."""
    signals = Interrupts(lambda number: None, GRACE)
    signals.over = signals.preempted = True  # the first one ends the run, and later ones change nothing
    before = signal.signal(signal.SIGTERM, signals.handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
