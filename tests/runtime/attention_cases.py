"""Attention of every shape under every mask, divided in every way, against plain PyTorch in fp64."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.shard.axis_sharding import Request
from piper.capture.shard.request import shard_model
from piper.capture.trace.recording import Recording
from piper.compiler import Program, compile
from piper.compiler.slices import requests_of
from piper.directives import Directive, apply, shard
from piper.errors import CaptureError, ScheduleError
from piper.ir.chunk import Parameter
from piper.ir.graph import start
from piper.ir.select import at
from piper.ir.sharding import AxisPlacement, Shard
from piper.job import Job
from piper.run.launch import launch_inline
from tests.capture.shard import lockstep
from tests.plain import Trained, largest_difference, sgd, train
from tests.runtime.sharing import one_core

SAMPLES, LENGTH, HEADS, SIZE, MEMORY = 2, 16, 4, 2, 24
WIDTH = HEADS * SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The shapes of queries, keys and values. flat: samples and heads are one dimension."""

    rank: int = 4
    heads: int = HEADS
    kv_heads: int = HEADS
    gqa: bool = False  # the operator repeats heads of keys, else it broadcasts one
    memory: int = 0  # keys of another sequence: how many
    by_hand: str = ""  # the operation that multiplies, where attention is written out


OPERANDS: Mapping[str, Operands] = {
    "4": Operands(),
    "3": Operands(rank=3),
    "one head": Operands(rank=3, heads=1, kv_heads=1),
    "4 one head": Operands(heads=1, kv_heads=1),
    "2": Operands(rank=2, heads=1, kv_heads=1),
    "5": Operands(rank=5),
    "grouped": Operands(kv_heads=2, gqa=True),
    "3 grouped": Operands(rank=3, kv_heads=2, gqa=True),
    "one key head": Operands(kv_heads=1, gqa=True),
    "broadcast": Operands(kv_heads=1),
    "cross": Operands(memory=MEMORY),
    "3 cross": Operands(rank=3, memory=MEMORY),
    "matmul": Operands(by_hand="matmul"),
    "einsum": Operands(by_hand="einsum"),
    "bmm": Operands(rank=3, by_hand="bmm"),
    "matmul of one head": Operands(rank=3, heads=1, kv_heads=1, by_hand="matmul"),
    "matmul cross": Operands(memory=MEMORY, by_hand="matmul"),
}


def distances(length: int, keys: int) -> Tensor:
    """Return how far each key lies before each query."""
    return torch.arange(length).unsqueeze(1) - torch.arange(keys)


def window(length: int, keys: int) -> Tensor:
    """Let a query see its last five keys, itself among them."""
    apart = distances(length, keys)
    return (apart >= 0) & (apart < 5)


def alibi(length: int, keys: int) -> Tensor:
    """Return [heads, queries, keys]: a slope of each head times the distance, over a causal mask."""
    apart = distances(length, keys)
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS)], dtype=torch.float64)
    return torch.where(apart >= 0, -slopes.view(-1, 1, 1) * apart, -math.inf)


