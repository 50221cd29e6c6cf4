"""The warm process: it imports what most programs of the tests import, then forks one after the other.

`python -m tests.warm.serve DESCRIPTOR ROOM`. A program runs in a grandchild whose parent ends at once, so that
the process that asked adopts it. Before its program begins, it forks a warm process of its own.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from piper.workers.processes import ClosedError, read_exactly
from piper.workers.transport.fork_server import die_with
from tests.warm import popen

MOST = 64  # descriptors that a program may be given
Request = dict[str, object]


def main(descriptor: int) -> None:
    """Serve until nobody asks any more; a fork runs the program that was asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    path = [entry for entry in sys.path if entry not in ("", str(popen.ROOT))]
    subprocess.Popen = popen.Popen  # type: ignore[misc]  # before torchrun, among others, imports it
    gc.disable()  # while it imports a million objects
    preload()
    gc.collect()
    gc.freeze()
    gc.enable()
    fork_programs(socket.socket(fileno=descriptor), path)


def fork_programs(connection: socket.socket, path: list[str]) -> NoReturn:
    """Fork a process for each program that is asked for, until nobody asks any more; the fork runs it to its end.

    connection: to whoever asks, or a socket that listens to many. path: where other modules are found.
    """
    while True:
        request, descriptors = serve(connection)
        connection.close()
        here, there = socket.socketpair()
        program, forked = os.getpid(), os.fork()
        if forked:
            there.close()
            popen.SERVERS[:] = [popen.Server(here, forked)]
            break
        die_with(program)
        here.close()
        for each in descriptors:
            os.close(each)
        connection = there
    become(request, descriptors, path)
    end(run_to_its_end(request["words"]))  # type: ignore[arg-type]


def preload() -> None:
    """Import what most programs of the tests import. Not Ray: it reads the environment once and for all."""
    import torch
    from torch import _dynamo
    from torch.distributed import run

    from piper import cli, compiler
    from piper.run import launch
    from piper.train import train_command
    from piper.workers import serve as worker_server
    from tests.joints import share_joints
    from tests.runtime import grid

    share_joints()  # programs of the tests compile the same models again and again
    assert all((_dynamo, run, cli.app_with(), launch, worker_server, train_command, grid))
    # A first capture imports and sets up what takes up to a second of a core in each program. It initialises
    # CUDA where torch has it, and what is forked after that cannot use it.
    if torch.version.cuda is None:
        with torch.random.fork_rng():
            compiler.compile(grid.job(grid.Cell(case="decoder", schedule="1f1b", dp=2, zero=1)))


def serve(connection: socket.socket) -> tuple[Request, list[int]]:
    """Fork a process for each request, in which this returns the request, until nobody asks any more."""
    listens = bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    while True:
        asker = connection.accept()[0] if listens else connection
        try:
            size, descriptors, _, _ = socket.recv_fds(asker, 8, MOST)
            if not size:
                os._exit(0)
            text = read_exactly(asker, int.from_bytes(size, "big"))
        except (ClosedError, ConnectionResetError):
            os._exit(0)
        number, written = os.pipe()
        between = os.fork()
        if between == 0:
            parent, started = os.getpid(), os.fork()
            if started == 0:
                os.close(number)
                os.close(written)
                asker.close()
                while os.getppid() == parent:
                    time.sleep(0.0005)
                return json.loads(text), descriptors
            os.write(written, started.to_bytes(8, "big"))
            os._exit(0)
        os.waitpid(between, 0)  # the program has its new parent now, and whoever asked may stop adopting
        asker.sendall(os.read(number, 8))
        for each in (number, written, *descriptors):
            os.close(each)
        if listens:
            asker.close()


def become(request: Request, descriptors: list[int], path: list[str]) -> None:
    """Take on the arguments, environment, folder and descriptors of a program."""
    words, env, passed = request["words"], request["env"], request["passed"]
    assert isinstance(words, list) and isinstance(env, dict) and isinstance(passed, list)
    if request["session"]:
        os.setsid()
    place(descriptors, [0, 1, 2, *passed])
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(env)
    for number, area in ((47, [sys.executable, *words]), (49, [f"{k}={v}" for k, v in env.items()])):
        show(number, area)
    sys.path[:] = [*env.get("PYTHONPATH", "").split(os.pathsep), *path]
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, "rb", closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = text_file(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text_file(2)  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()


def text_file(descriptor: int) -> io.TextIOWrapper:
    """Return a file as Python opens standard output and standard error."""
    raw = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
    errors = "backslashreplace" if descriptor == 2 else "strict"
    lines = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=lines)


def place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers under which a program knows them."""
    kept = popen.SERVERS[0].connection
    above = max(numbers) + 1
    high = [move_above(each, above) for each in descriptors]
    popen.SERVERS[0].connection = socket.socket(fileno=move_above(kept.detach(), above))
    for source, number in zip(high, numbers, strict=True):
        os.dup2(source, number)
        os.close(source)


def move_above(descriptor: int, lowest: int) -> int:
    """Move a descriptor to a number that is at least this."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(descriptor)
    return moved


def show(field: int, words: list[str]) -> None:
    """Write words where `/proc` reads the arguments (47) or the environment (49) of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[field - 2]), int(fields[field - 1])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run_to_its_end(words: list[str]) -> int:
    """Run a program. Return its exit code, as Python would end with it."""
    try:
        run(words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:  # noqa: BLE001  Python prints it and ends
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End this process as Python does, without taking apart a million objects that its parent still has."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code)


def run(words: list[str]) -> None:
    """Run a program as Python does: `-c CODE`, `-m MODULE` or a file, and its arguments."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    if words[0] == "-m":
        sys.argv, sys.orig_argv = words[1:], [sys.executable, *words]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    code, file = (words[1], "<string>") if words[0] == "-c" else (Path(words[0]).read_text(), words[0])
    sys.argv, sys.orig_argv = ["-c", *words[2:]] if words[0] == "-c" else words, [sys.executable, *words]
    sys.path.insert(0, "" if words[0] == "-c" else str(Path(file).absolute().parent))
    if words[0] != "-c":
        vars(module)["__file__"] = file
    exec(compile(code, file, "exec"), vars(module))


if __name__ == "__main__":
    main(int(sys.argv[1]))
