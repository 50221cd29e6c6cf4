"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an end after the step, the second ends now."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts(asked: Callable[[int], None]) -> Iterator[Callable[[], bool]]:
    """Yield whether an end was asked for; `asked` is called with the signal when it comes.

    SIGHUP stays ignored where it is ignored already: that is what `nohup` does.
    """
    seen = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        with suppress(OSError):  # a terminal that is gone takes no message, and the run is still to be saved
            asked(number)

    caught = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in caught}
    try:
        yield lambda: seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
