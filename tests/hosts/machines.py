"""Hosts of a test's own on this machine: each has its network, processes, name and memory, as a machine has.

A host is a set of Linux namespaces that lives as long as its first process. Killing that one ends every process
of the host at once and removes its network, so nothing is left, however a test ends: the first process reads
from a pipe of the test's process, and ends with it. The cables lead to a bridge in one more namespace, so that
no traffic enters the network of this machine.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PREFIX = "10.99.0"
BOUND = 30.0  # seconds that making or ending a host may take
ROOM = "256m"  # of shared memory and of the private folder, each
PRIVATE = Path("/mnt")  # a folder that every host has for itself
NEEDED = ("ip", "unshare", "nsenter", "mount")
KINDS = ("--net", "--pid", "--mount", "--mount-proc", "--uts", "--ipc")
TRIAL = """
ip link add one0 type veth peer name two0
ip link add bridge type bridge
mount -t tmpfs none /mnt
"""
# Orphans are reaped by the system, as `SIG_IGN` asks. The host lives until the pipe is closed.
FIRST = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.read()
os._exit(0)
"""


@cache
def obstacle() -> str | None:
    """Return why hosts cannot be made here. None: they can."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"needs the commands {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tried = subprocess.run(
        ["unshare", *KINDS, "--fork", "sh", "-ec", TRIAL],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    if tried.returncode != 0:
        return f"cannot make hosts as namespaces here: {tried.stderr.strip() or tried.returncode}"
    return None


def command(*words: str) -> str:
    """Run a command of this machine that must succeed. Return what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=BOUND, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Namespaces:
    """Namespaces that end with their first process."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.holder = subprocess.Popen(
            ["unshare", "--pid", "--fork", *kinds, "--kill-child", sys.executable, "-I", "-S", "-c", FIRST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C for the test is not for its hosts
        )
        assert self.holder.stdout is not None
        said = self.holder.stdout.readline()
        assert said == "up\n", f"no namespaces: {said!r}"
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        (self.first,) = map(int, children.read_text(encoding="ascii").split())

    def enter(self, *words: str) -> list[str]:
        """Return the command that runs another command inside."""
        kinds = [kind for kind in self.kinds if kind != "--mount-proc"]
        return ["nsenter", f"--target={self.first}", *kinds, *words]

    def end(self) -> None:
        """End every process inside, at once. Idempotent."""
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.close()
        self.holder.wait(BOUND)  # the first has gone, and before it all others inside
        self.holder.stdout.close()


class Host:
    """One host: its name, its address, and its cable to the bridge."""

    def __init__(self, number: int, switch: Namespaces) -> None:
        self.name, self.address, self.port = f"host{number}", f"{PREFIX}.{number + 1}", f"port{number}"
        self.switch, self.started = switch, list[subprocess.Popen[str]]()
        self.inside = Namespaces(*KINDS)

    def connect(self) -> None:
        """Lay the cable, and give the host its name, address and memory."""
        cable = [
            f"ip link add {self.port} type veth peer name eth0 netns {self.inside.first}",
            f"ip link set {self.port} master bridge",
            f"ip link set {self.port} up",
        ]
        lines = [
            f"hostname {self.name}",
            "ip link set lo up",
            f"ip address add {self.address}/24 dev eth0",
            "ip link set eth0 up",
            *(f"mount -t tmpfs -o size={ROOM} none {folder}" for folder in ("/dev/shm", PRIVATE)),
        ]
        command(*self.switch.enter("sh", "-ec", "\n".join(cable)))
        command(*self.inside.enter("sh", "-ec", "\n".join(lines)))

    def start(
        self, *words: str, env: Mapping[str, str] = os.environ, folder: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on the host; what it prints can be read."""
        process = subprocess.Popen(
            self.inside.enter(*(["env", f"--chdir={folder}"] if folder else []), *words),
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(
        self,
        *words: str,
        env: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        bound: float = BOUND,
    ) -> str:
        """Run a command on the host that must succeed. Return what it prints."""
        process = self.start(*words, env=env, folder=folder)
        out, err = process.communicate(timeout=bound)
        assert process.returncode == 0, f"{self.name}: {' '.join(words)}: {out}{err}"
        return out

    def unplug(self) -> None:
        """Take the host's link down. Its processes go on."""
        command(*self.switch.enter("ip", "link", "set", self.port, "down"))

    def slow(self, rate: str) -> None:
        """Let the host send no faster than a rate of `tc`, such as 100mbit."""
        self.run(
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "1s"
        )

    def plug(self) -> None:
        """Bring the link up again."""
        command(*self.switch.enter("ip", "link", "set", self.port, "up"))

    def kill(self) -> None:
        """Take the host's power: it sends nothing more, then all of its processes have ended. Idempotent."""
        if self.inside.holder.poll() is None:
            self.unplug()
        self.inside.end()
        for process in self.started:
            process.wait(BOUND)

    def restart(self) -> None:
        """Give a killed host its power again, with the same name and address and without what was on it."""
        # The system removes the cable of a host that has ended some time later.
        command(*self.switch.enter("sh", "-c", f"ip link delete {self.port} 2>&1 || true"))
        self.inside = Namespaces(*KINDS)
        self.connect()

    def end(self) -> None:
        """End the host, and what the test holds of it."""
        self.kill()
        for process in self.started:
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()


@contextmanager
def hosts(count: int) -> Iterator[Sequence[Host]]:
    """Make hosts that reach each other, and end them with the block, whatever ends it."""
    switch = Namespaces("--net")
    made: list[Host] = []
    try:
        command(*switch.enter("sh", "-ec", "ip link add bridge type bridge\nip link set bridge up"))
        for number in range(count):
            made.append(Host(number, switch))
            made[-1].connect()
        yield made
    finally:
        for host in made:
            host.end()
        switch.end()
