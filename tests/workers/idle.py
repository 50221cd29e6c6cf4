"""A worker without torch: it does nothing until its driver is gone."""

import socket
from collections.abc import Sequence


def main(descriptors: Sequence[int]) -> int:
    socket.socket(fileno=descriptors[0]).recv(1)
    return 0
