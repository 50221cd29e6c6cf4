"""Tries an optimizer on small parameters, held as the job's devices hold them.

In plain PyTorch an optimizer sees every parameter whole. A device of a pipeline has only some of the
parameters, and under ZeRO only flat runs of them. The probe steps the
optimizer on the whole model in miniature, then on what each device holds of it, and compares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from piper.errors import ConfigError, ScheduleError
from piper.ir.devices import show
from piper.ir.dtypes import job_precision
from piper.ir.graph import Graph
from piper.job import Job
from piper.lower.buckets import ProgramBuckets, with_whole_parameters
from piper.plan.bucket import Bucket
from piper.process.usercode import named, said
from piper.runtime.accelerator import computing_on
from piper.runtime.optimizer_states import states_of
from piper.runtime.trainers import (
    PARAMS,
    MakeOptimizer,
    ParameterPart,
    Parts,
    Sizes,
    build_optimizer,
    classes_of,
    empty_optimizer,
    hollow,
    is_ours,
    parts_on,
    small_parts,
    small_sizes,
    telling,
    try_scheduler,
)

STEPS, MORE = 4, 12  # of torch's own, and of others: some wait for ten gradients before they look at them
CLOSE = 1e-5  # of how far an element moved
ROUNDING = 1e-9  # of how far its tensor moved
FEW = 2**22  # elements: so many can be tried in their true sizes
RATE = 1e-2  # in place of a rate of 0, under which nothing moves


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The facts about an optimizer that the compiler needs."""

    state_bytes: int  # of state for one element of a parameter, with what a step needs beside it
    name: str = "no optimizer"
    ours: bool = True  # it is one of torch's own, whose state is by parameter: its step may come in parts
    whole: bool = False  # it needs whole parameters: under ZeRO each has one owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The small copy of the whole model on which an optimizer is tried."""

    make: MakeOptimizer
    whole: Sequence[tuple[str, Tensor]]  # parameters of the true sizes, without memory
    start: Mapping[str, Tensor]  # every parameter in the model's order
    gradients: Callable[[int], Mapping[str, Tensor]]  # of a step, for the parameters that have one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What some steps have made of parts, and of what the optimizer keeps. Values are those inside of it."""

    moved: list[Tensor]  # how far, by part
    states: list[list[object]]  # by part
    groups: list[list[object] | None]  # of each group the options, and then all else. None: it has no parts


@computing_on(1)  # to begin and end many threads for each of many small tensors takes seconds
def probe_optimizer(make: MakeOptimizer, sizes: Sizes, buckets: Sequence[Bucket]) -> OptimizerFacts:
    """Step an optimizer on small parameters; refuse one that would train otherwise on the job's devices."""
    trained = [bucket for bucket in buckets if bucket.trainable]
    if not trained:
        return OptimizerFacts(state_bytes=0)
    whole = tuple(ParameterPart(name=name) for name in sizes)  # as in plain PyTorch, in the model's order
    small = small_sizes(sizes, trained)
    double = any(bucket.dtype == "float64" for bucket in trained)
    dtype = torch.float64 if double else torch.float32  # what optimizers see: master copies of shorter types
    try:
        optimizer, tensors = stepped(trial_of(make, sizes, small, trained, dtype), whole)
    except ConfigError:
        if sum(map(math.prod, sizes.values())) > FEW:
            raise
        small = {**sizes}  # it may need true sizes, and they are few enough
        optimizer, tensors = stepped(trial_of(make, sizes, small, trained, dtype), whole)
    probe = facts_of(optimizer, sum(tensor.numel() for tensor in tensors))
    apart = [  # the others see what plain PyTorch shows
        (devices, mine) for devices, mine in classes_of(trained) if parts_on(devices[0], mine) != whole
    ]
    everyone = tuple(sorted({device for bucket in trained for device in bucket.devices}))
    if not apart and len(everyone) == 1:
        return probe
    trial = trial_of(make, sizes, small, trained, torch.float64)
    expected = outcome_of(trial, whole)
    again = outcome_of(trial, whole, seed=1).moved if len(everyone) > 1 else expected.moved
    drawn = unlike(whole, again, expected.moved)
    if drawn is not None:
        raise ConfigError(
            f"{probe.name} draws random numbers, and each device would draw its own",
            by=named("optimizer", make),
            facts={"devices": show(everyone), "but": f"{drawn.name} is updated in another way each time"},
            hint="use an optimizer whose step depends on gradients and its own state only",
        )
    for devices, mine in apart:
        tried = filter(None, small_parts(mine, small))  # a device of padding only has no optimizer
        why = next(filter(None, (difference(trial, parts, expected) for parts in tried)), None)
        if why is not None:
            count = sum(len(bucket.pieces) for bucket in mine)
            raise ConfigError(
                f"{probe.name} cannot work where a device does not hold all parameters in order",
                by=named("optimizer", make),
                facts={"devices": f"{show(devices)} hold {count} parameters", "but": why},
                hint="let every device hold all: zero=0 and no pipeline; or clip with the job's clip_norm, "
                "and give each parameter the same options wherever it is: by its shape, not by its place in "
                "the list",
            )
    return probe


