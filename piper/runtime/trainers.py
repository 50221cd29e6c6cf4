"""Makes optimizers and schedulers with the user's functions, and refuses those that a run cannot step.

They are tried on stand-ins for the parameters of each device, without memory or in miniature.
"""

import gc
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper.callbacks import Averaged
from piper.errors import ConfigError, PiperError
from piper.ir.grouping import grouped
from piper.ir.sharding import Sharding, local_sizes, whole_sizes
from piper.plan.bucket import Bucket
from piper.process.usercode import named, raised
from piper.runtime.bucket_layout import own_slice

Sizes = Mapping[str, tuple[int, ...]]
MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
OPTIMIZER = "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
SCHEDULER = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
PAIRS = ("named", "named_params", "named_parameters")  # arguments that are pairs of a name and a parameter
PARAMS = ("params", "param_names")  # what a group has besides options
TRIED = 2  # steps of a scheduler, before anything is trained
MOST_SHARDS, MOST_WAYS = 3, 2  # into which a miniature is cut: it has few elements
LARGEST = 8  # along one axis of a miniature


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A device's part of one parameter: all, a slice of it, or a flat run of either."""

    name: str
    shardings: tuple[Sharding, ...] = ()  # empty: the device holds all of it, before ZeRO
    position: int = 0  # of the device among those that shard it
    run: tuple[int, int] | None = None  # of the flattened slice; None: all of it, in its shape

    def of(self, value: Tensor) -> Tensor:
        """Return this part of a parameter or of its gradient."""
        value = own_slice(value, self.shardings, self.position)
        return value if self.run is None else value.reshape(-1)[self.run[0] : self.run[1]]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a parameter."""
        return local_sizes(whole, self.shardings) if self.run is None else (self.run[1] - self.run[0],)


Parts = tuple[ParameterPart, ...]  # that the optimizer of one device is given, in order


def classes_of(buckets: Iterable[Bucket]) -> list[tuple[tuple[int, ...], tuple[Bucket, ...]]]:
    """Return the devices that hold the same buckets, with these buckets, in the order of the plan."""
    by_device = grouped((device, bucket) for bucket in buckets for device in bucket.devices)
    classes = grouped((tuple(b.name for b in mine), device) for device, mine in by_device.items())
    return [(tuple(devices), tuple(by_device[devices[0]])) for devices in classes.values()]


def parts_on(device: int, buckets: Iterable[Bucket]) -> Parts:
    """Return what the optimizer of a device is given of these buckets."""
    return tuple(
        ParameterPart(
            name=piece.name,
            shardings=piece.shardings,
            position=bucket.devices.index(device) if piece.shardings else 0,
            run=(low - piece.offset, high - piece.offset) if bucket.zero and not bucket.bounds else None,
        )
        for bucket in buckets
        for piece, low, high in bucket.pieces_in(*bucket.owned(device))
    )


def small_parts(buckets: Sequence[Bucket], sizes: Sizes) -> Iterator[Parts]:
    """Yield what devices are given of buckets in miniature, for each place among few shards and slices."""

    def cuts(bucket: Bucket) -> tuple[int, int]:
        slices = max(MOST_WAYS ** len(piece.shardings) for piece in bucket.pieces)
        return min(bucket.group_size, MOST_SHARDS) if bucket.zero else 1, slices

    for number in range(max(math.prod(cuts(bucket)) for bucket in buckets)):
        given = (small_pieces(bucket, sizes, number, *cuts(bucket)) for bucket in buckets)
        yield tuple(part for parts in given for part in parts)


def small_pieces(
    bucket: Bucket, sizes: Sizes, number: int, shards: int, slices: int
) -> Iterator[ParameterPart]:
    """Yield a device's parts of a bucket in miniature, of which every parameter is cut, by shards too."""
    rank, position = number // slices % shards, number % slices
    for piece in bucket.pieces:
        held = small_shardings(piece.shardings)
        part = ParameterPart(name=piece.name, shardings=held, position=position if held else 0)
        length = math.prod(part.shape(sizes[piece.name]))
        own = -(-length // shards)
        if not bucket.zero or (bucket.bounds and bucket.owner(piece) % shards == rank):
            yield part
        elif not bucket.bounds and rank * own < length:
            yield replace(part, run=(rank * own, min(length, (rank + 1) * own)))


def hollow(sizes: Sizes) -> list[tuple[str, Tensor]]:
    """Return the names of parameters, with tensors of their true shapes that take no memory."""
    mode, device = FakeTensorMode(), torch.device("cpu")

    def empty(shape: tuple[int, ...]) -> Tensor:  # `torch.empty` in the mode takes three times as long
        tensor: Tensor = FakeTensor(mode, torch.empty(shape, device="meta"), device)
        return tensor.requires_grad_()

    return [(name, empty(shape)) for name, shape in sizes.items()]


def small_shardings(shardings: Sequence[Sharding]) -> tuple[Sharding, ...]:
    """Return the shardings of a parameter in miniature, along the same dimensions: few ways, in order."""
    return tuple(
        Sharding(dim=each.dim, degree=MOST_WAYS, stride=MOST_WAYS**number)
        for number, each in enumerate(shardings)
    )


def small_sizes(sizes: Sizes, buckets: Iterable[Bucket]) -> dict[str, tuple[int, ...]]:
    """Return small shapes with as many axes: axes that differ in size still do, in the same order."""
    shardings = {piece.name: piece.shardings for bucket in buckets for piece in bucket.pieces}
    local = {name: local_sizes(shape, shardings.get(name, ())) for name, shape in sizes.items()}
    distinct = sorted({size for shape in local.values() for size in shape if size > 1})
    small = {0: 0, 1: 1} | {size: min(place + 2, LARGEST) for place, size in enumerate(distinct)}
    return {
        name: whole_sizes([small[size] for size in shape], small_shardings(shardings.get(name, ())))
        for name, shape in local.items()
    }


class Parameters(list[Tensor]):
    """The parameters of an optimizer. `named_parameters()` gives their names too, as a model does."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__(tensor for _, tensor in named)
        self.named = named

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return every parameter with its name."""
        return list(self.named)


def takes_pairs(make: MakeOptimizer) -> bool:
    """Return whether a function takes pairs of a name and a parameter: its argument has a name of `PAIRS`."""
    while isinstance(make, Averaged):  # a callback of the job has wrapped it
        make = make.make
    try:
        first = next(iter(inspect.signature(make).parameters), "")
    except (TypeError, ValueError):  # it is written in C
        return False
    return first in PAIRS


def build_optimizer(
    make: MakeOptimizer,
    whole: Sequence[tuple[str, Tensor]],
    held: Sequence[tuple[str, Tensor]],
    initial: Callable[[str], Tensor],
) -> Optimizer | None:
    """Return the optimizer of a device that holds parts of parameters. None: it cannot be made without any.

    The user's function sees every parameter of the model with its name and original shape, so that its groups
    are those of plain PyTorch. The parts then take the places of the parameters. A function that looks at
    values gets the initial ones. One whose optimizer refers to parameters beside its groups gets the parts.

    whole: `hollow` ones of the parameters that plain PyTorch gives to the optimizer, in the model's order.
    """
    try:
        optimizer = make_optimizer(make, whole)
    except ConfigError as error:
        if not looks_at_values(error):
            raise
        whole = [(name, initial(name).detach().requires_grad_()) for name, _ in whole]
        optimizer = make_optimizer(make, whole)
    names, parts = {id(tensor): name for name, tensor in whole}, dict(held)
    groups, at_once = optimizer.param_groups, bool(optimizer.state)
    if at_once and not held:
        return None
    for group in groups:
        found = [names[id(tensor)] for tensor in group["params"] if id(tensor) in names]
        here = [name for name in found if name in parts]
        group["params"] = [parts[name] for name in here]
        if "param_names" in group:
            group["param_names"] = here
    if at_once and is_ours(optimizer):
        optimizer.state = type(optimizer)(groups, **optimizer.defaults).state
    if held and keeps_stand_ins(optimizer, names):
        optimizer = make_optimizer(make, held)
        if len(groups) == len(optimizer.param_groups):
            for made, group in zip(optimizer.param_groups, groups, strict=True):
                made.update(group)  # the same object: an optimizer inside of it may have the group too
        else:
            optimizer.param_groups[:] = groups
    return optimizer


def keeps_stand_ins(optimizer: Optimizer, ids: Collection[int]) -> bool:
    """Return whether lists, state or hooks of an optimizer refer to stand-ins, or know one by its `id`."""
    seen, left = set[int](), list[object]([vars(optimizer)])
    while left:
        each = left.pop()
        if isinstance(each, FakeTensor) or id(each) in ids or (type(each) is int and each in ids):
            return True
        if id(each) in seen or isinstance(each, Tensor | type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):  # not its globals, which lead to everything
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            left += gc.get_referents(each)
    return False


def looks_at_values(error: ConfigError) -> bool:
    """Return whether a user's function may have failed because stand-ins have no values."""
    return isinstance(error.__cause__, RuntimeError | TypeError)


def make_optimizer(make: MakeOptimizer, named_params: Sequence[tuple[str, Tensor]]) -> Optimizer:
    """Call the user's `optimizer`, with pairs if it takes these, and refuse what cannot train on devices."""
    before = {name for name, tensor in named_params if has_hooks(tensor)}  # the model's own
    with telling("optimizer() failed", make, f"it is called with a list of all parameters: {OPTIMIZER}"):
        made = make(list(named_params) if takes_pairs(make) else Parameters(named_params))  # type: ignore[arg-type]
    by, kind = named("optimizer", make), type(made).__name__
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer() returned {kind}, not an optimizer", by=by, hint=f"return one: {OPTIMIZER}"
        )
    if needs_closure(made):
        raise ConfigError(
            f"{kind} cannot be used: its step() needs a closure",
            by=by,
            facts={"why": "a closure computes the loss again within one step, and a plan computes it once"},
            hint="use an optimizer whose step() takes no arguments, such as AdamW or SGD",
        )
    if any("lr" not in group for group in made.param_groups):
        raise ConfigError(
            f"{kind} has no learning rate",
            by=by,
            facts={"groups": "keys are " + ", ".join(sorted(key for key in made.param_groups[0]))},
            hint='give every group of parameters an "lr": metrics and schedulers read it there',
        )
    if any(group.get("differentiable") for group in made.param_groups):
        raise ConfigError(
            f"{kind} cannot be used with differentiable=True",
            by=by,
            facts={
                "why": "such a step is part of a graph for autograd, which no parameter of a model can be in"
            },
            hint="leave differentiable out: the step is the same",
        )
    after = (name for name, tensor in named_params if has_hooks(tensor))
    hooked_on = next((name for name in after if name not in before), None)
    if hooked_on is not None:
        raise ConfigError(
            f"optimizer() registers a hook on the gradient of {hooked_on}",
            by=by,
            facts={"why": "an optimizer gets gradients that are summed already: no such hook is called"},
            hint="change gradients in a step hook of the optimizer: register_step_pre_hook",
        )
    return made


