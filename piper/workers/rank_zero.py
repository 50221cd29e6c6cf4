"""Runs a verb of the command line on rank 0 of a job that torchrun has started."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from piper.workers.rank_environment import RANKS, rank_environment

P = ParamSpec("P")
R = TypeVar("R")


def on_rank_zero(verb: Callable[P, R]) -> Callable[P, R]:
    """Run a verb of the command line on rank 0 only under torchrun, with agents in the other ranks."""

    @wraps(verb)
    def act(*args: P.args, **kwargs: P.kwargs) -> R:
        world = rank_environment() if kwargs["on"] in RANKS else None
        if world is None:
            return verb(*args, **kwargs)
        if world.leads:
            from piper.workers.rendezvous import leading  # torch is paid for only where it is used

            with leading(world):
                return verb(*args, **kwargs)
        from piper.workers.rank_agent import attend

        sys.exit(attend(world))

    return act
