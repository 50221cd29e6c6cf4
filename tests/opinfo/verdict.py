"""Compares operations under Piper's capture with eager PyTorch, in fp64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from piper.capture.autodiff.differentiate import Captured, differentiate
from piper.capture.trace.trace import trace
from piper.errors import PiperError
from piper.ir.chunk_options import CodeOptions
from tests.capture.machine import Backward, Machine
from tests.opinfo.sample import BATCH, Called, Calls, Sample, loss, operands

RTOL, ATOL = 1e-9, 1e-10
Kind = Literal["equal", "refused", "wrong", "raw", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one sample fared. skipped: eager PyTorch cannot run it; raw: an error that is not one of Piper's."""

    kind: Kind
    why: str = ""
    eager: bool = False  # it ran under eager autograd, because it cannot be traced backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """A sample, as differentiable as eager PyTorch finds it, and the shapes of its results."""

    sample: Sample
    shapes: list[list[int]]

    def filled(self) -> Called:
        """Return its model with values."""
        torch.manual_seed(0)  # a module draws its parameters
        model = Called(self.sample, self.shapes)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for number, tensor in enumerate(map(Tensor.detach, operands(self.sample))):
                state[f"operand{number}"].copy_(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
            for number in range(len(self.shapes)):
                probe = state[f"result{number}"]
                angles = torch.arange(probe.numel(), dtype=torch.float64) + number + 1
                probe.copy_(angles.cos().view(probe.shape))
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a model computes: the loss of every call, and gradients, among which the results are."""

    losses: Sequence[Tensor]
    gradients: Mapping[str, Tensor]


def verdicts(samples: Sequence[Sample], *, evaluated: bool = True) -> list[Verdict]:
    """Say how samples fare in every form of differentiation, and in evaluation.

    All are captured together, which is quick. Where that fails, each half is captured by itself.
    """
    found = [runnable(sample) for sample in samples]
    said = iter(_halved([each for each in found if isinstance(each, Runnable)], evaluated))
    return [next(said) if isinstance(each, Runnable) else each for each in found]


def runnable(sample: Sample) -> Runnable | Verdict:
    """Return a sample with what eager PyTorch says of it, or that it cannot run it."""
    try:
        results = Runnable(sample=sample, shapes=[]).filled().results(BATCH["x"])
        found = Runnable(sample=sample, shapes=[list(result.shape) for result in results])
    except Exception as error:  # noqa: BLE001  whatever eager PyTorch says of a sample that it cannot run
        return Verdict(kind="skipped", why=_line(error))
    try:
        found.filled()(BATCH["x"]).backward()
    except (RuntimeError, NotImplementedError):
        return replace(found, sample=replace(sample, differentiable=False))
    return found


def _halved(group: Sequence[Runnable], evaluated: bool) -> list[Verdict]:
    if not group:
        return []
    try:
        return _compared(group, evaluated)
    except Exception as error:  # noqa: BLE001  the very thing that is counted
        if len(group) == 1:
            return [Verdict(kind="refused" if isinstance(error, PiperError) else "raw", why=_line(error))]
    middle = len(group) // 2
    return _halved(group[:middle], evaluated) + _halved(group[middle:], evaluated)


def _line(error: Exception) -> str:
    """Return an error in one line: of one of Piper's, the reason if it has one, else what it says."""
    if isinstance(error, PiperError):
        return " ".join((error.facts.get("why") or error.what).split())[:150]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _compared(group: Sequence[Runnable], evaluated: bool) -> list[Verdict]:
    def model() -> Calls:
        return Calls([Called(each.sample, each.shapes) for each in group])

    def filled() -> Calls:
        return Calls([each.filled() for each in group])

    traced = trace(model, loss, BATCH, 2, "fp64")
    code = differentiate(traced)
    small = differentiate(traced, {chunk.name: CodeOptions(budget=0.0) for chunk in traced.outline.chunks})
    wanted = _trained(filled())
    runs = {
        "whole": (_ran(code, filled(), "whole"), wanted),
        "split": (_ran(code, filled(), "split"), wanted),
        "remat": (_ran(small, filled(), "whole"), wanted),
    }
    if evaluated:
        test = differentiate(trace(model, loss, BATCH, 2, "fp64", forward_only=True))
        runs["evaluation"] = (_ran(test, filled(), "whole"), _tested(filled()))
    return [
        replace(_verdict(number, runs), eager=f"OP={number}" in code.fallbacks)
        for number in range(len(group))
    ]


def _trained(model: Calls) -> Numbers:
    torch.manual_seed(7)
    total, metrics = loss(model, BATCH)
    total.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return Numbers(losses=[part.detach() for part, _ in metrics.values()], gradients=grads)


def _tested(model: Calls) -> Numbers:
    torch.manual_seed(7)
    with torch.no_grad():
        _, metrics = loss(model.eval(), BATCH)
    return Numbers(losses=[part for part, _ in metrics.values()], gradients={})


def _ran(code: Captured, model: Calls, backward: Backward) -> Numbers:
    machine = Machine(
        code, model, [BATCH], exact_memory=False
    )  # of some kernels it is larger than their results
    torch.manual_seed(7)
    machine.step(backward)
    metrics = code.outline.metrics
    assert metrics is not None
    return Numbers(losses=list(machine.value(metrics)[::2]), gradients=machine.gradients())


def _verdict(number: int, runs: Mapping[str, tuple[Numbers, Numbers]]) -> Verdict:
    found = []
    for form, (run, wanted) in runs.items():
        pairs = {"its loss": (run.losses[number], wanted.losses[number])}
        both = {**wanted.gradients, **run.gradients}
        for name in (name for name in both if name.startswith(f"calls.{number}.")):
            zero = torch.zeros_like(both[name])
            pairs[name] = (run.gradients.get(name, zero), wanted.gradients.get(name, zero))
        found += [
            f"{form}: {name} differs by {float((a - b).abs().max()):.3g}"
            for name, (a, b) in pairs.items()
            if not torch.allclose(a, b, rtol=RTOL, atol=ATOL, equal_nan=True)
        ]
    return Verdict(kind="wrong", why="; ".join(found)[:300]) if found else Verdict(kind="equal")
