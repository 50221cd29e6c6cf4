"""Keeps a stream busy for as long as a network would take."""

import functools
from collections.abc import Callable
from time import monotonic, perf_counter, sleep

import torch

from piper.plan.instr import Instr
from piper.plan.ops import OPS, Op
from piper.runtime.accelerator import module
from piper.runtime.context import Bound, Env
from piper.runtime.expert_exchange import Splits

BLOCK = 2**28  # bytes of one copy at most
SPIN = 2e-4  # seconds: a sleep is not exact, so the end of a wait is spent looking at the clock

Kernel = Callable[[Env, Instr], Bound]
Seconds = Callable[[Op, float, tuple[int, ...]], float]  # by op, bytes that each member sends, and members


class Sleeper:
    """Lets a thread wait; the processor is free meanwhile."""

    def __call__(self, seconds: float, outward: bool) -> None:
        until = monotonic() + seconds
        if seconds > SPIN:
            sleep(seconds - SPIN)
        while monotonic() < until:
            pass

    def filling(self, nbytes: int) -> float:
        """Return the seconds that it takes to fill so much memory, where that takes a stream's time."""
        return 0.0


class CopyEngine:
    """Copies between host and device for the time given, which leaves the processors free.

    The copy engines share the link to the host: copies in one direction at one time take longer than
    predicted, as they would on one network adapter. The two directions are independent.
    """

    def __init__(self, accelerator: torch.device) -> None:
        self.host = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(BLOCK, dtype=torch.uint8, device=accelerator)
        self.rates = {
            outward: self._rate(functools.partial(self._copy, BLOCK, outward)) for outward in (False, True)
        }
        half = BLOCK // 2
        self.local = self._rate(lambda: self.device[:half].copy_(self.device[half:])) / 2

    @property
    def nbytes(self) -> int:
        """Return the bytes of the accelerator's memory that this takes."""
        return self.device.nbytes

    def _copy(self, nbytes: int, outward: bool) -> None:
        here, there = (self.host, self.device) if outward else (self.device, self.host)
        here[:nbytes].copy_(there[:nbytes], non_blocking=True)

    def filling(self, nbytes: int) -> float:
        return nbytes / self.local

    def _rate(self, copy: Callable[[], object]) -> float:
        """Return the measured bytes per second of a copy that counts as one block."""
        best = float("inf")
        for _ in range(3):
            module(self.device.device).synchronize(self.device.device)
            begin = perf_counter()
            copy()
            module(self.device.device).synchronize(self.device.device)
            best = min(best, perf_counter() - begin)
        return BLOCK / best

    def __call__(self, seconds: float, outward: bool) -> None:
        left = int(seconds * self.rates[outward])
        while left > 0:
            self._copy(min(left, BLOCK), outward)
            left -= BLOCK


def occupied(kernel: Kernel, seconds: Seconds, occupy: "Sleeper | CopyEngine") -> Kernel:
    """Wrap a kernel that communicates so that it takes as long as it would on a network."""

    def bind(env: Env, ins: Instr) -> Bound:
        run = kernel(env, ins)
        if ins.comm is None:
            return run
        members = env.setup.plans.comms[ins.comm].group_of(env.device)
        takes = seconds(ins.travels_as, ins.nbytes, members)
        outward = OPS[ins.travels_as].outward
        if ins.op == "gather":  # what the network would write is written here by a copy, in part of its time
            takes -= occupy.filling(ins.nbytes * len(members) // max(1, len(members) - 1))
        if ins.op == "exchange":
            return exchanged(env, ins, run, functools.partial(occupy, takes, outward))

        def busy() -> None:
            occupy(takes, outward)  # first: a value is there when it has arrived
            run()

        return busy

    return bind


def exchanged(env: Env, ins: Instr, run: Bound, occupy: Bound) -> Bound:
    """Wrap an exchange of rows, which a network cannot begin before the host knows how many there are."""
    slots, splits = env.slots, env.at(ins.reads[1])

    def busy() -> None:
        how = slots[splits]
        if isinstance(how, Splits):
            how.lengths()
        occupy()
        run()

    return busy
