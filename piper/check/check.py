"""Checks that a strategy gives the same numbers as one device, and finds where they first differ.

The reference is plain PyTorch on the whole, unsliced batch (`reference.py`). Where the run differs
from it, the same slices run in plain PyTorch too. If the run equals these, the slices are not the batch, and
`mixing.py` says why: an operation that mixes samples is a note, a mean of uneven slices an error.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from piper.callbacks import StepNumbers
from piper.check.distance import differences, nan_in, relative
from piper.check.localise import Checked, Launch, first_difference
from piper.check.mixing import Reasons, reasons
from piper.check.reference import Reference
from piper.check.reference_groups import reference_of
from piper.check.replay import ReplayError
from piper.runtime.batch import padded
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

SHOWN = 3  # operations in a note
SAFETY, LARGEST = 10.0, 1e-2  # how much more two roundings may differ than the one that is measured; the most
LOSSES = "return (sum, weight), as piper.losses.cross_entropy and piper.losses.huggingface do"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far a run is from one device, relative to the size of the numbers compared."""

    ok: bool
    max_loss_diff: float
    max_grad_diff: float
    max_param_diff: float
    first_bad: str | None = None  # the first node that differs, else the first parameter, else the reason
    notes: tuple[str, ...] = ()  # what a reader must know to rely on the answer
    sliced: str | None = None  # why it equals the same slices in plain PyTorch, and not the whole batch
    groups: int = 1  # that train apart, each as one device

    @property
    def verdict(self) -> str:
        if not self.ok:
            return f"Not the same numbers: {self.first_bad}"
        if self.sliced is not None:
            return (
                f"The same numbers as one device on the same slices, not on the whole batch: {self.sliced}."
            )
        if self.groups > 1:
            return f"The same numbers as {self.groups} groups that train apart in plain PyTorch."
        return "The same numbers as one device."


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedNumbers:
    """The numbers that a step leaves, all of which are compared."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


@dataclass(slots=True)
class Worst:
    """The largest differences so far, and the first that is too large."""

    tol: float
    largest: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "grad": 0.0, "param": 0.0})
    bad: str | None = None
    buffers: dict[str, str] = field(default_factory=dict)  # those that differ, and how

    def take(self, number: int, diffs: Iterable[tuple[str, str, float, str]], buffers: set[str]) -> None:
        """Record the differences of a step; those of buffers apart."""
        for kind, name, diff, words in diffs:
            self.largest[kind] = max(self.largest[kind], diff)
            if words or not diff <= self.tol:
                text = f"step {number}: {name} {words or f'differs by {diff:.3g}'}"
                if kind == "param" and name in buffers and not words:
                    self.buffers.setdefault(name, text)
                elif self.bad is None:
                    self.bad = text

    @property
    def first(self) -> str | None:
        """Return what differs first, buffers last. None: nothing differs."""
        return self.bad or next(iter(self.buffers.values()), None)


def numbers(reference: Reference, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[ComparedNumbers]:
    """Yield the numbers that each step leaves in plain PyTorch on one device, when they are asked for."""
    for batch in batches:
        loss = reference.step(batch)
        yield ComparedNumbers(
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
    wanted: Iterable[ComparedNumbers] | None = None,  # of one device on the whole batch, if they are known
) -> Report:
    """Run a program and plain PyTorch on one device, step by step, and compare all numbers."""
    buffers = {buffer.name for buffer in program.outline.buffers}
    asked = replace(options or Options(), keep_gradients=True)
    comparison = _Check(program, launch, batches, asked, buffers, whole=Worst(tol))
    return comparison.report(wanted)


@dataclass(slots=True)
class _Check:
    """One comparison."""

    program: ProgramLike
    launch: Launch
    batches: Sequence[Mapping[str, Tensor]]
    options: Options
    buffers: set[str]
    whole: Worst
    sliced: Worst | None = None  # since a step differed from the whole batch
    reasons: Reasons = field(default_factory=Reasons)
    padded: bool = False  # the batch of the first step that differed
    rounding: float = 0.0  # how far rounding in a narrower type may carry
    only_sliced: str | None = None  # why it equals the slices, and not the whole batch
    notes: list[str] = field(default_factory=list)
    replays: list[Reference] = field(default_factory=list)  # whose random numbers are looked at

    def report(self, wanted: Iterable[ComparedNumbers] | None) -> Report:
        """Run the steps and judge them."""
        try:
            plain = reference_of(self.program)
            if wanted is None:
                self.replays.append(plain)
                wanted = numbers(plain, self.batches)
            with self.launch(self.program, self.options) as run:
                bad = self._steps(run, iter(wanted))
        except ReplayError as error:
            return self._answer(self.whole, f"the random numbers cannot be drawn in plain PyTorch: {error}")
        judge = self.sliced or self.whole
        replays = [replay for reference in self.replays for replay in reference.replays.values()]
        if bad is None:
            problems = (problem for replay in replays for problem in replay.problems())
            return self._answer(judge, next(problems, None) or self._judged())
        unmatched = [text for replay in replays for text in replay.unmatched]
        number, text = bad
        named, batches, tol = None, self.batches[: number + 1], self.whole.tol
        if self.program.plans.averaging is None:  # else each group has values of its own
            named = first_difference(self.program, self.launch, batches, tol, self.options)
        compiled = compiled_otherwise(reference_of(self.program), self.batches[number], tol)
        return self._answer(judge, "; ".join([named or text, *unmatched[:1], *compiled]))

    def _steps(self, run: Checked, wanted: Iterator[ComparedNumbers]) -> tuple[int, str] | None:
        """Run every step; return the number of the first that is wrong, with what is wrong with it."""
        slices: Reference | None = None
        whole = True  # the steps so far equal those of the whole batch, but for buffers
        for number, batch in enumerate(self.batches):
            asked = whole
            single = self._next(wanted) if whole else None  # first: what fails here fails there less clearly
            got = numbers_of(run, run.step(batch))
            if whole:
                if single is not None:
                    self.whole.take(number, compared(got, single), self.buffers)
                whole = single is not None and self.whole.bad is None
                if whole and not self.whole.buffers:
                    continue
            if slices is None or self.sliced is None:
                slices, self.sliced = reference_of(self.program, sliced=True), Worst(self.whole.tol)
                self.replays.append(slices)
                for before in self.batches[:number]:
                    slices.step(before)
            if asked and not whole:
                self.padded = padded(batch, self.program.job.buckets) is not batch
                self.reasons = reasons(slices, slices.own_part(batch))
                own = self._own_rounding(number)
                limit = min(SAFETY * max(own["loss"], own["grad"]), LARGEST)
                self.rounding = max(self.reasons.rounding, limit)
            self.sliced.take(number, compared(got, next(numbers(slices, [batch]))), self.buffers)
            if self.sliced.first is not None and not self._only_rounds(number):
                return number, self.whole.first or self.sliced.first
        return None

    def _next(self, wanted: Iterator[ComparedNumbers]) -> ComparedNumbers | None:
        """Return the next numbers of the whole batch; None: it cannot be put together from its slices."""
        try:
            return next(wanted)
        except ReplayError as error:
            self.only_sliced = f"{error.what} for it"
            self.notes.append(
                f"{error.what} for the whole batch ({error}); compared with the same slices in plain PyTorch"
            )
            return None

    def _own_rounding(self, number: int) -> dict[str, float]:
        """Return how far plain PyTorch is, up to a step, from itself with nothing cast to a narrower type."""
        own = Worst(math.inf)
        if self.reasons.narrow and self.program.job.precision == "fp64":
            batches = self.batches[: number + 1]
            rounded, exact = (
                numbers(reference_of(self.program, exact=exact), batches) for exact in (False, True)
            )
            try:
                for one, other in zip(rounded, exact, strict=True):
                    own.take(number, compared(one, other), self.buffers)
            except ReplayError:  # it draws other numbers for the whole batch
                return Worst(math.inf).largest
        return own.largest

    def _only_rounds(self, number: int) -> bool:
        """Return whether a run is no farther from plain PyTorch than plain PyTorch is from exact numbers."""
        assert self.sliced is not None
        own = self._own_rounding(number)
        return any(own.values()) and all(self.sliced.largest[kind] <= own[kind] for kind in own)

    def _judged(self) -> str | None:
        """Return what is wrong with a run that equals plain PyTorch on the same slices. None: nothing is."""
        if self.sliced is None:
            return None
        reasons = self.reasons
        if reasons.uneven:
            return f"the loss is a mean of uneven slices: {'; '.join(reasons.uneven)} on the slices; {LOSSES}"
        if self.padded and self.whole.bad is not None and not reasons.mixing:
            return (
                f"{self.whole.bad}: the padded batch gives other numbers than the batch as it is. Let the "
                "values of Buckets(pad=...) count neither in the loss nor in attention"
            )
        if self.whole.bad is None:  # random numbers of slices are noted already
            if self.whole.buffers:
                self.only_sliced = f"the first replica's slices write {', '.join(self.whole.buffers)}"
                self.notes.append(
                    "these buffers hold what the first replica's slices wrote, as under DDP: "
                    f"{', '.join(self.whole.buffers)}. The same slices in plain PyTorch agree"
                )
            return None
        apart = max(self.whole.largest["loss"], self.whole.largest["grad"])
        if not reasons.mixing and reasons.narrow and apart <= self.rounding:
            listed = "; ".join(reasons.narrow[:SHOWN]) + ("; ..." if len(reasons.narrow) > SHOWN else "")
            self.notes.append(
                f"these operations compute in {reasons.type}: {listed}. Their rounding "
                f"depends on the size of a slice. The whole batch agrees to "
                f"{apart:.2g}, the same slices to {max(self.whole.tol, *self.sliced.largest.values()):.2g}"
            )
            return None
        products = [replay.products for plain in self.replays for replay in plain.replays.values()]
        same_loss = ": the loss " not in self.whole.bad  # rounded gradients do not change it
        if not reasons.mixing and same_loss and any(each is not None and each.unsure for each in products):
            self.only_sliced = "gradients are rounded to fp8"
            self.notes.append(
                "rows of a product in fp8 have two axes as long as the batch, and the first is taken for the "
                "samples, which decides how gradients are rounded. The same slices in plain PyTorch agree"
            )
            return None
        if not reasons.mixing:
            return (
                f"{self.whole.bad}, because the loss of the batch is not the mean of the losses of its "
                f"slices: it is a sum, or a mean of uneven slices, or it mixes samples; {LOSSES}"
            )
        more = f" and {len(reasons.mixing) - 1} more" if len(reasons.mixing) > 1 else ""
        self.only_sliced = f"{reasons.mixing[0]}{more} mix{'' if more else 'es'} samples"
        self.notes.append(
            "these operations mix samples, and see one slice of the batch at a time, as under DDP and "
            f"gradient accumulation: {'; '.join(reasons.mixing)}. The same slices in plain PyTorch agree"
        )
        return None

    def _answer(self, judge: Worst, bad: str | None) -> Report:
        if bad is not None and self.whole.bad is not None:
            judge = self.whole
        largest = judge.largest
        return Report(
            ok=bad is None,
            max_loss_diff=largest["loss"],
            max_grad_diff=largest["grad"],
            max_param_diff=largest["param"],
            first_bad=bad,
            notes=tuple(self.notes),
            groups=len(self.program.plans.groups_apart),
            sliced=None if bad is not None else self.only_sliced,
        )


def numbers_of(run: Checked, result: StepNumbers) -> ComparedNumbers:
    """Return the numbers that a step of a run leaves."""
    return ComparedNumbers(
        loss=result.loss, grad_norm=result.grad_norm, gradients=run.gradients(), state=run.state_dict()
    )


def compared(got: ComparedNumbers, single: ComparedNumbers) -> Iterator[tuple[str, str, float, str]]:
    """Yield how far each number of a step is from one device: its kind, name, difference, and words."""
    yield "loss", "the loss", relative(got.loss, single.loss), nan_in(got.loss, single.loss)
    norms = got.grad_norm, single.grad_norm
    yield "loss", "the gradient's norm", relative(*norms), nan_in(*norms)
    for name, diff, words in differences(got.gradients, single.gradients):
        yield "grad", f"the gradient of {name}", diff, words
    for name, diff, words in differences(got.state, single.state):
        yield "param", name, diff, words


def compiled_otherwise(reference: Reference, batch: Mapping[str, Tensor], tol: float) -> list[str]:
    """Return a sentence if `torch.compile`, which Piper captures, gives another loss. Else nothing."""
    given = reference.on_device(reference.own_part(batch))
    plain = _loss_of(reference, given, compiled=False)
    try:
        compiled = _loss_of(reference, given, compiled=True)
    except RuntimeError:  # of Dynamo: it says nothing of a difference, which is reported in any case
        return []
    if relative(compiled, plain) <= tol:
        return []
    return [
        f"the model itself has the loss {plain:.6g} in plain PyTorch and {compiled:.6g} under torch.compile, "
        "which is what Piper captures: look for what it does only where torch.compiler.is_compiling()"
    ]


def _loss_of(reference: Reference, batch: Mapping[str, Tensor], *, compiled: bool) -> float:
    """Return the loss of a batch, with the same random numbers in every call."""
    torch.compiler.reset()  # so that no limit of recompilations makes a compiled call a plain one
    run = torch.compile(reference.job.loss, backend="eager") if compiled else reference.job.loss
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(reference.job.seed)
        result = run(reference.model, batch)
    if isinstance(result, tuple) and isinstance(result[1], Mapping):  # metrics
        result = result[0]
    return (result[0] / result[1] if isinstance(result, tuple) else result).item()
