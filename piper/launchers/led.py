"""Verbs under torchrun: rank 0 does them, and the others work for it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from piper.launchers.world import world_here

P = ParamSpec("P")


def led(verb: Callable[P, None]) -> Callable[P, None]:
    """Let a verb that launches be done by rank 0 alone, if it is to run on the processes of a world."""

    @wraps(verb)
    def act(*args: P.args, **kwargs: P.kwargs) -> None:
        world = world_here() if kwargs["on"] == "local" else None
        if world is None:
            verb(*args, **kwargs)
        elif world.leads:
            from piper.launchers.rendezvous import leading  # torch is paid for only where it is used

            with leading(world):
                verb(*args, **kwargs)
        else:
            from piper.launchers.torchrun_worker import attend

            attend(world)

    return act
