"""Machines that agents start workers on: which devices share one, and what is missing."""

from collections.abc import Mapping

from piper.errors import LaunchError
from piper.plan.plan import Plans


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
