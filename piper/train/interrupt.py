"""Ctrl-C: the first asks for an end after the step, the second ends now."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts(asked: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Whether somebody has asked for an end; `asked` is called when they do."""
    seen = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        asked()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
