"""The store at which the workers of a job meet."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from piper.launchers.messages import PATIENCE

LOOPBACK = "127.0.0.1"


def store_on(address: str) -> TCPStore:
    """A store that can be reached at this address only."""
    with socket.socket() as listening:
        listening.bind((address, 0))
        listening.listen(128)
        return TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
            master_listen_fd=listening.detach(),
        )
