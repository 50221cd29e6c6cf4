"""A world that somebody else has started, as torchrun does: which of its processes this one is."""

import os
from dataclasses import dataclass

from piper.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NEARBY = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The processes of a job, all of which run the same script."""

    rank: int
    size: int
    local: int  # which of its machine's processes this one is
    nearby: int  # how many of them are on this machine
    address: str  # where they meet
    port: int

    @property
    def leads(self) -> bool:
        """Whether this is the process that drives the others."""
        return self.rank == 0

    @property
    def one_machine(self) -> bool:
        """Whether all are on this machine."""
        return self.nearby == self.size


def world_here() -> RankEnvironment | None:
    """The world that this process was started in, if its environment says so."""
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


def number(name: str) -> int:
    """An environment variable that is a number."""
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text} is not a number",
            by="launch",
            hint=f"start with torchrun, or unset {', '.join(NAMES)}",
        )
    return int(text)


def check_size(world: RankEnvironment, devices: int) -> None:
    """A process for each device, neither more nor fewer."""
    if world.size != devices:
        raise ConfigError(
            "there is not one process for each device",
            by="launch",
            facts={"processes": f"WORLD_SIZE={world.size}", "devices": f"{devices} in the plan"},
            hint=f"start {devices} processes, or unset {', '.join(NAMES)} and piper starts them",
        )