def has_hooks(tensor: Tensor) -> bool:
    """Return whether somebody has asked to be called with the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextmanager
def telling(
    what: str, make: object, hint: str, role: str = "optimizer", facts: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Say of an error inside that the user's function, or what it made, has failed."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        raise raised(what, error, role=role, thing=make, facts=facts or {}, hint=hint) from error


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step cannot be called without arguments."""
    step = inspect.unwrap(type(optimizer).step)
    _, *parameters = inspect.signature(step).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in optional for p in parameters)


def make_scheduler(make: MakeScheduler, optimizer: Optimizer) -> LRScheduler:
    """Call the user's `scheduler`, and refuse what it gives where a run cannot step it."""
    with telling("scheduler() failed", make, f"it is called with the optimizer: {SCHEDULER}", "scheduler"):
        made = make(optimizer)
    by, kind = named("scheduler", make), type(made).__name__
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            f"{kind} cannot be used: its step() needs a metric",
            by=by,
            facts={"why": "devices step their schedulers without one, so that all have the same rate"},
            hint=f"use a scheduler of the step alone: {SCHEDULER}",
        )
    needs = ("step", "state_dict", "load_state_dict")
    if missing := [name for name in needs if not callable(getattr(made, name, None))]:
        raise ConfigError(
            f"scheduler() returned {kind}, not a scheduler",
            by=by,
            facts={"missing": ", ".join(missing)},
            hint=f"return one: {SCHEDULER}",
        )
    return made


