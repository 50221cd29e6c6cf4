"""A Ray of our own: it listens on this machine only and ends with the run."""

import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

pytest.importorskip("ray")

import ray

from piper.compiler import compile
from piper.errors import LaunchError
from piper.run.launch import launch
from piper.workers import processes
from piper.workers import ray as launcher
from tests.conftest import RUN
from tests.runtime.grid import Cell, batches, job
from tests.workers.bounds import set_timeouts
from tests.workers.family import command_of, family

ROOT = Path(__file__).parents[2]

CELL = Cell(case="mlp", schedule="1f1b", dp=1)
LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:")  # 127.0.0.1, in both families


def listening() -> set[str]:
    """The addresses that something on this machine listens on, as the kernel writes them, without those of other runs."""
    before = listening_sockets()
    others = sockets_of_other_runs()
    # What listened before and after the look at processes had its process meanwhile.
    return {address for number, address in listening_sockets().items() if number in before.keys() - others}


def listening_sockets() -> dict[str, str]:
    """The addresses that something on this machine listens on, by the number of the socket."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            if (words := line.split())[3] == "0A":
                found[words[9]] = words[1]
    return found


def sockets_of_other_runs() -> set[str]:
    """The numbers of the sockets of processes that another run of the tests has started."""
    found, ours = set(), f"{RUN}={os.environ[RUN]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            marks = [
                each
                for each in (process / "environ").read_bytes().split(b"\0")
                if each.startswith(RUN.encode())
            ]
            if marks and ours not in marks:
                found |= {
                    file.readlink().name.removeprefix("socket:[").removesuffix("]")
                    for file in (process / "fd").iterdir()
                }
    return found


def exposed(before: set[str]) -> list[str]:
    """What listens now and did not before, and can be reached from other machines."""
    return [address for address in listening() - before if not address.startswith(LOOPBACK)]


LISTENER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("run", ["ours", "another"])
def test_what_another_run_of_the_tests_listens_on_is_left_out(run: str) -> None:
    before = listening()
    words = [sys.executable, "-I", "-S", "-c", LISTENER]
    env = {**os.environ, RUN: os.environ[RUN] if run == "ours" else run}
    with Popen(words, stdin=PIPE, stdout=PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        address = f"00000000:{int(process.stdout.readline()):04X}"
        assert (address in exposed(before)) == (run == "ours")
        process.communicate("")


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_ray_of_our_own_is_on_loopback_and_ends() -> None:
    assert not ray.is_initialized()
    before = listening()
    with launch(compile(job(CELL)), "ray") as run:
        assert run.step(batches(CELL, 1)[0]).loss > 0
        assert not exposed(before)
        folder = Path(ray.get_runtime_context().get_temp_dir())
    assert not ray.is_initialized()
    assert not folder.exists()


@pytest.mark.ray
def test_a_folder_that_takes_long_to_remove_does_not_fail_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, "processes", folder_removed=0.1)
    monkeypatch.setattr(processes, "REMOVER", f"import time; time.sleep(1){processes.REMOVER}")
    with processes.folder_for_now("piper-ray-") as folder:
        assert folder.is_dir()
    until = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


DRIVER = """
import os, sys, time
from pathlib import Path
import ray
from piper.compiler import compile
from piper.errors import LaunchError
from piper.workers import ray as launcher
from piper.run.launch import launch
from tests.ray.test_own import CELL
from tests.runtime.grid import batches, job
with launch(compile(job(CELL)), "ray") as run:
    run.step(batches(CELL, 1)[0])
    pids = [*run.session.group.processes.values()]
    print(ray.get_runtime_context().get_temp_dir(), *pids, flush=True)
    time.sleep(300)
"""


def agents_of(folder: Path) -> list[int]:
    """Return the two agents of a node of Ray, once Ray has renamed them."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = [pid for pid in holders(folder) if of_ray(command_of(pid))]
        if len(found) == 2:
            return found
        time.sleep(0.2)
    raise AssertionError("Ray has not renamed its agents")


def of_ray(title: bytes) -> bool:
    """Return whether a process is an agent of Ray's own."""
    return b"Agent" in title and b"AgentProcess" not in title


def holders(folder: Path) -> list[int]:
    """Return the processes that have a file in a folder open."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has just been closed
            if str(file.readlink()).startswith(f"{folder}/"):
                found.add(int(file.parts[2]))
    return sorted(found)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_driver_that_is_killed_leaves_nothing() -> None:
    """No process, no folder, and no file of its workers, even if one of them is stopped."""
    with tempfile.TemporaryDirectory(prefix="d") as temporary, family() as drivers:
        own = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": temporary}
        driver = drivers.start([sys.executable, "-c", DRIVER], env=own, fresh=True)
        assert driver.stdout is not None
        words = driver.stdout.readline().split()
        assert len(words) == 3, driver.communicate(timeout=30)[1]
        folder, pids = Path(words[0]), [int(word) for word in words[1:]]
        assert folder.exists() and folder.parent == Path(temporary)
        for agent in agents_of(
            folder
        ):  # they end by themselves once they notice that Ray has gone, unless stopped
            os.kill(agent, signal.SIGSTOP)
            pids.append(agent)
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(driver.pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while time.monotonic() < until and (folder.exists() or drivers.members()):
            time.sleep(0.2)
        assert not folder.exists()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert drivers.members() == []
        assert not list(Path(temporary).glob("piper-*"))


def test_an_address_without_a_cluster_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(LaunchError, match=r"cannot be reached\n  address: .*\n  why: .*refused"):
            launcher.cluster(1).__enter__()
    assert time.monotonic() - began < 5
    assert not ray.is_initialized()


def test_a_cluster_that_wants_a_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ConnectionError("\nToken authentication is enabled but no token was found.\nMore.")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        LaunchError, match=r"why:     Token authentication is enabled but no token was found\.\n"
    ):
        launcher.cluster(1).__enter__()
