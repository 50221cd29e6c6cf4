"""Draws the random numbers of a model's initial values on the device that it will run on."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from piper.runtime.accelerator import KINDS, is_accelerator, module

_aten = torch.ops.aten
_FILLS = {  # operations that fill a tensor with random numbers
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
}
_MAKES = {  # operations that return a new tensor of random numbers
    _aten.rand.default,
    _aten.rand_like.default,
    _aten.randn.default,
    _aten.randn_like.default,
    _aten.normal.float_float,
}


PIECE = 2**24  # bytes that are copied at a time
SMALL = 2**20  # bytes that are copied at once
CORES = 16  # that copy at a time: more are no faster


class DrawnOn(TorchDispatchMode):
    """Draws floating-point numbers for tensors of the host on an accelerator, and copies them to the host.

    A billion numbers take 10 s on a host, whose generator is serial. The accelerator holds one tensor at a
    time, so a model need not fit on it, and a constructor sees the tensors that it would see otherwise. The
    numbers are those of the same call on a tensor of the accelerator. A call with a generator of its own
    stays on the host.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.buffers: list[Tensor] = []  # pinned ones, as soon as a large tensor is copied

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _FILLS and _on_host(args[0]):
            target: Tensor = args[0]
            empty = torch.empty(target.shape, dtype=target.dtype, device=self.device)
            return self._copy(func(empty, *args[1:], **kwargs), target)
        if func in _MAKES and _made_on_host(args, kwargs):
            made: Tensor = func(*args, **{**kwargs, "device": self.device, "pin_memory": False})
            return self._copy(made, torch.empty_like(made, device="cpu"))
        return func(*args, **kwargs)

    def _copy(self, drawn: Tensor, target: Tensor) -> Tensor:
        """Copy what was drawn to the host: piece by piece, and there by several cores."""
        # The host's memory is new. To write it for the first time takes one core a second for each GB.
        if not is_accelerator(drawn.device) or drawn.nbytes <= SMALL or not target.is_contiguous():
            return target.copy_(drawn)
        self.buffers = self.buffers or [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        length = PIECE // drawn.element_size()
        pieces = [*zip(drawn.view(-1).split(length), target.view(-1).split(length), strict=True)]
        staged = [buffer.view(drawn.dtype) for buffer in self.buffers]
        events = [module(drawn.device).Event() for _ in staged]

        def send(number: int) -> None:
            piece = pieces[number][0]
            staged[number % 2][: len(piece)].copy_(piece, non_blocking=True)
            events[number % 2].record()

        threads = torch.get_num_threads()
        torch.set_num_threads(min(CORES, len(os.sched_getaffinity(0))))
        try:
            send(0)
            for number, (_, place) in enumerate(pieces):
                if number + 1 < len(pieces):
                    send(number + 1)
                events[number % 2].synchronize()
                place.copy_(staged[number % 2][: len(place)])
        finally:
            torch.set_num_threads(threads)
        return target


def _on_host(value: object) -> bool:
    """Return whether a value is a plain tensor in memory of the host."""
    return type(value) in (Tensor, nn.Parameter) and isinstance(value, Tensor) and value.device.type == "cpu"


def _made_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call returns a new tensor in memory of the host."""
    asked = kwargs.get("device")
    if asked is None and args and isinstance(args[0], Tensor):
        return _on_host(args[0])
    return asked is None or torch.device(asked).type == "cpu"


@contextmanager
def seeded_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside, draw initial values on a device, and restore the generators."""
    there = is_accelerator(device)
    kind, numbers = device.type if there else next(iter(KINDS)), {device.index or 0} if there else set()
    accelerator = torch.get_device_module(kind)
    if there:
        accelerator.init()
    if accelerator.is_initialized():
        numbers.add(accelerator.current_device())
    with torch.random.fork_rng(devices=numbers, device_type=kind):
        torch.manual_seed(seed)
        with DrawnOn(device) if there else nullcontext():
            yield
    if there:
        accelerator.empty_cache()  # the workers may be other processes, which need the memory
