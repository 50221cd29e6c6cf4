"""The process of a rank that shares its GPU with other ranks. Traps let it fail inside a communication."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from piper.plan.instr import Instr
from piper.runtime.context import Bound
from piper.workers import serve
from piper.workers.blame import Watcher

CORES = "PIPER_RANKS_CORES"  # on which ranks may run, where tests are bound to one
TRAP = "PIPER_RANKS_TRAP"  # the file of a trap


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A failure of one rank at the next instruction of a kind, once."""

    device: int
    does: str  # the kind, as `Instr.does` says
    act: Literal["SIGKILL", "SIGSTOP", "sleep"]
    inside: bool  # the rank has begun the communication itself; else only the others have

    def arm(self, path: Path) -> None:
        """Let the next instruction of the kind fail."""
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self)), encoding="utf-8")
        written.rename(path)

    def fire(self) -> None:
        """Fail."""
        if self.act == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), signal.Signals[self.act])
        time.sleep(600)  # the signal may take a moment, in which the work must not go on


def sprung(path: Path, device: int, does: str) -> Trap | None:
    """Return the trap that a rank runs into, and remove it. None: there is none."""
    try:
        trap = Trap(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    if (trap.device, trap.does) != (device, does):
        return None
    path.unlink()
    return trap


def trapped(path: Path, device: int, ins: Instr, run: Bound) -> Bound:
    """Return an instruction that fails where a trap says so."""

    def act() -> None:
        trap = sprung(path, device, ins.does)
        if trap is not None and not trap.inside:
            trap.fire()
        run()
        if trap is not None:
            trap.fire()

    return act


def set_traps(path: Path) -> None:
    """Let every instruction of this process look for a trap."""
    watch: Callable[[Watcher, int, Instr, Bound], Bound] = Watcher.watch

    def watched(self: Watcher, place: int, ins: Instr, run: Bound) -> Bound:
        return watch(self, place, ins, trapped(path, self.device, ins, run))

    Watcher.watch = watched  # type: ignore[method-assign]


def become_rank() -> None:
    """Take the cores that ranks have."""
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, map(int, cores.split(",")))


def main(descriptors: Sequence[int]) -> int:
    """Be a worker."""
    become_rank()
    if path := os.environ.get(TRAP):
        set_traps(Path(path))
    return serve.main(descriptors)
