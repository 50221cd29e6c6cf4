"""Does a strategy give the same numbers as one device? If not, where do they first differ?"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from piper.ids import Pass, Phase, SlotId
from piper.runtime.reference import Reference
from piper.runtime.setup import ProgramLike
from piper.runtime.trail import Mark
from piper.runtime.worker import Options

QUIET = 1e-6  # of the largest gradient: below it a gradient is rounding, and is compared with that

BACKWARD: tuple[Phase, ...] = ("B", "BI")  # either gives the gradients of inputs


class Result(Protocol):
    """What a step gives back."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...


class Checked(Protocol):
    """A running job that can be looked into."""

    def step(self, batch: Mapping[str, Tensor]) -> Result: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def trails(self) -> dict[int, dict[Mark, Tensor]]: ...


Launch = Callable[[ProgramLike, Options], AbstractContextManager[Checked]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far a run is from one device, relative to the size of what is compared."""

    ok: bool
    max_loss_diff: float
    max_grad_diff: float
    max_param_diff: float
    first_bad: str | None = None  # the first node that differs, else the first parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a step leaves, all that is compared."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


def numbers(reference: Reference, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[Numbers]:
    """What each step leaves in plain PyTorch on one device, worked out as it is asked for."""
    for batch in batches:
        loss = reference.step(batch)
        yield Numbers(
            loss=loss,
            grad_norm=reference.grad_norm,
            gradients=reference.gradients,
            state={name: value.clone() for name, value in reference.state_dict().items()},
        )


def check(
    program: ProgramLike,
    launch: Launch,
    batches: Sequence[Mapping[str, Tensor]],
    tol: float = 1e-9,
    options: Options | None = None,
    wanted: Iterable[Numbers] | None = None,
) -> Report:
    """Run a program beside plain PyTorch on one device, step by step, and compare all numbers.

    wanted: what one device gives, if that is known already.
    """
    options = options or Options()
    watched = replace(options, keep_gradients=True)
    steps = numbers(Reference(program), batches) if wanted is None else wanted
    worst = {"loss": 0.0, "grad": 0.0, "param": 0.0}
    bad: str | None = None
    with launch(program, watched) as run:
        for number, (batch, single) in enumerate(zip(batches, steps, strict=True)):
            for kind, name, diff in compared(run, run.step(batch), single):
                worst[kind] = max(worst[kind], diff)
                if bad is None and not diff <= tol:
                    bad = f"step {number}: {name} differs by {diff:.3g}"
            if bad is not None:
                bad = first_difference(program, launch, batches[: number + 1], tol, options) or bad
                break
    return Report(
        ok=bad is None,
        max_loss_diff=worst["loss"],
        max_grad_diff=worst["grad"],
        max_param_diff=worst["param"],
        first_bad=bad,
    )


def compared(run: Checked, result: Result, single: Numbers) -> Iterator[tuple[str, str, float]]:
    """How far each number of a step is from one device: its kind, its name, and the difference."""
    yield "loss", "the loss", relative(result.loss, single.loss)
    yield "loss", "the gradient's norm", relative(result.grad_norm, single.grad_norm)
    for name, diff in differences(run.gradients(), single.gradients):
        yield "grad", name, diff
    for name, diff in differences(run.state_dict(), single.state):
        yield "param", name, diff


def relative(got: float, wanted: float) -> float:
    """How far two numbers are apart, in units of the second."""
    return abs(got - wanted) / max(abs(wanted), 1e-30) if got != wanted else 0.0


def differences(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """How far the tensors of two sets are apart, each in units of its largest element."""
    largest = max((size(value) for value in wanted.values()), default=0.0)
    for name in (*wanted, *(name for name in got if name not in wanted)):
        if name not in got or name not in wanted:
            yield name, float("inf")
            continue
        yield name, distance(got[name], wanted[name], QUIET * largest)


def size(value: Tensor) -> float:
    """The largest element of a tensor."""
    return value.double().abs().max().item() if value.numel() else 0.0


def distance(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """The largest difference of two tensors, in units of the second one's largest element."""
    if got.shape != wanted.shape:
        return float("inf")
    gap = size(got.to(wanted.device).double() - wanted.double())
    return gap / max(size(wanted), floor, 1e-30) if gap else 0.0


def first_difference(
    program: ProgramLike,
    launch: Launch,
    batches: Sequence[Mapping[str, Tensor]],
    tol: float,
    options: Options,
) -> str | None:
    """Repeat the steps, watching every chunk: the first result in the order of the model that differs."""
    reference = Reference(program)
    reference.keep_walks = True
    with launch(program, replace(options, keep_outputs=True)) as run:
        for number, batch in enumerate(batches):
            run.step(batch)
            reference.step(batch)
            trails = run.trails()
            for device, mark, wanted in expected(program, reference):
                got = trails[device].get(mark)
                if got is None or not wanted.numel():
                    continue
                diff = distance(got, wanted)
                if not diff <= tol:
                    return f"step {number}: {mark[0]} on device {device}: {mark[1]} differs by {diff:.3g}"
    return None


def expected(program: ProgramLike, reference: Reference) -> Iterator[tuple[int, Mark, Tensor]]:
    """What each chunk should return on each device: forwards in order, then backwards in reverse.

    Rows between route and unroute are grouped by device in a plan, so only what surrounds them is compared.
    """
    chunks = [chunk for chunk in program.outline.chunks if chunk.kind == "compute"]
    homes = {chunk.name: program.plans.chunks[chunk.name].devices for chunk in chunks}
    for part, walk in reference.walks:
        for chunk in chunks:
            for index in range(len(chunk.outputs)):
                mark = Pass(phase="F", chunk=chunk.name, part=part.part), SlotId("output", chunk.name, index)
                yield homes[chunk.name][part.replica], mark, walk.outputs[chunk.name, index].detach()
    for part, walk in reference.walks:
        for chunk in reversed(chunks):
            for position in range(len(chunk.inputs)):
                given = walk.inputs.get((chunk.name, position))
                if given is None or given.grad is None:
                    continue
                slot = SlotId("input_gradient", chunk.name, position)
                for phase in BACKWARD:
                    run = Pass(phase=phase, chunk=chunk.name, part=part.part)
                    yield homes[chunk.name][part.replica], (run, slot), given.grad