def facts_of(optimizer: Optimizer, count: int) -> OptimizerFacts:
    """Return what an optimizer is like that has stepped parameters of so many elements."""
    kept = sum(
        value.numel() * value.element_size()
        for parameter, state in states_of(optimizer).items()
        if isinstance(parameter, Tensor)  # else it belongs to none
        for value in tree_leaves(state)
        if isinstance(value, Tensor) and value.dim()  # counters of steps have no axes
    )
    name = type(optimizer).__name__
    return OptimizerFacts(state_bytes=kept // max(1, count), name=name, ours=is_ours(optimizer))


def trial_of(
    make: MakeOptimizer, sizes: Sizes, small: Sizes, buckets: Sequence[Bucket], dtype: torch.dtype
) -> Trial:
    """Return first values and gradients: of scales that differ by tensor and step, some of them zero."""
    trained = {piece.name for bucket in buckets for piece in bucket.pieces}
    rng = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype)

    def gradient(number: int, place: int, shape: tuple[int, ...]) -> Tensor:
        zero = (number, place % 3) == (2, 1)
        # Small ones first: what is divided by a norm of them all is lost in the rounding of large ones.
        scale = 0.0 if zero else 10.0 ** float(torch.randint(-2, 3, (), generator=rng) - 4 * (number < 2))
        return drawn(shape) * scale

    start = {name: drawn(shape) for name, shape in small.items()}
    known: list[dict[str, Tensor]] = []

    def gradients(number: int) -> Mapping[str, Tensor]:
        if number == len(known):
            places = ((place, name) for place, name in enumerate(small) if name in trained)
            known.append({name: gradient(number, place, small[name]) for place, name in places})
        return known[number]

    return Trial(make=make, whole=hollow(sizes), start=start, gradients=gradients)


