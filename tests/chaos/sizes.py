"""The ways to disturb a run, and how often each has to be recovered from."""

import signal
from dataclasses import dataclass
from functools import partial

from tests.chaos.lost_hosts import torchrun_hosts
from tests.chaos.parts import Asked, Part, Seen, elastic, hangs, preempted, signalled


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A part, the number of its events, and the minutes that they take on two idle cores."""

    act: Part
    events: int
    minutes: float
    p95: float  # seconds in which 95 % of the recoveries have to be over
    most: float  # seconds in which each has to be over


def ray_hosts(asked: Asked) -> Seen:
    from tests.chaos import lost_nodes  # needs Ray

    return lost_nodes.ray_hosts(asked)


def ray_nodes(asked: Asked) -> Seen:
    from tests.chaos import lost_nodes

    return lost_nodes.ray_nodes(asked)


PARTS = {
    "elastic": Sized(act=elastic, events=50, minutes=2, p95=5, most=10),
    "hangs": Sized(act=hangs, events=50, minutes=5, p95=10, most=10),
    "stops": Sized(act=partial(signalled, signal.SIGSTOP), events=100, minutes=6, p95=10, most=10),
    "sigterm-local": Sized(act=partial(preempted, "local"), events=20, minutes=5, p95=30, most=30),
    "sigterm-torchrun": Sized(act=partial(preempted, "torchrun"), events=20, minutes=6, p95=30, most=30),
    "sigterm-ray": Sized(act=partial(preempted, "ray"), events=20, minutes=10, p95=30, most=30),
    "ray-nodes": Sized(act=ray_nodes, events=20, minutes=12, p95=10, most=10),
    "torchrun-hosts": Sized(act=torchrun_hosts, events=20, minutes=20, p95=30, most=60),
    "ray-hosts": Sized(act=ray_hosts, events=20, minutes=25, p95=30, most=60),
    "kills": Sized(act=partial(signalled, signal.SIGKILL), events=1000, minutes=35, p95=5, most=10),
}
