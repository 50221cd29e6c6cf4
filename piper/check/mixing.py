"""Finds why the loss of a whole batch is not the mean of the losses of its slices, in plain PyTorch.

The model runs on the whole batch and on every slice, and the result of each operation on the batch is
compared with its results on the slices. It is one row for each sample, the same everywhere, or the mean or
the sum of the slices. An operation whose arguments are of these kinds and whose result is not mixes samples:
BatchNorm, a load-balancing loss. A mean that divides by a number of the data is listed apart: its slices
count unevenly.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper.check.distance import distance
from piper.check.reference import Reference, samples_in
from piper.check.replay import ReplayError, model_line
from piper.check.slicing import Slice, take

aten = torch.ops.aten
CLOSE = 1e-9
NARROW = {
    name: torch.finfo(dtype).eps
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16))
}
MANY, LARGEST = 100.0, 1e-2  # how far the rounding of one operation may grow on its way to a gradient
SHOWN = 4  # divisors in a message
NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
DIVISIONS = (aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor)
MEANS = (aten.mean.default, aten.mean.dim)
Kind = Literal["same", "rows", "ragged", "mean", "sum", "other"]
MEAN_REDUCTION = 1  # torch's number for reduction="mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Why a whole batch differs from its slices."""

    uneven: Sequence[str] = ()  # means whose slices count unevenly
    mixing: Sequence[str] = ()  # operations that mix samples
    narrow: Sequence[str] = ()  # operations that compute in a narrower type than the job
    type: str = ""  # the narrowest of these types
    rounding: float = 0.0  # how far rounding in that type may carry


@dataclass(slots=True, kw_only=True)
class Call:
    """One operation that ran."""

    op: Any
    where: str  # the module and the source line
    sources: list["Value | None"]  # of each tensor argument; None: nothing that ran made it
    scalars: list[float]  # arguments that are numbers
    reduction: int  # of a loss: torch's number
    results: list["Value"] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Value:
    """A result: on the whole batch, and its kind once it is compared with those on the slices."""

    tensor: Tensor
    kind: Kind = "other"


Key = tuple[str, str, int]  # the operation, its module, and how often that module ran it before


class _Record(TorchDispatchMode):
    """Records every operation with its results and its source line."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.stack = names, list[str]()
        self.calls: dict[Key, Call] = {}
        # By identity, with the tensor so that it is unique:
        self.made: dict[int, tuple[Tensor, Value | None]] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        module = self.stack[-1] if self.stack else ""
        place, name = (str(op), module), op._schema.name.removeprefix("aten::")
        self.counts[place] += 1
        call = Call(
            op=op,
            where=f"{name} of {module or 'the loss'} ({model_line()})",
            sources=[self.made.get(id(leaf), (leaf, None))[1] for leaf in leaves if isinstance(leaf, Tensor)],
            scalars=[float(leaf) for leaf in leaves if isinstance(leaf, int | float)],
            reduction=args[3] if op in NLL else 0,
        )
        out = op(*args, **kwargs)
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                value = Value(tensor=result.clone())  # nothing records gradients here
                self.made[id(result)] = result, value
                call.results.append(value)
        self.calls[*place, self.counts[place]] = call
        return out

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Track which module runs, inside the block."""

        def enter(module: nn.Module, _: object) -> None:
            self.stack.append(self.names.get(id(module), ""))

        def leave(module: nn.Module, _: object, __: object) -> None:
            self.stack.pop()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def reasons(reference: Reference, batch: Mapping[str, Tensor]) -> Reasons:
    """Compare the whole batch with its slices, operation by operation; the reference stays as it is."""
    given = reference.as_run(batch)
    chunk = reference.replay.program.outline.loss.chunk
    slices = [*reference.replay.slicing.slices(chunk, samples_in(given))]
    try:
        whole = _record(reference, given, None)
    except ReplayError:  # the draws differ, so only what does not depend on them is compared
        whole = _record(reference, given, None, replay=False)
    parts = [_record(reference, take(given, part.samples), part) for part in slices]
    narrow = {call.where: eps for call in whole.values() if (eps := rounds(call, reference.dtype))}
    rounding = min(MANY * max(narrow.values(), default=0.0), LARGEST)
    near = max(CLOSE, rounding)
    uneven, mixing = dict[str, None](), dict[str, None]()
    for key, call in whole.items():
        known = [calls[key] for calls in parts if key in calls]
        if [len(other.results) for other in known] != [len(call.results)] * len(parts):
            continue  # control flow that depends on the data: not comparable
        for index, value in enumerate(call.results):
            each = [other.results[index].tensor for other in known]
            value.kind = kind_of(value.tensor, each, slices, near)
        if (divisors := uneven_divisors(call, known)) is not None:
            listed = ", ".join(f"{number:g}" for number in divisors[:SHOWN])
            uneven[f"{call.where} divides by {listed}{', ...' if len(divisors) > SHOWN else ''}"] = None
        elif mixes(call):
            mixing[call.where] = None
    return Reasons(
        uneven=[*uneven],
        mixing=[*mixing],
        narrow=[*narrow],
        type=next((name for name, eps in NARROW.items() if eps == max(narrow.values(), default=0.0)), ""),
        rounding=rounding,
    )


