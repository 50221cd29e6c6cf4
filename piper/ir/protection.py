"""How copies of the state are kept, as graphs and plans both say it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Apart = Literal["machine", "device"]
APART: tuple[Apart, ...] = get_args(Apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How many copies of the state are kept beyond the first, how far apart, and after how many steps."""

    copies: int = 0
    apart: Apart = "machine"
    every: int = 1
    devices_per_machine: int | None = None  # neighbouring devices share a machine. None: all devices do

    def machine(self, device: int) -> int:
        """Return the number of the machine that a device is part of."""
        return 0 if self.devices_per_machine is None else device // self.devices_per_machine

    def domain(self, device: int) -> int:
        """Return what a device is lost together with: its machine, or itself alone."""
        return device if self.apart == "device" else self.machine(device)

    def domains(self, devices: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return the devices that are lost together, by machine or one by one."""
        members_by_domain: dict[int, list[int]] = {}
        for device in sorted(devices):
            members_by_domain.setdefault(self.domain(device), []).append(device)
        return {domain: tuple(members) for domain, members in members_by_domain.items()}
