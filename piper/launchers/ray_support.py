"""Parts of the Ray launcher that need no Ray: where actors are, errors, and the folder of our own Ray."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from piper.errors import LaunchError
from piper.launchers.driver import devices_of
from piper.plan.plan import Plans

END = 10.0  # seconds that removing it may take
REMOVER = """
import os, shutil, signal, sys, time
from pathlib import Path
folder, word = Path(sys.argv[1]), sys.stdin.read()
def of_ray(process):  # Ray writes new titles over command lines and environments; its logs stay open
    program = os.readlink(process / "exe")
    files = [os.readlink(file) for file in (process / "fd").iterdir()]
    ours = program == os.path.realpath(sys.executable) or "/ray/core/" in program
    return ours and any(file.startswith(f"{folder}/") for file in files)
until, absent = time.monotonic() + 60, 0
while time.monotonic() < until and absent < (1 if word else 8):
    if not word:  # the driver was killed: some processes of its Ray may still run, and write
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if of_ray(process):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
    shutil.rmtree(folder, ignore_errors=True)
    absent = 0 if folder.exists() else absent + 1
    time.sleep(0 if word else 0.5)
"""


@contextmanager
def folder_of_ray() -> Iterator[str]:
    """Make a folder that another process removes after the block, or when this process is killed."""
    folder = tempfile.mkdtemp(prefix="piper-ray-")
    words = [sys.executable, "-I", "-S", "-c", REMOVER, folder]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True) as remover:
        try:
            yield folder
        finally:
            remover.communicate("now", timeout=END)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLocation:
    """The process of a worker."""

    node: str
    address: str
    process: int


def not_started(why: str) -> LaunchError:
    """Return the error of an actor that does not become a worker."""
    return LaunchError(
        "an actor did not start",
        by="launch",
        facts={"why": why},
        hint="every node needs the same Python, torch and piper, and a way to the driver",
    )


def bundle_of(gpus: int) -> dict[str, float]:
    """Return the resources of one actor."""
    return {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}


def no_room(
    devices: int, bundle: Mapping[str, float], has: Mapping[str, float], machines: tuple[int, int] | None
) -> LaunchError:
    """Return the error of a cluster that is too small; `has`: its resources.

    machines: how many nodes are needed for copies that are apart, and how many there are. None: any number.
    """
    if machines is not None and machines[0] > machines[1]:
        return LaunchError(
            "the cluster has too few machines to keep copies of the state apart",
            by="launch",
            facts={
                "needs": f"{machines[0]} machines, spares included, with "
                + ", ".join(f"{amount:g} {name} each" for name, amount in bundle.items()),
                "has": f"{machines[1]} with that room",
            },
            hint='add machines, or keep copies on other devices: protect(at(), copies=1, apart="device")',
        )
    return LaunchError(
        "the cluster has no room for all workers",
        by="launch",
        facts={
            "needs": ", ".join(f"{devices * amount:g} {name}" for name, amount in bundle.items()),
            "has": ", ".join(f"{has.get(name, 0):g} {name}" for name in bundle),
        },
        hint="wait until other jobs have ended, add nodes, or place the job on fewer devices",
    )


def machines_of(plans: Plans) -> tuple[list[tuple[int, ...]], bool]:
    """Return the devices that share a machine, and whether machines have to differ: copies are kept apart."""
    asked, devices = plans.protection, devices_of(plans)
    if asked is None or not asked.copies or asked.apart == "device":
        return [(device,) for device in devices], False
    return [*asked.domains(devices).values()], True
