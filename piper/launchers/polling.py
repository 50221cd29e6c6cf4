"""Waits for descriptors of any number: `select` fails from the 1,024th on."""

import math
import select
from collections.abc import Iterable

ENDED = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL  # a read then returns at once


def readable(descriptors: Iterable[int], timeout: float | None = None) -> set[int]:
    """Return the descriptors that can be read, or have ended, after at most `timeout` seconds.

    timeout: None waits until there is one.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if timeout is None else math.ceil(max(timeout, 0.0) * 1000)
    return {descriptor for descriptor, event in poll.poll(milliseconds) if event & ENDED}
