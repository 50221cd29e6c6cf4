"""The rank of this process in a job that torchrun or the like has started, from the environment."""

import os
from dataclasses import dataclass

from piper.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RANKS = ("local", "torchrun")  # launchers that have a worker in each rank, where there are ranks
NEARBY = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The place of this process among the ranks of a job, as torchrun and the like set it."""

    rank: int
    size: int
    local: int  # which of its machine's processes this one is
    nearby: int  # how many of them are on this machine
    address: str  # where they meet
    port: int

    @property
    def leads(self) -> bool:
        """Return whether this process drives the others."""
        return self.rank == 0

    @property
    def one_machine(self) -> bool:
        """Return whether all ranks are on this machine."""
        return self.nearby == self.size


def rank_environment() -> RankEnvironment | None:
    """Return the rank that the environment gives this process. None: it was started on its own."""
    if any(name not in os.environ for name in NAMES):
        return None
    size = number("WORLD_SIZE")
    return RankEnvironment(
        rank=number("RANK"),
        size=size,
        local=number("LOCAL_RANK"),
        nearby=number(NEARBY) if NEARBY in os.environ else size,
        address=os.environ["MASTER_ADDR"],
        port=number("MASTER_PORT"),
    )


def check_started(by: str) -> None:
    """Refuse a process that torchrun has not started."""
    if missing := [name for name in NAMES if name not in os.environ]:
        raise ConfigError(
            "torchrun has not started this process",
            by=by,
            facts={"missing": ", ".join(missing)},
            hint="start it with torchrun --nproc-per-node N, or let piper start processes: on='local'",
        )


def check_alone(by: str) -> None:
    """Refuse a process that torchrun has started, where others are to be started from it."""
    if rank_environment() is not None:
        raise ConfigError(
            "this starts processes of its own, and its process belongs to a job of torchrun",
            by=by,
            hint="start one process, without torchrun",
        )


def number(name: str) -> int:
    """Return an environment variable as a number."""
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text} is not a number",
            by="launch",
            hint=f"start with torchrun, or unset {', '.join(NAMES)}",
        )
    return int(text)


def check_size(world: RankEnvironment, devices: int, spares: int = 0) -> None:
    """Refuse a number of processes that differs from the number of devices and spares."""
    if world.size == devices + spares:
        return
    what, hint = "there is not one process for each device", f"start {devices + spares} processes"
    facts = {"processes": f"WORLD_SIZE={world.size}", "devices": f"{devices} in the plan"}
    if spares:
        what, facts = f"{what} and each spare", {**facts, "spares": f"--spares {spares}"}
    else:
        hint = f"{hint}, or unset {', '.join(NAMES)} and piper starts them"
    raise ConfigError(what, by="launch", facts=facts, hint=hint)
