"""The state of a device between steps: its part of the parameters, their optimizer, and buffers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.plan.plan import Slot
from piper.runtime.accelerator import is_accelerator, runs_triton
from piper.runtime.bucket_state import BucketState, HostMemory, HostState, join, split
from piper.runtime.optimizer_states import plain_attributes, states_of
from piper.runtime.setup import Initial, Setup
from piper.runtime.trainers import PARAMS, build_optimizer, hollow, hooked, is_ours

if TYPE_CHECKING:
    from piper.runtime.cuda.adam import SplitAdam

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
PORTION = 2**26  # elements whose gradients are cast at a time, where the optimizer works in another type


class DeviceState:
    """Everything a device keeps from step to step."""

    def __init__(
        self, setup: Setup, device: int, initial: Initial, beside: "Sequence[DeviceState]" = ()
    ) -> None:
        """Fill the state. beside: those of the same device in other layouts, with which it shares memory."""
        self.setup, self.device = setup, device
        self.buffers: Mapping[str, Slot] = beside[0].buffers if beside else setup.plans.of(device).buffers
        residents = setup.plans.of(device).residents.items()
        offloaded = {slot.owner for slot, held in residents if slot.kind == "state" and held.host}
        memory = HostMemory()
        self.holdings: dict[str, BucketState] = {}
        self.segments: dict[str, list[tuple[str, Tensor]]] = {}
        for bucket in setup.plans.buckets_on(device):
            held = ((state, name) for state in beside for name in state.holdings)
            lent = next((one for one in held if bucket.lies_as(one[0].holdings[one[1]].bucket)), None)
            if lent is not None:
                state, there = lent
                self.holdings[bucket.name] = state.holdings[there]
                self.segments |= {bucket.name: state.segments[there]} if there in state.segments else {}
                continue
            away = memory if bucket.name in offloaded else None
            holding = self.holdings[bucket.name] = BucketState(bucket, device, initial, setup, away)
            if bucket.trainable:
                self.segments[bucket.name] = holding.leaves()
        self.reached = setup.outline.reached
        self.keep_gradients = False
        self.captured = False  # the step becomes a graph: the host cannot read anything of it
        self.renewed: list[Callable[[], None]] = []  # what kernels do when the state was loaded
        self.gradients: dict[str, Tensor] = {}
        self.unused: dict[str, dict[str, dict[str, object]]] = {}
        # ^ what an optimizer kept for frozen parameters, by bucket and name, as a checkpoint had it
        self.copies, self.remainders = self._copies()
        trained = [held for segments in self.segments.values() for held in segments]
        sizes = {p.name: p.shape for p in setup.outline.parameters if p.trainable}
        self.trains = bool(trained)  # else its shards are padding only, or all that it has is frozen
        # It has an optimizer even so: its options are those that schedulers set and users read.
        self.optimizer: Optimizer | None = None
        self.by_values = False  # whether what is in its groups follows from values

        def value(name: str) -> Tensor:
            self.by_values = True
            return initial(name)

        if sizes:
            with self._joined([tensor for _, tensor in trained]):  # some look at values
                self.optimizer = build_optimizer(setup.optimizer, hollow(sizes), trained, value)
        if self.optimizer is not None and is_accelerator(setup.device):
            fuse(self.optimizer)
        self.scheduler: LRScheduler | None = (
            setup.scheduler(self.optimizer) if setup.scheduler and self.optimizer else None
        )
        self.began = plain_attributes(self.optimizer)
        self.kernel = self._kernel()
        self.away: dict[str, HostState] = {}  # by bucket
        for name, segments in self.segments.items():
            if name in offloaded:
                given = (self.holdings[name], [each for _, each in segments], self.remainders, memory)
                self.away[name] = HostState(*given, self.optimizer, setup.device)

    def _copies(self) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
        """Return what chunks read in another type, and what rounding leaves of that, by what is trained."""
        copies, remainders = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
        for name, segments in self.segments.items():
            holding = self.holdings[name]
            if holding.master is None or holding.bucket.slices:
                continue
            tensors = [tensor for _, tensor in segments]
            copies |= zip(tensors, (part for _, part in holding.trains.segments(holding.own)), strict=True)
            if holding.bucket.splits:
                parts = (part for _, part in holding.trains.segments(holding.master))
                remainders |= zip(tensors, parts, strict=True)
        return copies, remainders

    def update(
        self, gradients: Mapping[str, list[Tensor]], sums: Mapping[str, Tensor], *, weighted: bool
    ) -> None:
        """Step the optimizer, given each bucket's summed gradient, and the first number of each sum."""
        # A gradient is one tensor of what this device owns, or one for each piece. Sums stay on the device;
        # the host waits for them only where overflows may skip the update, unless the step is captured.
        weight, skip = sums.get("weight") if weighted else None, sums.get("overflows")
        if self.keep_gradients:
            for name, parts in gradients.items():
                flat = torch.cat([part.reshape(-1) for part in parts])
                self.gradients[name] = flat if weight is None else flat / weight
        if self.optimizer is None or not self.trains:
            return
        if skip is not None and not self.captured and skip.item() > 0:
            return
        divisor = self._divisor(sums.get("squares"), weight)
        pairs = [*self._pairs(gradients)]
        if self.kernel is not None:
            pairs = self.kernel.step(pairs, divisor, skip)
        for portion in portions(self.optimizer, pairs, splits=bool(self.remainders)):
            tensors = [tensor for tensor, _ in portion]
            with self._joined(tensors):
                give_gradients(portion)
                scaled = scaled_step(self.optimizer, tensors, divisor, skip if self.captured else None)
                with scaled, in_place(self.optimizer, tensors):
                    self.optimizer.step()
                for tensor in tensors:
                    tensor.grad = None
            updated = [
                tensor for tensor in tensors if tensor in self.copies and tensor not in self.remainders
            ]
            if updated:
                torch._foreach_copy_([self.copies[tensor] for tensor in updated], updated)

    @contextmanager
    def _joined(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let those of some tensors that are split have memory, and split what they hold at the end."""
        apart = [tensor for tensor in tensors if tensor in self.remainders]
        if not apart:
            yield
            return
        halves = [[of[tensor].view(-1) for tensor in apart] for of in (self.copies, self.remainders)]
        exact = join(*map(torch.cat, halves))
        sizes, without = [tensor.numel() for tensor in apart], [tensor.data for tensor in apart]
        for tensor, part in zip(apart, exact.split(sizes), strict=True):
            tensor.data = part.view(tensor.shape)
        yield
        for held, updated in zip(halves, split(exact), strict=True):
            torch._foreach_copy_(held, list(updated.split(sizes)))
        for tensor, released in zip(apart, without, strict=True):
            tensor.data = released

    def own(self, beside: "DeviceState") -> set[str]:
        """Return the buckets whose memory the state of another layout does not use too."""
        common = {id(holding) for holding in beside.holdings.values()}
        return {name for name, holding in self.holdings.items() if id(holding) not in common}

    def hold(self, wanted: bool, buckets: Iterable[str]) -> None:
        """Take memory for buckets, or give it back, with what the optimizer keeps for them."""
        for name in buckets:
            for tensor in (self.holdings[name].flat, self.holdings[name].master):
                if tensor is not None:  # what refers to it stays as it is
                    tensor.untyped_storage().resize_(tensor.nbytes if wanted else 0)
                    tensor.detach().zero_() if wanted else None
            if not wanted and self.optimizer is not None:
                for _, trained in self.segments.get(name, ()):
                    states_of(self.optimizer).pop(trained, None)

    def options(self) -> list[tuple[bool, dict[str, object]]]:
        """Return of the optimizer's groups whether this device trains some of each, and the options."""
        # Empty: it trains nothing.
        if self.optimizer is None or not self.trains:
            return []
        return [
            (bool(group["params"]), {k: plain(v) for k, v in group.items() if k not in PARAMS})
            for group in self.optimizer.param_groups
        ]

    def members(self) -> list[list[str]] | None:
        """Return the parameters in each of the optimizer's groups. None: they do not follow from values."""
        if self.optimizer is None or not self.by_values:
            return None
        names = {tensor: name for held in self.segments.values() for name, tensor in held}
        return [[names[tensor] for tensor in group["params"]] for group in self.optimizer.param_groups]

    def regroup(self, members: Sequence[Sequence[str]] | None) -> None:
        """Let the optimizer's groups have the parameters that they had when it was made."""
        here = self.members()
        if self.optimizer is None or here is None or members is None:
            return
        tensors = {name: tensor for held in self.segments.values() for name, tensor in held}
        began = {name: number for number, names in enumerate(members) for name in names}
        moved = [(began.get(name, number), name) for number, names in enumerate(here) for name in names]
        for number, group in enumerate(self.optimizer.param_groups):
            names = [name for there, name in moved if there == number]
            group["params"] = [tensors[name] for name in names]
            if "param_names" in group:
                group["param_names"] = names

    def set_option(self, group: int, key: str, value: float) -> None:
        """Set an option of one of the optimizer's groups, in place where it is a tensor."""
        if self.optimizer is None:
            return
        held = self.optimizer.param_groups[group]
        if isinstance(held[key], Tensor):
            held[key].fill_(value)
        else:
            held[key] = value

    def kept(self, bucket: str, key: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return what the optimizer keeps for a bucket as one flat tensor, and which parameters have it."""
        found = torch.zeros_like(self.holdings[bucket].trained)
        places = dict(self.holdings[bucket].trains.segments(found))
        state = {} if self.optimizer is None else states_of(self.optimizer)
        names = []
        for piece, tensor in self.segments[bucket]:
            value = state.get(tensor, {}).get(key)
            if isinstance(value, Tensor) and value.numel() == tensor.numel():
                places[piece].copy_(value.view(places[piece].shape))
                names.append(piece)
        return found, tuple(names)

    def _divisor(self, squares: Tensor | None, weight: Tensor | None) -> Tensor | None:
        """Return the divisor of the gradients: their weight, and more where that clips their norm."""
        if squares is None or self.setup.clip_norm is None:
            return weight
        divisor = torch.ones_like(squares) if weight is None else weight
        excess = (squares.sqrt() / divisor + 1e-6) / self.setup.clip_norm
        return divisor * excess.clamp(min=1.0)

    def _pairs(self, gradients: Mapping[str, list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what the optimizer updates, with its gradient."""
        for name, gradient in gradients.items():
            given = self.holdings[name].trains.apart(gradient)
            for piece, tensor in self.segments[name]:
                if piece in self.reached:  # the others have no gradient at all, as in plain PyTorch
                    yield tensor, given[piece]

    def _kernel(self) -> "SplitAdam | None":
        """Return the kernel that casts and updates at once. None: there is nothing to cast, or no Triton."""
        if self.optimizer is None or not self.remainders or not runs_triton(self.setup.device):
            return None
        from piper.runtime.cuda.adam import SplitAdam  # imports Triton, which only a GPU's torch has

        return SplitAdam(self.optimizer, self.copies, self.remainders)


def portions(
    optimizer: Optimizer, pairs: Sequence[tuple[Tensor, Tensor]], *, splits: bool
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield all pairs at once, or of torch's own optimizers as many as casts may take memory for."""
    casts = splits or any(tensor.dtype != gradient.dtype for tensor, gradient in pairs)
    apart = casts and not hooked(optimizer) and is_ours(optimizer)
    portion: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        portion.append(pair)
        if apart and sum(tensor.numel() for tensor, _ in portion) >= PORTION:
            yield portion
            portion = []
    if portion or not apart:
        yield portion


def plain(value: object) -> object:
    """Return an option as a number where it is a tensor."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def give_gradients(portion: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give gradients to the trained tensors, cast to their type where it differs."""
    casts, sources = list[Tensor](), list[Tensor]()
    for tensor, gradient in portion:
        cast = gradient
        if gradient.dtype != tensor.dtype:
            cast = torch.empty_like(tensor)
            casts.append(cast)
            sources.append(gradient)
        tensor.grad = cast
    if casts:  # together: on CUDA casts one by one move half as many bytes a second
        torch._foreach_copy_(casts, sources)


@contextmanager
def scaled_step(
    optimizer: Optimizer, tensors: Sequence[Tensor], divisor: Tensor | None, skip: Tensor | None
) -> Iterator[None]:
    """Let a step see the gradients of tensors divided, and change nothing where `skip` is 1, or more."""
    given: dict[str, Tensor] = {}  # to torch's fused kernels, as `torch.amp.GradScaler` does
    types = {tensor.dtype for tensor in tensors}
    if skip is not None:
        assert steps_fused(optimizer), "graphs are refused where an optimizer cannot skip a step"
        given["found_inf"] = skip.clamp(max=1).float()
    divides = is_fused(optimizer) and not optimizer._optimizer_step_pre_hooks  # which read gradients
    if divisor is not None and types == {torch.float32} and divides:
        given["grad_scale"] = divisor.float()  # they divide as they read
    elif divisor is not None:
        for dtype in types:  # CUDA divides all in one kernel if the divisor has their type
            values = [tensor.grad for tensor in tensors if tensor.grad is not None and tensor.dtype is dtype]
            torch._foreach_div_(values, divisor.to(dtype))
    for name, value in given.items():
        setattr(optimizer, name, value)
    yield
    for name in given:
        delattr(optimizer, name)


@contextmanager
def in_place(optimizer: Optimizer, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let a step that assigns to `data` update the memory that tensors had before, which chunks read."""
    before = [] if is_ours(optimizer) and not hooked(optimizer) else [tensor.data for tensor in tensors]
    yield
    for tensor, data in zip(tensors, before, strict=False):
        if tensor.data_ptr() != data.data_ptr():
            data.copy_(tensor.data)
            tensor.data = data


def steps_fused(optimizer: Optimizer) -> bool:
    """Return whether a step of an optimizer is one of torch's fused kernels, and nothing else comes of it."""
    return is_fused(optimizer) and not hooked(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps by one of torch's fused kernels."""
    return type(optimizer) in FUSED and all(group.get("fused") for group in optimizer.param_groups)


def fuse(optimizer: Optimizer) -> None:
    """Let an optimizer work in one kernel where it has one and its maker left the choice to it."""
    for group in optimizer.param_groups:
        undecided = group.get("fused", True) is None and group.get("foreach") is None
        if undecided and not (group.get("capturable") or group.get("differentiable")):
            group["fused"] = True