def advance(scheduler: LRScheduler, make: MakeScheduler, step: int) -> None:
    """Step a scheduler; where it raises, say so before any device does."""
    name, at = type(scheduler).__name__, {"at": f"step {step}"}
    hint = "fix the scheduler at that line, or let its schedule be as long as the job's steps"
    with telling(f"{name} cannot go on", make, hint, "scheduler", at), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an optimizer that was not stepped: it has nothing to train
        scheduler.step()


def try_scheduler(make: MakeScheduler, optimizer: Optimizer, steps: int) -> None:
    """Make a scheduler and step it a few times: what raises is said before anything is trained."""
    scheduler = make_scheduler(make, optimizer)
    for step in range(1, min(TRIED, steps) + 1):
        advance(scheduler, make, step)


def empty_optimizer(make: MakeOptimizer, sizes: Sizes) -> Optimizer | None:
    """Return an optimizer with the groups of the workers' and nothing to train. None: none is trained."""
    if not sizes:
        return None
    try:
        return make_optimizer(make, hollow(sizes))
    except ConfigError as error:
        if not looks_at_values(error):
            raise
    small = small_sizes(sizes, ())
    return make_optimizer(make, [(n, torch.zeros(size, requires_grad=True)) for n, size in small.items()])


def is_ours(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own: their steps may come in parts."""
    return type(optimizer) in vars(torch.optim).values()


def hooked(optimizer: Optimizer) -> bool:
    """Return whether somebody has asked to be called at an optimizer's steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
