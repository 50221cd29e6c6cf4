"""Keeps a stream busy for as long as a network would take."""

from collections.abc import Callable
from time import monotonic, perf_counter, sleep
from typing import Protocol

import torch

from piper.plan.instr import Instr
from piper.runtime.env import Bound, Env

BLOCK = 2**28  # bytes of one copy at most
SPIN = 2e-4  # seconds: a sleep is not exact, so the end of a wait is spent looking at the clock
OUTWARD = frozenset(("send", "reduce_scatter"))  # these leave the device: the other way of the link

Kernel = Callable[[Env, Instr], Bound]
Seconds = Callable[[str, float, tuple[int, ...]], float]  # by op, bytes that each member sends, and members


class Occupier(Protocol):
    """Makes the current stream take some time."""

    def __call__(self, seconds: float, outward: bool) -> None: ...


def sleep_for(seconds: float, outward: bool) -> None:
    """Let a thread wait; the processor is free meanwhile."""
    until = monotonic() + seconds
    if seconds > SPIN:
        sleep(seconds - SPIN)
    while monotonic() < until:
        pass


class CopyEngine:
    """Moves so many bytes between host and device as take the time, which leaves the processors alone.

    The copy engines share the link to the host: what goes one way at one time takes longer than foreseen,
    as it would on one network adapter. The two ways do not hinder each other.
    """

    def __init__(self, accelerator: torch.device) -> None:
        self.host = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(BLOCK, dtype=torch.uint8, device=accelerator)
        self.rates = {outward: self._rate(outward) for outward in (False, True)}

    @property
    def nbytes(self) -> int:
        """The memory of the accelerator that this takes."""
        return self.device.nbytes

    def _copy(self, nbytes: int, outward: bool) -> None:
        here, there = (self.host, self.device) if outward else (self.device, self.host)
        here[:nbytes].copy_(there[:nbytes], non_blocking=True)

    def _rate(self, outward: bool) -> float:
        """Bytes per second, measured."""
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize(self.device.device)
            begin = perf_counter()
            self._copy(BLOCK, outward)
            torch.cuda.synchronize(self.device.device)
            best = min(best, perf_counter() - begin)
        return BLOCK / best

    def __call__(self, seconds: float, outward: bool) -> None:
        left = int(seconds * self.rates[outward])
        while left > 0:
            self._copy(min(left, BLOCK), outward)
            left -= BLOCK


def occupied(kernel: Kernel, seconds: Seconds, occupy: Occupier) -> Kernel:
    """A kernel that communicates, made to take as long as it would on a network."""

    def bind(env: Env, ins: Instr) -> Bound:
        run = kernel(env, ins)
        if ins.comm is None:
            return run
        groups = env.setup.plans.comms[ins.comm].groups
        members = next(group for group in groups if env.device in group)
        takes, outward = seconds(ins.op, ins.nbytes, members), ins.op in OUTWARD

        def busy() -> None:
            occupy(takes, outward)  # first: a value is there when it has arrived
            run()

        return busy

    return bind
