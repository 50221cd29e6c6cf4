"""A raylet whose workers are forked from a process with torch and Ray imported: `python -m tests.warm.raylet WORDS`.

This program becomes the raylet. Before, it forks the process that its workers are forked from, and a raylet adopts
them, so that they are its children and end with it as those that it starts itself. The raylet is told to start
`tests/warm/ask.py`, which asks for a fork and ends.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

from piper.workers.transport.fork_server import die_with
from tests.warm import popen, serve

ASK = Path(__file__).with_name("ask.py")
COMMAND = "--python_worker_command="


def main(words: list[str]) -> None:
    """Fork the process that workers are forked from, then become the raylet."""
    raylet, name = os.getpid(), f"piper-warm-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        popen.adopt(True)
        if os.fork() == 0:
            die_with(raylet)
            serve.fork_programs(listener, [entry for entry in sys.path if entry not in ("", str(popen.ROOT))])
    die_with(os.getppid())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and so would the raylet
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray starts it
    os.execv(words[0], [asking(word, name) for word in words])


def asking(word: str, name: str) -> str:
    """Return a word of the raylet's, with the command of workers replaced by one that asks for a fork."""
    if not word.startswith(COMMAND):
        return word
    python, _, program, *arguments = shlex.split(word.removeprefix(COMMAND))  # the second sets up runtime_env
    return COMMAND + subprocess.list2cmdline([python, "-I", "-S", str(ASK), name, program, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