def stepped(trial: Trial, parts: Parts, seed: int = 0) -> tuple[Optimizer, list[Tensor]]:
    """Return the optimizer of some small parts, stepped a few times, and what it moved."""
    tensors = [part.of(trial.start[part.name]).clone().requires_grad_() for part in parts]
    held = [(part.name, tensor) for part, tensor in zip(parts, tensors, strict=True)]
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` also notes a stack for each accelerator.
        torch.default_generator.manual_seed(seed)
        optimizer = build_optimizer(trial.make, trial.whole, held, trial.start.__getitem__)
        assert optimizer is not None, "it is given parts"
        for group in optimizer.param_groups:
            if isinstance(group["lr"], float | int):
                group["lr"] = group["lr"] or RATE
                if group.get("foreach", False) is None and is_ours(optimizer):
                    group["foreach"] = True  # one call for all, which torch prefers only on accelerators
        name, hint = type(optimizer).__name__, "fix the optimizer at that line"
        for number in range(STEPS if is_ours(optimizer) else MORE):
            gradients = trial.gradients(number)
            for part, tensor in zip(parts, tensors, strict=True):
                if part.name in gradients:
                    tensor.grad = part.of(gradients[part.name]).to(tensor.dtype).clone()
            with telling(f"{name}.step() failed", trial.make, hint):
                optimizer.step()
    return optimizer, tensors


def outcome_of(trial: Trial, parts: Parts, seed: int = 0) -> TrialOutcome:
    """Return what the steps of a trial make of some parts. Of torch's own, what moves shows all."""
    optimizer, tensors = stepped(trial, parts, seed)
    starts = [part.of(trial.start[part.name]) for part in parts]
    moved = [tensor.detach() - start for tensor, start in zip(tensors, starts, strict=True)]
    if is_ours(optimizer):
        return TrialOutcome(moved=moved, states=[[] for _ in parts], groups=[])
    groups = [
        tree_leaves({k: v for k, v in group.items() if k not in PARAMS}) if group["params"] else None
        for group in optimizer.param_groups
    ]
    states = states_of(optimizer)
    own = [value for key, value in states.items() if not isinstance(key, Tensor)]
    own += [value for value in vars(optimizer).values() if isinstance(value, float | Tensor)]
    return TrialOutcome(
        moved=moved,
        states=[tree_leaves(states.get(tensor, {})) for tensor in tensors],
        groups=[*groups, tree_leaves(own)],
    )


def unlike(parts: Parts, found: Sequence[Tensor], expected: Sequence[Tensor]) -> ParameterPart | None:
    """Return the first part that moved to another place than expected."""
    for part, got, wanted in zip(parts, found, expected, strict=True):
        if not close(got, wanted):
            return part
    return None


def close(got: Tensor, wanted: Tensor) -> bool:
    """Return whether the elements of a tensor are those of another up to rounding, whatever their shapes."""
    if got.numel() != wanted.numel() or not got.numel():
        return got.numel() == wanted.numel()
    got, wanted = got.reshape(-1).double(), wanted.reshape(-1).double()
    least = ROUNDING * float(wanted.abs().nan_to_num().max())
    return bool(torch.isclose(got, wanted, rtol=CLOSE, atol=least, equal_nan=True).all())


def kept_alike(got: Sequence[object], wanted: Sequence[object]) -> bool:
    """Return whether an optimizer keeps the same numbers; what is no number may differ."""
    pairs = [
        [torch.as_tensor(each) for each in two]
        for two in zip(got, wanted, strict=False)
        if all(isinstance(each, Tensor | float | int) for each in two)
    ]
    return len(got) == len(wanted) and all(close(*two) for two in pairs)


def difference(trial: Trial, parts: Parts, expected: TrialOutcome) -> str | None:
    """Return why an optimizer does not move parts as in the whole model. None: it does."""
    moved = dict(zip(trial.start, expected.moved, strict=True))
    states = dict(zip(trial.start, expected.states, strict=True))
    try:
        found = outcome_of(trial, parts)
    except ConfigError as error:
        cause = error.__cause__
        why = said(cause) if cause is not None else str(error).splitlines()[0]
        return f"it refuses what a device holds: {why}"

    def part_of(part: ParameterPart, value: object) -> object:
        like = isinstance(value, Tensor) and value.shape == trial.start[part.name].shape
        return part.of(cast(Tensor, value)) if like else value

    other = unlike(parts, found.moved, [part.of(moved[part.name]) for part in parts])
    differs = [] if other is None else [f"{other.name} is updated in another way"]
    differs += [
        f"what it keeps for {part.name} differs"
        for part, state in zip(parts, found.states, strict=True)
        if not kept_alike(state, [part_of(part, value) for value in states[part.name]])
    ]
    for got, wanted in zip(found.groups, expected.groups, strict=False):
        if got is not None and wanted is not None and not kept_alike(got, wanted):
            differs.append("what it keeps for all parameters together differs")
    where = "where only some parameters are held: it looks at more than one tensor, or at the order of them"
    return f"{differs[0]} {where}" if differs else None


def facts_of_optimizer(job: Job, graph: Graph, buckets: ProgramBuckets) -> OptimizerFacts:
    """Try a job's optimizer and scheduler on what each device holds of a model."""
    trained = trained_in(buckets)
    sizes = {p.name: p.shape for p in graph.outline.parameters if p.trainable}
    whole, sliced = False, dict[str, str]()
    try:
        probe = probe_optimizer(job.optimizer, sizes, trained)
    except ConfigError:
        if not any(bucket.zero or piece.shardings for bucket in trained for piece in bucket.pieces):
            raise
        whole = True
        cut = with_whole_parameters(buckets)
        probe = probe_optimizer(job.optimizer, sizes, trained_in(cut))
        sliced = {chunk: b.pieces[0].name for b in cut.read.values() if b.slices for chunk in b.chunks}
    check_offloaded(probe, graph, sliced)
    if job.scheduler is not None and (optimizer := empty_optimizer(job.optimizer, sizes)) is not None:
        try_scheduler(job.scheduler, optimizer, job.steps)
    types = job_precision(job.precision)
    # Of an optimizer that steps all parameters at once, those that are split are joined all at once.
    joined = types.sum_itemsize if types.splits and not probe.ours else 0
    return replace(probe, state_bytes=probe.state_bytes + joined, whole=whole)


def trained_in(buckets: ProgramBuckets) -> tuple[Bucket, ...]:
    """Return the buckets of parameters that a backward reaches, as their optimizer sees them."""
    return tuple(bucket.update for bucket in buckets.read.values() if bucket.trainable)


def check_offloaded(probe: OptimizerFacts, graph: Graph, sliced: Mapping[str, str]) -> None:
    """Refuse to offload state that is not stepped bucket by bucket, or of what is updated in full."""
    for chunk, offload in graph.chosen(lambda options: options.offload_state).items():
        if chunk not in sliced and probe.ours:
            continue
        why = "it would be stepped once for each bucket, and it may count its steps"
        if chunk in sliced:
            why = f"one device updates {sliced[chunk]} in full, and gives the others their slices"
        raise ScheduleError(
            f"the state of {probe.name} cannot be offloaded",
            by=graph.directives[offload.by].title,
            facts={"why": why},
            hint="use an elementwise optimizer of torch.optim, such as AdamW, or leave this directive out",
        )
