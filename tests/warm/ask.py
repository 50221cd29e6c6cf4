"""Ask a warm process for a fork that runs a worker of Ray: `python -I -S ask.py NAME PROGRAM ARGUMENTS`."""

import json
import os
import socket
import sys

OURS = (
    "--serialized-runtime-env-context",
    "--language",
)  # for the program that sets up runtime_env: there is none


def main(name: str, words: list[str]) -> None:
    """Send the program with the environment, folder and outputs of this process, and wait until it runs."""
    request = {
        "words": [word for word in words if not word.startswith(OURS)],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "passed": [],
        "session": True,  # a raylet ends the group of a worker with it
    }
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(text)
        connection.recv(8)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