def rounds(call: Call, dtype: torch.dtype) -> float:
    """Return the rounding of an operation that computes in a narrower type than the job; else 0."""
    dtypes = (v.tensor.dtype for v in call.results if v.tensor.is_floating_point())
    eps = max((torch.finfo(found_type).eps for found_type in dtypes), default=0.0)
    moves = call.op in REORDERS or call.op.is_view
    return eps if eps > torch.finfo(dtype).eps and not moves else 0.0


def _record(
    reference: Reference, batch: Mapping[str, Tensor], part: Slice | None, *, replay: bool = True
) -> dict[Key, Call]:
    """Run the job's loss, and return every operation that ran."""
    names = {id(module): name for name, module in reference.model.named_modules()}
    record, drawing = _Record(names), reference.replay.drawing(reference.steps, samples_in(batch), part)
    drawn = drawing if replay else nullcontext()
    with reference.unchanged(), torch.no_grad(), drawn, record, record.modules():
        reference.loss(batch)
    return record.calls


def kind_of(whole: Tensor, parts: Sequence[Tensor], slices: Sequence[Slice], near: float = CLOSE) -> Kind:
    """Return how the result on a whole batch comes from those on its slices."""
    if any(part.dim() != whole.dim() for part in parts):
        return "other"
    if all(part.shape == whole.shape for part in parts):
        if all(close(part, whole, near) for part in parts):
            return "same"
        if whole.is_complex() or whole.dtype is torch.bool:
            return "other"
        total = torch.stack([part.double() for part in parts]).sum(0)
        if close(total / len(parts), whole, near):
            return "mean"
        return "sum" if close(total, whole, near) else "other"
    samples = sum(len(part.samples) for part in slices)
    for axis in range(whole.dim()):
        if all(part.shape[axis] == whole.shape[axis] for part in parts):
            continue
        if whole.shape[axis] % samples == 0 and all(
            part.shape[axis] * samples == whole.shape[axis] * len(slice_.samples)
            and close(part, rows_of(whole, slice_, axis, samples), near)
            for part, slice_ in zip(parts, slices, strict=True)
        ):
            return "rows"
        if sum(part.shape[axis] for part in parts) == whole.shape[axis]:
            return "ragged" if close(torch.cat([*parts], axis), whole, near) else "other"
    return "other"


def rows_of(whole: Tensor, part: Slice, axis: int, samples: int) -> Tensor:
    """Return the rows of a slice's samples, where every one of all samples has as many along an axis."""
    rows = part.rows(whole.shape[axis] // samples)
    return whole.index_select(axis, torch.tensor(rows, device=whole.device))


def close(got: Tensor, wanted: Tensor, near: float) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if got.shape != wanted.shape:
        return False
    if not (got.is_floating_point() or wanted.is_floating_point()):
        return torch.equal(got, wanted)
    got, wanted = got.double(), wanted.double()  # torch compares no fp8
    both = got.isinf() & (got == wanted)  # as in the masks of attention
    return distance(got.masked_fill(both, 0.0), wanted.masked_fill(both, 0.0)) <= near


def mixes(call: Call) -> bool:
    """Return whether an operation of known arguments makes a result that the slices do not make up."""
    if torch.Tag.view_copy in call.op.tags or call.op in REORDERS or call.op.is_view:
        return False
    clean = all(source is None or source.kind != "other" for source in call.sources)
    return clean and any(v.kind == "other" and v.tensor.is_floating_point() for v in call.results)


REORDERS = (  # results hold elements of the arguments, in another order
    *(aten.clone.default, aten._unsafe_view.default, aten.copy_.default, aten.index.Tensor, aten.cat.default),
    *(aten._reshape_copy.default, aten.index_select.default, aten.gather.default, aten.sort.default),
    *(aten.stack.default, aten.masked_select.default, aten.empty_like.default, aten.empty.memory_format),
    *(aten.new_empty.default, aten._to_copy.default, aten.topk.default, aten.flip.default, aten.roll.default),
    aten.repeat.default,
)


def uneven_divisors(call: Call, parts: Sequence[Call]) -> list[float] | None:
    """Return by what a mean divides on each slice, if these differ; None: it is no such mean."""
    divisors: list[float] = []
    if call.op in NLL and call.reduction == MEAN_REDUCTION:
        divisors = [part.results[1].tensor.item() for part in parts]
    elif call.op in DIVISIONS and call.results[0].kind not in ("rows", "ragged"):
        if len(call.sources) == 2 and (below := call.sources[1]) is not None and below.kind == "sum":
            values = [part.sources[1] for part in parts]
            divisors = [v.tensor.item() for v in values if v is not None and v.tensor.numel() == 1]
        elif len(call.sources) == 1 and call.scalars:
            scalars = [part.scalars[0] for part in parts if part.scalars]
            divisors = scalars if sum(scalars) == call.scalars[0] else []
    elif call.op in MEANS and (above := call.sources[0]) is not None and above.kind == "ragged":
        counts = [part.sources[0] for part in parts]
        divisors = [float(v.tensor.numel()) for v in counts if v is not None]
    return divisors if len(set(divisors)) > 1 else None
