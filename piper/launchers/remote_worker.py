"""A worker that an agent of its machine has forked, and whose driver may be on another machine."""

import json
import os
from collections.abc import Sequence

from piper.launchers.messages import CODEC
from piper.launchers.processes import Termination
from piper.launchers.timeouts import TIMEOUTS
from piper.launchers.transport.channel import connect
from piper.launchers.worker_server import work


def main(descriptors: Sequence[int]) -> int:
    """Connect to the driver that a ticket names, and answer its calls until it is gone."""
    ticket, marks, values = descriptors
    termination = Termination()
    termination.install()
    host, port, key, device = json.loads(os.pread(ticket, os.fstat(ticket).st_size, 0))
    work(
        connect((host, port), bytes.fromhex(key), device, TIMEOUTS.meeting, CODEC), marks, values, termination
    )
    return 0
