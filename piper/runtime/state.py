"""What a device holds between steps: its part of the parameters, the optimizer over it, and buffers."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.plan.plan import Bucket
from piper.runtime.flat import Flat, Layout
from piper.runtime.setup import Initial, Setup


class Holding:
    """One bucket on one device: its parameters in the type that computes, and what the optimizer works on."""

    def __init__(self, bucket: Bucket, device: int, initial: Initial, setup: Setup) -> None:
        self.bucket, self.layout = bucket, Layout(bucket, device)
        layout = self.layout
        dtype = getattr(torch, bucket.dtype)
        full = torch.zeros(layout.length, dtype=dtype)  # on the host: the device holds no more than its part
        keeps_master = bucket.trainable and dtype in (torch.bfloat16, torch.float16)
        exact = torch.zeros(layout.length, dtype=torch.float32) if keeps_master else None
        for index, piece in enumerate(bucket.pieces):
            value = layout.local(initial(piece.name), index).reshape(-1)
            full[piece.offset : piece.offset + piece.numel] = value.to(dtype)
            if exact is not None:
                exact[piece.offset : piece.offset + piece.numel] = value.float()
        held = layout.owned(full).clone() if bucket.zero == 3 else full
        self.flat = held.to(setup.device)
        self.own = self.flat if bucket.zero == 3 else layout.owned(self.flat)
        self.master = None if exact is None else layout.owned(exact).clone().to(setup.device)
        self.param: Flat | Tensor = self.flat if bucket.zero == 3 else layout.over(self.flat)

    @property
    def trained(self) -> Tensor:
        """The elements that this device updates, in the type that the optimizer sees."""
        return self.own if self.master is None else self.master


class State:
    """Everything a device keeps from step to step."""

    def __init__(self, setup: Setup, device: int, initial: Initial) -> None:
        self.setup = setup
        self.holdings = {
            bucket.name: Holding(bucket, device, initial, setup)
            for bucket in setup.plans.buckets.values()
            if device in bucket.devices
        }
        self.reached = {
            name
            for chunk in setup.outline.chunks
            if "B" in chunk.phases
            for name in chunk.phases["B"].grad_params
        }
        self.keep_gradients = False
        self.gradients: dict[str, Tensor] = {}
        self.segments: dict[str, list[tuple[str, Tensor]]] = {}
        for name, holding in self.holdings.items():
            if holding.bucket.trainable:
                # Leaves of their own over the same memory: what computes need not know of gradients.
                self.segments[name] = [
                    (piece, tensor.detach().requires_grad_())
                    for piece, tensor in holding.layout.segments(holding.trained)
                ]
        trained = [tensor for segments in self.segments.values() for _, tensor in segments]
        self.optimizer: Optimizer | None = setup.optimizer(trained) if trained else None
        self.scheduler: LRScheduler | None = (
            setup.scheduler(self.optimizer) if setup.scheduler and self.optimizer else None
        )

    def resident(self, slot: str, initial: Initial) -> object:
        """What a slot that outlives the step holds at first."""
        kind, _, name = slot.partition(".")
        if kind == "buffer":
            divided = {n for c in self.setup.outline.chunks if c.kind == "expert" for n in c.buffers}
            ways = max((holding.bucket.ways for holding in self.holdings.values()), default=1)
            assert ways == 1 or name not in divided, f"{name}: buffers of divided experts are not divided yet"
            value = initial(name)
            dtype = self.setup.dtype if value.is_floating_point() else value.dtype
            return value.to(self.setup.device, dtype, copy=True)
        if kind == "constant":
            return self.setup.constants[name].to(self.setup.device)
        bucket, _, what = slot.rpartition(".")
        if what == "param":
            return self.holdings[bucket].param
        return None  # the optimizer keeps its own state; the total is written by the step

    def update(self, gradients: Mapping[str, Tensor], weight: float, norm: float | None) -> None:
        """Step the optimizer, given each bucket's summed gradient, their weight and the norm to clip by."""
        for name, gradient in gradients.items():
            if weight != 1.0:
                gradient.div_(weight)
            if self.keep_gradients:
                self.gradients[name] = gradient.clone()
            if norm is not None and self.setup.clip_norm is not None:
                gradient.mul_(min(1.0, self.setup.clip_norm / (norm + 1e-6)))
            self._give(name, gradient)
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name in gradients:
            holding = self.holdings[name]
            if holding.master is not None:
                holding.own.copy_(holding.master)

    def _give(self, name: str, gradient: Tensor) -> None:
        holding = self.holdings[name]
        exact = gradient if holding.master is None else gradient.float()
        segments = dict(holding.layout.segments(exact))
        for piece, tensor in self.segments[name]:
            if piece in self.reached:  # the others have no gradient at all, as in plain PyTorch
                tensor.grad = segments[piece]
