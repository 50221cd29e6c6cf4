"""NVIDIA's multi-process service, which lets processes run on one GPU at once: started for tests, and ended with them.

Without it processes take turns, which is slower and changes nothing else.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from piper.workers.processes import gone
from tests import warm

CONTROL = "nvidia-cuda-mps-control"
BOUND = 60.0  # seconds that a command may take
TRIAL = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
SWITCH = "PIPER_RANKS_MPS"  # 0: let processes take turns


class Service:
    """A service of our own, in a folder: it does not disturb one that the machine has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """Return what makes a process a client."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    def start(self) -> None:
        """Start the service, and try it. Raise if it does not work."""
        for path in self.environment.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        self._control("-d", check=True)
        env = {**os.environ, **self.environment}
        tried = warm.run(
            [sys.executable, "-c", TRIAL], env=env, capture_output=True, text=True, timeout=BOUND
        )
        if tried.returncode:
            raise OSError(f"a process cannot use it: {tried.stderr[-2000:]}\n{self.logs()}")

    def stop(self) -> None:
        """End the service, whatever its clients do."""
        with suppress(subprocess.SubprocessError, OSError):
            self._control(given="quit -t 10\n")
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the daemon, while it lives: its own file says which process it is."""
        found = [int(path.read_text() or 0) for path in self.folder.glob(f"*/{CONTROL}.pid")]
        return [pid for pid in found if pid and not gone(pid)]

    def logs(self) -> str:
        """Return the end of what the service wrote."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in self.folder.glob("log/*.log")
        )

    def _control(self, *words: str, given: str = "", check: bool = False) -> None:
        subprocess.run(
            [CONTROL, *words],
            env={**os.environ, **self.environment},
            input=given,
            stdout=subprocess.DEVNULL,  # the daemon keeps what it inherits
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=BOUND,
            check=check,
        )


@contextmanager
def own_service() -> Iterator[Mapping[str, str]]:
    """Yield the environment of the clients of a service that ends with the block. Empty: there is none."""
    if not available():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as name:
        service = Service(Path(name))
        try:
            yield started(service)
        finally:
            service.stop()


@contextmanager
def shared_service() -> Iterator[Mapping[str, str]]:
    """Yield the same for the workers of one parallel run of tests: the first starts it, the last ends it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or not available():
        with own_service() as environment:
            yield environment
        return
    folder = Path(tempfile.gettempdir()) / f"mps-{run[:12]}"
    (folder / "users").mkdir(parents=True, exist_ok=True)
    service, mine, broken = Service(folder), folder / "users" / str(os.getpid()), folder / "broken"
    with locked(folder):
        environment = {} if broken.exists() else service.environment
        if environment and not service.processes() and not (environment := started(service)):
            broken.touch()
        mine.touch()
    try:
        yield environment
    finally:
        with locked(folder):
            mine.unlink()
            if all(gone(int(user.name)) for user in (folder / "users").iterdir()):
                service.stop()
                shutil.rmtree(folder, ignore_errors=True)


def available() -> bool:
    """Return whether the service is installed and wanted."""
    return shutil.which(CONTROL) is not None and os.environ.get(SWITCH, "1") != "0"


def started(service: Service) -> dict[str, str]:
    """Start a service. Return the environment of its clients; an empty one, with a warning, if it does not work."""
    try:
        service.start()
    except (OSError, subprocess.SubprocessError) as error:
        service.stop()
        warnings.warn(f"MPS does not work, so ranks take turns on the GPU: {error}", stacklevel=2)
        return {}
    return service.environment


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a block."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
