"""The inputs that the host writes before a step that is one graph: rows of the batch, and learning rates.

A graph reads the same memory in every step. So the inputs that differ from step to step lie in static
memory, pinned on the host, which is filled before the graph is launched and read by it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.runtime.comm.base import CommError
from piper.runtime.compute import rows
from piper.runtime.context import Bound, Env
from piper.runtime.cuda.graph_checks import not_static, settings

Kernel = Callable[[Env, Instr], Bound]


class Intake:
    """The static inputs of one device's instructions, and the kernels that read them."""

    def __init__(self) -> None:
        self.fills: list[Bound] = []
        self.rates: list[Rates] = []
        self.capturing = False  # what fails meanwhile fails because it needs the host

    def kernels(self, kernels: Mapping[Op, Kernel]) -> dict[Op, Kernel]:
        """Return the kernels, of which those that take something from the host take it from static memory."""
        return {**kernels, "load": self.load, "update": self.update(kernels["update"])}

    def load(self, env: Env, ins: Instr) -> Bound:
        """Bring this device's rows of a batch field, for one microbatch, to the device."""
        slots, target, field = env.slots, env.at(ins.writes[0]), ins.loads.name
        dtype, device = env.setup.dtype, env.setup.device
        room: Tensor | None = None
        spans: list[tuple[int, int]] = []

        def fill() -> None:
            nonlocal room, spans
            value = env.batch[field]
            if room is None:  # every batch is like the first one
                spans = rows(env, ins, len(value))
                room = room_for([value[low:high] for low, high in spans], device)
            put(room, [value[low:high] for low, high in spans])

        def run() -> None:
            assert room is not None, "it is filled before the step"
            wanted = dtype if room.dtype.is_floating_point else room.dtype
            slots[target] = room.to(device, non_blocking=True, copy=True).to(wanted)

        self.fills.append(fill)
        return run

    def update(self, kernel: Kernel) -> Kernel:
        """Return an update whose learning rates are read from the device."""

        def bind(env: Env, ins: Instr) -> Bound:
            run = kernel(env, ins)
            assert env.state.optimizer is not None
            rates = Rates(env.state.optimizer, env.setup.device)
            self.rates.append(rates)

            def rated() -> None:
                env.state.captured = self.capturing
                try:
                    with rates.lent():
                        run()
                finally:
                    env.state.captured = False  # other programs use the same state

            return rated

        return bind

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Wrap an instruction so that it raises the reason if it cannot be captured."""

        def tried() -> None:
            try:
                run()
            except RuntimeError as error:
                if not self.capturing or isinstance(error, CommError | torch.OutOfMemoryError):
                    raise
                why = str(error).partition("\n")[0]
                raise not_static([f"{ins.node} needs the host: {why}"]) from error

        return tried

    def fill(self) -> None:
        """Put everything in place for the next step. The last one must be over."""
        for fill in self.fills:
            fill()
        for rates in self.rates:
            rates.fill()

    def settings(self) -> list[object]:
        """Return the settings that a captured graph keeps, though the host may change them."""
        return [settings(rates.optimizer) for rates in self.rates]


class Rates:
    """An optimizer's learning rates where a graph can read them, one for each group of parameters.

    Outside of a step the optimizer has them as numbers, as schedulers and checkpoints expect. They are single
    precision on the device: torch's fused kernels read no other.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        count, on_device = len(optimizer.param_groups), device.type == "cuda"
        self.host = torch.zeros(count, pin_memory=on_device)
        self.here = torch.zeros(count, device=device)
        if on_device:
            make_capturable(optimizer)

    def fill(self) -> None:
        """Take the rates that the optimizer has now."""
        self.host.copy_(torch.tensor([float(group["lr"]) for group in self.optimizer.param_groups]))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the optimizer read its rates from the device."""
        self.here.copy_(self.host, non_blocking=True)
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self.here.unbind(), strict=True):
                group["lr"] = rate
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate


def make_capturable(optimizer: Optimizer) -> None:
    """Let an optimizer keep its step counts on the device, before it has counted anything."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    # torch warns of a step that is not captured; the first ones are not.
    optimizer._warned_capturable_if_run_uncaptured = True


def room_for(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return memory for rows like these, one part after the other, where a graph can read it."""
    first = parts[0]
    count = sum(len(part) for part in parts)
    pinned = first.device.type == "cpu" and device.type == "cuda"
    return torch.empty((count, *first.shape[1:]), dtype=first.dtype, device=first.device, pin_memory=pinned)


def put(room: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy rows one part after the other."""
    for place, part in zip(room.split([len(part) for part in parts]), parts, strict=True):
        place.copy_(part)