def by_hand(how: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attend by two products and a softmax between them."""
    if how == "einsum":
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
    else:
        scores = (torch.bmm if how == "bmm" else torch.matmul)(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    if causal:
        mask = distances(query.shape[-2], key.shape[-2]) >= 0
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1)
    if how == "einsum":
        return torch.einsum("bhqk,bhkd->bhqd", weights, value)
    return (torch.bmm if how == "bmm" else torch.matmul)(weights, value)


class Attends(nn.Module):
    """One attention between linear layers, behind a layer of two."""

    def __init__(self, operands: Operands, mask: str, scale: float | None, dropout: float) -> None:
        super().__init__()
        self.operands, self.mask, self.scale, self.dropout = operands, mask, scale, dropout
        self.size = WIDTH // operands.heads
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, operands.kv_heads * self.size)
        self.v = nn.Linear(WIDTH, operands.kv_heads * self.size)
        self.o = nn.Linear(WIDTH, WIDTH)
        bias = torch.randn(HEADS, LENGTH, max(LENGTH, operands.memory))
        self.bias: nn.Parameter | None = nn.Parameter(bias) if mask == "learned" else None

    def biases(self) -> Tensor:
        """Return the mask that is trained."""
        assert self.bias is not None
        return self.bias

    def apart(self, x: Tensor, heads: int) -> Tensor:
        """Return [samples, sequence, width] in the shape that attention is given."""
        match self.operands.rank:
            case 2:
                return x.flatten(0, 1)
            case 3 if heads == 1:
                return x
        x = torch.unflatten(x, -1, (heads, self.size)).transpose(1, 2)
        match self.operands.rank:
            case 3:
                return x.flatten(0, 1)
            case 5:
                return torch.unflatten(x, 1, (2, heads // 2))
        return x

    def together(self, x: Tensor, samples: int) -> Tensor:
        """Return what attention gave as [samples, sequence, width]."""
        match self.operands.rank:
            case 2:
                return torch.unflatten(x, 0, (samples, -1))
            case 3 if self.operands.heads == 1:
                return x
            case 3:
                x = torch.unflatten(x, 0, (samples, self.operands.heads))
            case 5:
                x = x.flatten(1, 2)
        return x.transpose(1, 2).flatten(2)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"] + self.down(torch.tanh(self.up(batch["x"])))
        memory = batch["memory"] if self.operands.memory else x
        query = self.apart(self.q(x), self.operands.heads)
        key, value = (self.apart(layer(memory), self.operands.kv_heads) for layer in (self.k, self.v))
        masker = MASKS[self.mask]
        mask = None if masker is None else masker(self, batch, query.shape[-2], key.shape[-2])
        if self.operands.by_hand:
            made = by_hand(self.operands.by_hand, query, key, value, mask, self.mask == "causal")
        else:
            made = F.scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                self.dropout if self.training else 0.0,
                self.mask == "causal",
                scale=self.scale,
                enable_gqa=self.operands.gqa,
            )
        made = self.o(self.together(made, len(x)))
        assert isinstance(made, Tensor)
        return made


Masker = Callable[[Attends, Mapping[str, Tensor], int, int], Tensor]


def whole(mask: Callable[[int, int], Tensor], *shape: int | None) -> Masker:
    """Make a mask that is the same for all samples; shape: leading dimensions of one that it is given."""

    def made(_: Attends, __: Mapping[str, Tensor], length: int, keys: int) -> Tensor:
        found = mask(length, keys)
        return found.view(*(1 for _ in shape), *found.shape)

    return made


MASKS: Mapping[str, Masker | None] = {
    "none": None,
    "causal": None,  # by the operator's flag
    "causal 2": whole(lambda n, m: distances(n, m) >= 0),
    "causal 4": whole(lambda n, m: distances(n, m) >= 0, 1, 1),
    "window 2": whole(window),
    "window 3": whole(window, 1),
    "window 4": whole(window, 1, 1),
    "float 2": whole(lambda n, m: distances(n, m).double() / 8),
    "alibi 3": whole(alibi),
    "alibi 4": whole(alibi, 1),
    "per key": whole(lambda n, m: (torch.arange(m) % 3 > 0).view(1, -1)),
    "per query": whole(lambda n, m: (torch.arange(n).double() / 4).view(-1, 1)),
    "unseen": whole(lambda n, m: distances(n, m) > 3),  # the first queries see no key
    "per head": whole(lambda n, m: (torch.arange(m) % (2 + torch.arange(HEADS).view(-1, 1, 1))) < 2),
    "padding": lambda net, batch, n, m: batch["keep"][:, None, None, :m],
    "per sample": lambda net, batch, n, m: window(n, m) | batch["keep"][:, None, None, :m],
    "learned": lambda net, batch, n, m: net.biases(),
}


def fits(operands: str, mask: str) -> bool:
    """Return whether PyTorch takes such a mask for such operands, each with the meaning of its name."""
    made = OPERANDS[operands]
    heads, samples = mask in ("alibi 3", "alibi 4", "per head", "learned"), mask in ("padding", "per sample")
    if made.by_hand and mask == "unseen":
        return False  # a softmax over nothing is no number
    if made.rank == 2:
        return not samples and not heads and mask[-1] not in "34"
    if made.rank == 3:
        return not samples and not heads and mask[-1] != "4"
    return not (heads or samples) if made.rank == 5 else not heads or made.heads == HEADS


def cases() -> list["Case"]:
    """Return every case: of each that can be divided along keys too, both."""
    return [
        Case(operands=operands, mask=mask, layout=layout, apart=apart)
        for operands, made in OPERANDS.items()
        for mask in MASKS
        if fits(operands, mask)
        for layout in LAYOUTS
        for apart in (False, True)
        if not apart or ("cp" in layout and (made.memory or mask in ("padding", "per sample")))
    ]


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    made = model(batch)
    assert isinstance(made, Tensor)
    return (made - batch["y"]).square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Over how many devices weights and the sequence are divided, and how."""

    tensor: int = 1
    between: bool = False
    before: bool = False  # only the weights before attention are divided
    context: int = 1
    attention: str = "gather"
    zigzag: bool = False
    outer: str = "CP"  # of two axes, the one whose groups stride over the other's

    def __str__(self) -> str:
        found = [f"{'sp' if self.between else 'tp'}{self.tensor}"] if self.tensor > 1 else []
        found += ["before"] if self.before else []
        balance = " zigzag" if self.zigzag else ""
        found += [f"cp{self.context} {self.attention}{balance}"] if self.context > 1 else []
        return " ".join(found if self.outer == "CP" else reversed(found))

    def strategy(self, fields: Mapping[str, int]) -> list[Directive]:
        """Return the directives. fields: of the batch, those that lie along the sequence."""
        devices = list(range(self.tensor * self.context))
        weights = {"up": 0, "down": 1} | ({} if self.before else {"q|k|v": 0, "o": 1})
        between = 1 if self.between else None
        balance = "zigzag" if self.zigzag else None
        tensor = shard(at(), devices, self.tensor, axis="TP", weights=weights, between=between)
        context = shard(
            at(), devices, self.context, axis="CP", batch=fields, attention=self.attention, balance=balance
        )
        found = [tensor] if self.tensor > 1 else []
        found += [context] if self.context > 1 else []
        return found if self.outer == "CP" else found[::-1]


FORMS = [(attention, zigzag) for attention in ("gather", "heads", "ring") for zigzag in (False, True)]
LAYOUTS: Mapping[str, Layout] = {
    str(layout): layout
    for layout in (
        Layout(tensor=2),
        Layout(tensor=4),
        Layout(tensor=2, between=True),
        Layout(tensor=4, between=True),
        *(Layout(context=n, attention=a, zigzag=z) for n in (2, 4) for a, z in FORMS),
        *(
            Layout(tensor=2, context=2, attention=a, zigzag=z, outer=outer)
            for outer in ("CP", "TP")
            for a, z in FORMS
        ),
        Layout(tensor=2, between=True, context=2, attention="ring"),
        Layout(tensor=2, between=True, before=True),
        *(Layout(tensor=2, between=True, before=True, context=2, attention=a, zigzag=z) for a, z in FORMS),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention under one mask, divided in one way."""

    operands: str
    mask: str
    layout: str
    scale: float | None = None
    dropout: float = 0.0
    apart: bool = False  # keys of another sequence, and what says which count, are divided too

    def __str__(self) -> str:
        extra = f" scale {self.scale}" if self.scale else ""
        extra += f" dropout {self.dropout}" if self.dropout else ""
        return f"{self.operands}, {self.mask}, {self.layout}{extra}{', apart' if self.apart else ''}"


@cache
def batches() -> list[dict[str, Tensor]]:
    """Return two batches."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        x, y = (torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator) for _ in range(2))
        memory = torch.randn(SAMPLES, MEMORY, WIDTH, generator=generator)
        keep = torch.rand(SAMPLES, MEMORY, generator=generator) > 0.4
        keep[:, 0] = True  # a query that sees no key has no numbers
        found.append({"x": x, "y": y, "memory": memory, "keep": keep})
    return found


def given(case: Case) -> list[dict[str, Tensor]]:
    """Return the batches that a case reads."""
    made = OPERANDS[case.operands]
    rows = made.memory or LENGTH
    names = ["x", "y", *(["memory"] if made.memory else []), *(["keep"] if "p" in case.mask[:1] else [])]
    return [{n: batch[n][:, :rows] if n == "keep" else batch[n] for n in names} for batch in batches()]


@cache
def builder(operands: str, mask: str, scale: float | None, dropout: float) -> Callable[[], nn.Module]:
    """Return what builds a model, always the same object: its recording can be used again."""
    return lambda: Attends(OPERANDS[operands], mask, scale, dropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided:
    """A model on one device: compiled, for its recording, and trained in plain PyTorch."""

    program: Program
    wanted: Trained
    begin: Mapping[str, Tensor]  # parameters before the first step


@cache
def undivided(operands: str, mask: str, scale: float | None, dropout: float) -> Undivided:
    """Return the model of a case on one device."""
    case = Case(operands=operands, mask=mask, layout="", scale=scale, dropout=dropout)
    model = builder(operands, mask, scale, dropout)
    torch.manual_seed(0)
    begin = {name: value.detach().double() for name, value in model().named_parameters()}
    program = compile(job(case, []), device="cpu")
    return Undivided(program=program, wanted=train(model, loss, given(case)), begin=begin)


def job(case: Case, strategy: list[Directive]) -> Job:
    """Return the job of a case, in fp64."""
    return Job(
        model=builder(case.operands, case.mask, case.scale, case.dropout),
        loss=loss,
        data=lambda: given(case),
        strategy=strategy,
        precision="fp64",
        optimizer=sgd,
    )


def strategy_of(case: Case) -> list[Directive]:
    """Return the directives of a case."""
    fields = {name: 1 for name in given(case)[0] if case.apart or name in "xy"}
    return LAYOUTS[case.layout].strategy(fields)


def refusal(case: Case, tolerance: float = 1e-12) -> str | None:
    """Return why a case is refused. Otherwise it is proven and trained, and has plain PyTorch's numbers."""
    one = undivided(case.operands, case.mask, case.scale, case.dropout)
    try:
        program = compile(job(case, strategy_of(case)), device="cpu", captured=one.program)
    except (CaptureError, ScheduleError) as error:
        return error.what
    losses, state = trained(program, given(case))
    wanted_losses, wanted_state = one.wanted.losses, one.wanted.state
    if case.dropout:  # one device of ours draws the numbers that plain PyTorch has to be given
        wanted_losses, wanted_state = trained(one.program, given(case))
    for got, want in zip(losses, wanted_losses, strict=True):
        assert abs(got - want) <= tolerance, f"{case}: loss {got}, not {want}"
    worst = largest_difference(wanted_state, state)
    assert worst <= tolerance, f"{case}: parameters differ by {worst}"
    return None


def trained(program: Program, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Train on all batches, in threads."""
    with one_core(), launch_inline(program) as run:
        losses = [run.step(batch).loss for batch in batches]
        return losses, {name: value.clone() for name, value in run.state_dict().items()}


def refusal_in_lockstep(case: Case, tolerance: float = 1e-12) -> str | None:
    """Return the same after one divided forward and its gradients, without plans or a proof: much faster."""
    one = undivided(case.operands, case.mask, case.scale, case.dropout)
    traced = one.program.recordings.recorded[SAMPLES]
    strategy = strategy_of(case)
    try:
        requests = requests_of(apply(start(traced.outline), strategy, orders=False))
        recording, parameters = shard_model(
            traced.recording, requests, traced.outline.parameters, traced.outline.batch
        )
    except (CaptureError, ScheduleError) as error:
        return error.what
    losses, gradients = stepped(recording, parameters, one.begin, given(case)[0], requests)
    for got in losses:
        assert abs(got - one.wanted.losses[0]) <= tolerance, f"{case}: loss {got}, not {one.wanted.losses[0]}"
    worst = largest_difference(one.wanted.gradients, gradients)
    assert worst <= tolerance, f"{case}: gradients differ by {worst}"
    return None


def stepped(
    recording: Recording,
    parameters: Sequence[Parameter],
    begin: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    requests: Sequence[Request],
) -> tuple[list[float], dict[str, Tensor]]:
    """Run a sharded forward and its backward on all devices. requests: of each axis, the innermost first."""
    axes = [(request.axis, request.degree) for request in requests]
    cuts = {
        name: [
            AxisPlacement(axis=r.axis, degree=r.degree, placement=r.fields[name])
            for r in requests
            if name in r.fields
        ]
        for name in batch
    }
    slices = {p.name: p.placements for p in parameters}
    params = {
        name: [part.requires_grad_() for part in _cut(value, slices[name], axes)]
        for name, value in begin.items()
    }
    fields = {
        name: _cut(value.double() if value.is_floating_point() else value, cuts[name], axes)
        for name, value in batch.items()
    }
    count = math.prod(degree for _, degree in axes)
    each = [
        ({n: values[i] for n, values in params.items()}, {n: values[i] for n, values in fields.items()})
        for i in range(count)
    ]
    losses, _ = lockstep.run_on_axes(recording, axes, [p for p, _ in each], {}, [b for _, b in each])
    torch.autograd.backward(losses)
    gradients = {}
    for name, values in params.items():
        grads = [value.grad for value in values]
        found = [grad for grad in grads if grad is not None]
        assert len(found) == count, f"{name} has no gradient on some device"
        gradients[name] = _joined(found, slices[name])
    return [float(value.detach()) for value in losses], gradients


def _cut(value: Tensor, slices: Sequence[AxisPlacement], axes: list[tuple[str, int]]) -> list[Tensor]:
    """Return each device's part. The outermost axis cuts first."""
    held = {part.axis: part for part in slices}
    parts = [value.clone()]
    for axis, degree in reversed(axes):
        how = held.get(axis)
        copies = degree  # neighbours that hold the same slice
        if how is not None and isinstance(how.placement, Shard):
            parts = [one for part in parts for one in lockstep.cut(part, how.placement, how.degree)]
            copies = degree // how.degree
        parts = [part.clone() for part in parts for _ in range(copies)]
    return parts


def _joined(parts: list[Tensor], slices: Sequence[AxisPlacement]) -> Tensor:
    """Put the gradients of a parameter together, from the innermost axis: slices, terms of a sum, or copies."""
    for how in slices:
        groups = [parts[i : i + how.degree] for i in range(0, len(parts), how.degree)]
        if isinstance(how.placement, Shard):
            parts = [lockstep.join(group, how.placement) for group in groups]
        elif how.partial:
            parts = [torch.stack(group).sum(0) for group in groups]
        else:
            for group in groups:
                for other in group[1:]:
                    torch.testing.assert_close(other, group[0], rtol=1e-12, atol=1e-12)
            parts = [group[0] for group in groups]
    assert len(parts) == 1
    return parts[0]
