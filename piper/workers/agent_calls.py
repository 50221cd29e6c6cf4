"""Agents on other machines: calls of them, through actors of Ray or channels to ranks, and their devices."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piper.errors import LaunchError
from piper.plan.plan import Plans
from piper.workers.timeouts import TIMEOUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent, and where it runs.

    actor: has the methods of `MachineAgent`; `actor.look.remote()` begins a call and returns it. A call may
    be an argument of another one, which then gets its answer.
    """

    actor: Any
    node: str
    address: str
    local: int = 0  # the number of its accelerator, where it sees those of other agents too


class AgentCalls(ABC):
    """Waits for calls of agents."""

    lost: tuple[type[Exception], ...]  # what the answer of a lost agent raises
    crowded = False  # workers have to share accelerators

    @property
    @abstractmethod
    def own(self) -> str:
        """Return the address of the driver's machine."""

    @abstractmethod
    def get(self, call: Any, timeout: float = TIMEOUTS.meeting) -> Any:  # noqa: ANN401  calls have no type in common
        """Return the answer to a call."""

    @abstractmethod
    def wait(self, calls: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Wait until all calls have ended, at most `timeout` seconds. Return those, and the others."""

    @abstractmethod
    def put(self, value: Any) -> Any:  # noqa: ANN401
        """Return a value as an argument of several calls."""

    @abstractmethod
    def keys(self) -> tuple[bytes, bytes]:
        """Return the key that workers prove to know, and what agents are sent for it."""

    def answers(self, calls: Mapping[int, Any], timeout: float = TIMEOUTS.agent_answers) -> dict[int, object]:
        """Return what calls return, without those whose agent is lost or does not answer in time."""
        self.wait([*calls.values()], timeout)
        answers: dict[int, object] = {}
        for name, call in calls.items():
            try:
                answers[name] = self.get(call, TIMEOUTS.agent_poll_soon)
            except self.lost:
                continue
        return answers

    def finished(self, calls: Sequence[Any], timeout: float = 0.0) -> bool:
        """Return whether all of these calls have ended. A call that was lost has ended too."""
        return not self.wait(calls, timeout)[1]


def not_started(why: str) -> LaunchError:
    """Return the error of a worker that does not start."""
    return LaunchError(
        "a worker did not start",
        by="launch",
        facts={"why": why},
        hint="every node needs the same Python, torch and piper, and a way to the driver",
    )


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
    """Return the devices of each machine, and whether copies of the state need them on different machines."""
    asked, devices = plans.protection, plans.devices
    if asked is None or not asked.copies or asked.apart == "device":
        return [(device,) for device in devices], False
    return [*asked.domains(devices).values()], True


def packed_machines(plans: Plans, width: int) -> tuple[list[tuple[int, ...]], bool]:
    """Return the same as `machines_of` for machines that each have workers for `width` devices."""
    machines, apart = machines_of(plans)
    if not apart:  # any devices can share a machine
        devices = [device for machine in machines for device in machine]
        return [tuple(devices[n : n + width]) for n in range(0, len(devices), width)], False
    most = max(map(len, machines))
    if most > width:
        raise LaunchError(
            "machines have too few workers for this number of devices",
            by="launch",
            facts={
                "needs": f"{most} devices on a machine, for {sum(map(len, machines))} devices",
                "has": f"{width}, as the strategy of the most devices says",
            },
            hint="let protect have the same devices_per_machine for every number of devices",
        )
    return machines, True
