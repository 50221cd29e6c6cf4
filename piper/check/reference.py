"""Plain PyTorch on one device: autograd over the job's own loss on the whole batch.

This module shares no code with what it checks. It builds the model as PyTorch does for the job's seed, and
knows nothing of captured chunks, plans or hooks. Only random numbers come from the plan's contract
(`replay.py`) and from the device that the job names (`setup.py`), and only `sliced` looks at how the
plans cut a batch (`slicing.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

from piper.check.fp8_products import Fp8Products, shards_of
from piper.check.replay import Replay, ReplayError
from piper.check.slicing import BatchSlicing, Slice, slicing_of, take
from piper.ir.dtypes import DTYPES
from piper.job import strategy_of
from piper.process.attributes import replaced
from piper.process.flex_on_host import flex_gradients_on_host
from piper.process.usercode import raised
from piper.runtime.accelerator import device_of
from piper.runtime.batch import COUNTS, as_run, wanted_batch
from piper.runtime.setup import ProgramLike, drawing_device, seeded_draws
from piper.runtime.trainers import make_optimizer


class Reference:
    """Trains on one device.

    sliced: take the loss of each slice of the batch by itself, and combine them as documented: a mean counts
    once per slice, a (sum, weight) by its weight. This is the meaning of a strategy for a model whose
    operations mix samples, such as BatchNorm.
    exact: cast nothing to float32 in a job of fp64, so that its numbers hold no rounding of that type. Always
    so where the model is sharded: its sums are added in another order.
    """

    def __init__(self, program: ProgramLike, *, sliced: bool = False, exact: bool = False) -> None:
        self.program, self.sliced = program, sliced
        self.job = job = program.job
        self.exact = exact
        self.device = device_of(program.device)
        self.dtype: torch.dtype = getattr(torch, DTYPES[job.precision])
        with seeded_draws(job.seed, drawing_device(program)):
            self.model = job.model().to(self.device)
        initial = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        cast(self.model, self.dtype)
        self.params = dict(self.model.named_parameters())
        self.masters: dict[str, Tensor] = {}
        if job.precision == "bf16":
            self.masters = {n: initial[n].requires_grad_() for n, p in self.params.items() if p.requires_grad}
        trained = [(n, self.masters.get(n, p)) for n, p in self.params.items() if p.requires_grad]
        self.trained = [tensor for _, tensor in trained]
        self.optimizer = make_optimizer(job.optimizer, trained)
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.wanted = wanted_batch(program)
        self.replays: dict[int, Replay] = {}  # of the programs for each shape of batches
        self.replay = self._replay(program)
        self.counts: Tensor | None = None  # where samples are repeated: how many each row's slice holds
        self.steps = 0
        self.gradients: dict[str, Tensor] = {}
        self.grad_norm = 0.0

    def _replay(self, program: ProgramLike) -> Replay:
        """Return the random numbers of the program for a shape of batches."""
        if id(program) not in self.replays:
            slicing = slicing_of(program.plans, program.outline)
            buffers = dict(self.model.named_buffers())
            products = self._fp8_products(program, slicing)
            self.replays[id(program)] = Replay(program, slicing, self.params, buffers, products)
        return self.replays[id(program)]

    def as_run(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch as workers get it, and take the slices of the program that runs on its shape."""
        rows, first = as_run(self.program, batch, self.wanted)
        self.replay = self._replay(self.program if first else self.program.shaped(rows))
        self.counts = rows.get(COUNTS)
        return self.on_device({name: field for name, field in rows.items() if name != COUNTS})

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one global batch, and return the loss."""
        for parameter in self.params.values():  # all of them: the optimizer may hold only some
            parameter.grad = None
        given = self.as_run(batch)
        if self.replay.products is not None:
            self.replay.products.total = samples_in(given)
        loss = self._sliced(given) if self.sliced else self._whole(self.on_device(batch), given)
        self.gradients = {name: p.grad.clone() for name, p in self.params.items() if p.grad is not None}
        for name, master in self.masters.items():
            gradient = self.params[name].grad
            master.grad = None if gradient is None else gradient.float()
            self.params[name].grad = None
        limit = self.job.clip_norm
        norm = nn.utils.clip_grad_norm_(self.trained, float("inf") if limit is None else limit)
        self.grad_norm = float(norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.params[name].copy_(master)
        self.steps += 1
        return loss

    def own_part(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the part of a global batch that this model trains on: all of it."""
        return batch

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on the reference's device, with floating-point fields in the type that computes."""
        types = {name: self.dtype if field.is_floating_point() else None for name, field in batch.items()}
        return {name: field.to(self.device, types[name]) for name, field in batch.items()}

    def _fp8_products(self, program: ProgramLike, slicing: BatchSlicing) -> Fp8Products | None:
        """Return how products run whose regions the strategy of a program puts in fp8, if any."""
        chunks: dict[str, list[str]] = {}
        for chunk in program.outline.chunks:
            for name in chunk.products if chunk.precision else ():
                chunks.setdefault(name, []).append(chunk.name)
        if not chunks:
            return None
        weights = {name: self.params[name] for name in chunks}
        captured = {parameter.name: parameter for parameter in program.outline.parameters}
        strategy = strategy_of(program.job)
        shards = {name: shards_of(captured[name], strategy) for name in chunks}
        return Fp8Products(weights, chunks, shards, slicing)

    def loss(
        self, batch: Mapping[str, Tensor], samples: Sequence[int] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the job's loss on samples of these numbers in the global batch. None: on the global batch."""
        fp8 = self.replay.products
        products = nullcontext() if fp8 is None else fp8.on(samples or range(samples_in(batch)))
        exact = self.job.precision == "fp64" and (self.exact or self.replay.program.outline.degrees)
        try:
            with Exact() if exact else nullcontext(), products, nothing_recomputed(), plain_flex_attention():
                result = self.job.loss(self.model, batch)
        except ReplayError:
            raise
        except RuntimeError as error:
            raise raised(
                "the loss fails in plain PyTorch",
                error,
                role="loss",
                thing=self.job.loss,
                facts={"type": f"the model computes in {self.job.precision}"},
                hint="bring tensors of your own, such as weights of classes, to the type of the logits: "
                "weight.to(logits.dtype); else call the loss without Piper, with the model in that type",
            ) from error
        if isinstance(result, tuple) and isinstance(result[1], Mapping):  # metrics are not trained on
            return result[0]
        return result

    def _whole(self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> float:
        """Run the job's loss on all samples at once, and its backward. given: the batch as workers get it."""
        same = all(batch[name].shape == field.shape for name, field in given.items()) and self.counts is None
        random = any(chunk.random for chunk in self.replay.chunks.values())
        if not same and (random or self.replay.products is not None):
            why = "workers get a batch that is padded, or whose samples are repeated"
            raise ReplayError(why) if random else ReplayError(why, "gradients cannot be rounded to fp8")
        with self.replay.drawing(self.steps, samples_in(batch)) if same else nullcontext():
            result = self.loss(batch)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()
        return loss.item()

    def _sliced(self, batch: Mapping[str, Tensor]) -> float:
        """Run the job's loss and its backward on each slice; the first replica's buffers are kept."""
        slices = [*self.replay.slicing.slices(self.replay.program.outline.loss.chunk, samples_in(batch))]
        slices.sort(key=lambda part: part.part)  # the order in which a device writes its buffers
        total, weights = 0.0, 0.0
        buffers = BufferHistories(self)
        for part in slices:
            buffers.begin(part)
            loss, weight = self._counted(self._slice_loss(batch, part), part.samples, len(slices))
            buffers.end(part)
            loss.backward()
            total += loss.item()
            weights += 0.0 if weight is None else weight.item()
        buffers.begin(slices[0])  # those of the first replica, on the first microbatch, stay
        if not weights:  # a mean
            return total
        for parameter in self.params.values():
            if parameter.grad is not None:
                parameter.grad /= weights
        return total / weights

    def _slice_loss(self, batch: Mapping[str, Tensor], part: Slice) -> Tensor | tuple[Tensor, Tensor]:
        with self.replay.drawing(self.steps, len(part.samples), part):
            return self.loss(take(batch, part.samples), part.samples)

    def _counted(
        self, result: Tensor | tuple[Tensor, Tensor], samples: tuple[int, ...], slices: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a slice and its weight as they count: each of its samples once."""
        if self.counts is None:
            return result if isinstance(result, tuple) else (result / slices, None)
        count = int(self.counts[samples[0]])
        if isinstance(result, tuple):
            return result[0] * count / len(samples), result[1] * count / len(samples)
        return result * count, result.new_tensor(count)

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers."""
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(values[name])

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the model's buffers at the end of the block."""
        before = self.buffers()
        try:
            yield
        finally:
            self.set_buffers(before)

    def state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer, exact."""
        state = {name: value.detach() for name, value in self.model.state_dict().items()}
        return state | {name: value.detach() for name, value in self.masters.items()}


class BufferHistories:
    """Gives each slice of the batch the buffers that the slices before it on the same device have written."""

    def __init__(self, reference: Reference) -> None:
        chunks = reference.replay.program.outline.chunks
        self._writers = {name: chunk.name for chunk in chunks for name in chunk.mutated}
        self._reference, self._before = reference, reference.buffers()
        self._held: dict[tuple[str, int], Tensor] = {}  # by buffer, and the device that holds it

    def _key(self, name: str, part: Slice) -> tuple[str, int]:
        writer, placed = self._writers.get(name), self._reference.replay.slicing.placed
        return name, 0 if writer is None else placed[writer][part.part][part.replica]

    def begin(self, part: Slice) -> None:
        """Set the buffers to what a slice reads."""
        values = {n: self._held.get(self._key(n, part), v) for n, v in self._before.items()}
        self._reference.set_buffers(values)

    def end(self, part: Slice) -> None:
        """Take over what a slice has written."""
        self._held |= {self._key(name, part): value for name, value in self._reference.buffers().items()}


class Exact(TorchFunctionMode):
    """Casts to float64 wherever a model casts to float32: sums in another order would hide mistakes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Call the functions of `torch.utils.checkpoint` directly: run again, they would draw other numbers."""

    class Directly:
        @staticmethod
        def apply(function: Callable[..., object], preserve: bool, *args: object) -> object:
            return function(*args)

    def nothing(*_: object, **__: object) -> Iterator[None]:
        yield

    with (
        replaced(checkpoint, "CheckpointFunction", Directly),
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", nothing),
    ):
        yield


def samples_in(batch: Mapping[str, Tensor]) -> int:
    """Return the number of samples of a batch."""
    return len(next(iter(batch.values())))


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring a model's floating-point state to the type that computes. Ties and hooks stay as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if dtype is torch.float64 and experts == "grouped_mm":
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]  # torch groups no float64


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """Run `flex_attention` inside the block as products, a softmax and nothing else, never compiled.

    Its own operator is what a captured model runs, so it is no reference for one. Torch also refuses its
    gradient on a CPU.
    """
    with (
        flex_gradients_on_host(),
        replaced(flex_attention, "flex_attention_hop", attend),
        replaced(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    blocks: Sequence[Any],
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and in base 2 the log-sum-exp and the largest of each query's scores."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).expand(len(query), -1, -1, -1) for x in (key, value))
    scores = query @ keys.transpose(-1, -2) * scale
    indices = [torch.arange(size, device=query.device) for size in scores.shape]
    with TransformGetItemToIndex():  # tensors are indexed by single indices, each on its own under vmap
        scores = over_all(score_mod, 1)(scores, *indices)
        seen = over_all(blocks[-1], 0)(*indices)
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - largest.detach().masked_fill(~seen.any(-1, keepdim=True), 0.0)).exp()
    sums = powers.sum(-1, keepdim=True)
    weights = powers / sums.masked_fill(sums == 0, 1.0)  # a query that sees no key has zeros
    in_base_two = [x / math.log(2) for x in (scores.logsumexp(-1), largest.squeeze(-1))]
    return weights @ values, in_base_two[0], in_base_two[1]


def over_all(function: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """Return a function of `scores` and a sample, head, query and key over all of them, as [b, h, q, k]."""
    for dim in reversed(range(4)):
        indices = [0 if dim == other else None for other in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in range(scores)), *indices))
    return function
