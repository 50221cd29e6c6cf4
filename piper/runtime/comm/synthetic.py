"""Communication of a device that runs without its peers: values of the right shape, made of its own.

A device that runs alone computes with real kernels on real memory, so what arrives must have the shape that
it would have, and be numbers like those it would be. A sum is this device's share of it, gathered shards are
its own shard, an exchange brings back the rows it would have sent: as many, grouped as its own routing says,
which is what a balanced router gives every device. `occupied` keeps a stream busy for as long as a network
would take.
"""

import functools
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter, sleep

import torch
from torch import Tensor

from piper.ir.devices import Devices
from piper.plan.instr import Instr
from piper.plan.ops import OPS, Op
from piper.runtime.accelerator import module
from piper.runtime.comm.base import Comms, Form, Group
from piper.runtime.context import Bound, Env, writing
from piper.runtime.expert_exchange import Splits

BLOCK = 2**28  # bytes of one copy at most
SPIN = 2e-4  # seconds: a sleep is not exact, so the end of a wait is spent looking at the clock
Kernel = Callable[[Env, Instr], Bound]
Seconds = Callable[[Op, float, tuple[int, ...]], float]  # by op, bytes that each member sends, and members


class AloneComms(Comms):
    """The communicators of a device that is alone."""

    on_streams = True

    def group_of(self, name: str, members: Devices) -> "AloneGroup":
        return AloneGroup(name, members.index(self.device), len(members))

    def pipe(self, name: str, ends: Devices) -> "Drain":
        return Drain()


class AloneGroup(Group):
    """A group of which only one member runs."""

    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Return the parts themselves: a network needs no processor, so nothing is copied here."""
        # Zeros stand for what other members give where that has another length.
        return [
            part if len(part) == length else part.new_zeros((length, *part.shape[1:]))
            for part, length in zip(parts, lengths, strict=True)
        ]

    def all_reduce(self, flat: Tensor) -> Tensor:
        return flat

    def reduce_scatter(self, flat: Tensor, length: int) -> Tensor:
        mine = flat[self.rank * length : (self.rank + 1) * length]
        if len(mine) == length:
            return mine.clone()
        shard = flat.new_zeros(length)
        shard[: len(mine)] = mine
        return shard

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        # One copy for each member: a GPU leaves these to its copy engines, as a network would. A single copy
        # to all of them is a kernel, and slows down the compute beside it.
        for part in out[: len(shard) * self.size].view(self.size, len(shard)):
            if part.data_ptr() != shard.data_ptr():
                part.copy_(shard)

    def shift(self, flat: Tensor, by: int) -> Tensor:
        return flat.clone()  # it takes memory of its own, as what arrives does

    def broadcast(self, value: Tensor) -> Tensor:
        return value


class Drain:
    """A pipe without a peer: values sent are dropped; `arriving` makes those received."""

    def send(self, value: Tensor) -> None:
        """Drop a value."""

    def recv(self, form: Form) -> Tensor:
        raise AssertionError("what arrives is made by `arriving`, which knows its shape")


def arriving(env: Env, ins: Instr) -> Bound:
    """Make a value like the one that another device would send: small numbers, or counts of one."""
    slots, target = env.slots, env.at(ins.writes[0])
    device, (shape, dtype) = env.setup.device, env.arriving(ins)
    scale = 0.02 if dtype.is_floating_point else 0.0
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1021, generator=generator).mul(scale).to(device, dtype)  # a prime: rows differ

    def run() -> None:
        value = torch.empty(shape, dtype=dtype, device=device)
        flat = value.view(-1)
        even = len(flat) - len(flat) % len(sample)
        flat[:even].view(-1, len(sample)).copy_(sample)
        flat[even:].copy_(sample[: len(flat) - even])
        slots[target] = value

    return run


def totalled(env: Env, ins: Instr) -> Bound:
    """Sum up a step as if the other devices had seen samples: gradients are divided by the total weight."""
    # A device without the loss has no weight of its own. Dividing by 0 would fill its parameters with NaN,
    # which a GPU multiplies a fifth faster than numbers, because all products are the same.
    weight = env.setup.plans.places["weight"]

    def sums_of(mine: Tensor) -> Tensor:
        sums = mine.clone()
        sums[weight].clamp_(min=1.0)
        return sums

    return writing(env, ins, sums_of)


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
    """Copies between host and device for the time given, which leaves the processors free."""

    # Copies in one direction at one time share the link, as they would a network adapter.

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
        members = env.setup.plans.comms[ins.comm].group_of(env.device, ins.op)
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
