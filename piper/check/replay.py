"""Gives plain PyTorch the random numbers that the contract names.

The contract: a region draws all its random numbers, in program order, from a generator seeded with the first
63 bits of BLAKE2b(`seed/step/region/axis=index,.../replica`). So every microbatch, replica, region and step
has numbers of its own, a recomputed forward draws the same ones, and it does not matter into how many chunks
a region is cut. A chunk of experts stands for a region of its own, `chunk expert`.

This module implements the contract a second time. Which chunk a draw belongs to is read off the captured
chunks, by counting their draws; the values are drawn by the operations of the plain model. On the whole batch
each draw is put together from the draws of the slices, sample by sample.
"""

import hashlib
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from piper.check.fp8_products import Fp8Products
from piper.check.slicing import BatchSlicing, Slice
from piper.ir.chunk import Chunk, Tags
from piper.runtime.accelerator import device_of, generator
from piper.runtime.setup import ProgramLike

aten = torch.ops.aten
IN_PLACE = (aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default)
BY_ELEMENT = (  # each element is a draw of its own, so a draw can be put together from draws of its rows
    aten.native_dropout.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.rand.default,
    aten.randn.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    *IN_PLACE,
)
PACKAGE = Path(__file__).parents[1]
OURS = (str(Path(torch.__file__).parent), str(PACKAGE / "check"), str(PACKAGE / "runtime"))
BY_SAMPLE = "does not draw one row for each sample"
ENOUGH = 64  # elements expected to vary in two draws that cannot be equal by chance
SIGMAS = 6.0  # how far the share of dropped elements may be from its probability

Shape = tuple[int, ...]


class ReplayError(RuntimeError):
    """Plain PyTorch cannot do what a plan does slice by slice. what: which part of it; the text says why."""

    def __init__(self, why: str, what: str = "random numbers cannot be drawn") -> None:
        super().__init__(why)
        self.what = what


class Replay:
    """Draws the random numbers of a program's plans in the operations of the plain model."""

    def __init__(
        self,
        program: ProgramLike,
        slicing: BatchSlicing,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        products: Fp8Products | None = None,  # how those run that the program has in fp8
    ) -> None:
        self.program, self.slicing, self.params, self.buffers = program, slicing, params, buffers
        self.products = products
        self.chunks = {chunk.name: chunk for chunk in program.outline.chunks}
        self.local = {held.name: held.local_shape for held in program.outline.parameters}
        self.device = device_of(program.device)  # of the plain model
        self.generator = generator(self.device)
        self.unmatched: list[str] = []  # draws that one side makes and the other does not
        self.kept: dict[float, list[int]] = {}  # by the probability to keep: elements kept, elements
        self.seen: dict[tuple[int, str, int], dict[bytes, str]] = {}  # which slice drew what
        self.repeated: list[str] = []

    @contextmanager
    def drawing(self, step: int, samples: int, part: Slice | None = None) -> Iterator[None]:
        """Draw for so many samples inside the block: those of one slice, or of all slices at once."""
        slices = {
            chunk: [*self.slicing.slices(chunk, samples)]
            if part is None
            else [part] * (part.replica < len(placed.get(part.part, ())))
            for chunk, placed in self.slicing.placed.items()
        }
        before = self.generator.get_state()
        draws = _Draws(self, step, samples, slices)
        try:
            with draws:
                yield
        finally:
            self.generator.set_state(before)
        for chunk in (chunk for chunk, shapes in draws.left.items() if shapes):
            self.unmatched.append(f"{chunk} draws random numbers that plain PyTorch does not draw")

    @cached_property
    def layout(self) -> dict[str, list[Shape]]:
        """Return the shapes of each chunk's draws in order, by running it once on zeros, or on no values."""
        return {name: self._count(chunk) for name, chunk in self.chunks.items() if chunk.has_code}

    def _count(self, chunk: Chunk) -> list[Shape]:
        spec = chunk.phases["F"]
        ways = self.ways(chunk.name) if chunk.kind == "expert" else 1  # others hold their buffers whole

        def share(value: Tensor) -> Tensor:
            return value.chunk(ways)[0] if ways > 1 else value

        likes = [chunk.input_specs[position] for position in spec.inputs]
        given = [torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=self.device) for x in likes]
        if chunk.kind == "expert":  # all rows go to the first expert
            rows = next(value.shape[0] for value in given if value.is_floating_point())
            for value in given:
                if not value.is_floating_point() and value.dim() == 1:
                    value[0] = rows
        params = [
            self.params[name].new_zeros(self.local[name])
            if self.program.outline.degree(chunk) > 1
            else share(self.params[name]).detach()
            for name in spec.params
        ]
        params = [value.requires_grad_(value.is_floating_point()) for value in params]
        buffers = [share(self.buffers[name]).clone() for name in spec.buffers]
        values = [*given, *params, *buffers]

        def shapes(values: Sequence[Tensor]) -> list[Shape]:
            count = _DrawShapes()
            with torch.enable_grad(), count:  # with gradients: compiled code then runs uncompiled
                self.program.code(chunk, "F")(*values)
            return count.shapes

        try:
            return shapes(values)
        except (IndexError, RuntimeError):  # an index of zeros, such as of the last token that is no padding
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                return shapes([mode.from_tensor(value) for value in values])

    def ways(self, chunk: str) -> int:
        """Return over how many devices the experts of a chunk are sharded."""
        buckets = self.program.plans.buckets.values()
        return max((bucket.ways for bucket in buckets if chunk in bucket.chunks), default=1)

    def seed(self, step: int, region: str, part: Tags, replica: int) -> int:
        """Return the seed of the contract."""
        microbatch = ",".join(f"{axis}={index}" for axis, index in part)
        text = f"{self.program.job.seed}/{step}/{region}/{microbatch}/{replica}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") // 2

    def note(self, where: tuple[int, str, int], slice_: Slice, result: Tensor, keep: float | None) -> None:
        """Record what says whether draws are random. where: the step, the chunk, the draw's number in it."""
        varied = result.numel()
        if keep is not None:
            varied = int(result.numel() * min(keep, 1.0 - keep))
            counts = self.kept.setdefault(keep, [0, 0])
            counts[0] += int(result.count_nonzero())
            counts[1] += result.numel()
        if varied >= ENOUGH and result.min() != result.max():  # of one integer all draws are equal
            digest = hashlib.blake2b(result.detach().double().cpu().numpy().tobytes()).digest()
            who = f"microbatch {dict(slice_.part)} of replica {slice_.replica}"
            first = self.seen.setdefault(where, {}).setdefault(digest, who)
            if first != who:
                self.repeated.append(f"{where[1]} draws the same random numbers in {first} and in {who}")

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the numbers drawn so far: their share, or equal draws in two slices."""
        for keep, (kept, count) in self.kept.items():
            spread = math.sqrt(count * keep * (1.0 - keep))
            if abs(kept - count * keep) > SIGMAS * spread + 1.0:
                yield f"dropout with p={1.0 - keep:.3g} drops {1.0 - kept / count:.3g} of {count} elements"
        yield from self.repeated


class _DrawShapes(TorchDispatchMode):
    """Records the shapes of random draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[Shape] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        out = op(*args, **(kwargs or {}))
        if draws_random(op, args, kwargs or {}):
            self.shapes.append(tuple((out if isinstance(out, Tensor) else out[0]).shape))
        return out


class _Draws(TorchDispatchMode):
    """Seeds every random operation of one forward of the plain model."""

    def __init__(
        self, replay: Replay, step: int, samples: int, slices: Mapping[str, Sequence[Slice]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replay, self.step, self.samples, self.slices = replay, step, samples, slices
        random = any(chunk.random for chunk in replay.chunks.values())
        layout = replay.layout.items() if random else ()
        # The draws of each chunk that are yet to come, each with its number in the chunk:
        self.left = {chunk: deque(enumerate(shapes)) for chunk, shapes in layout}
        self.states: dict[tuple[str, Slice], Tensor] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if not draws_random(op, args, kwargs):
            return op(*args, **kwargs)
        shape = drawn_shape(op, args)  # None: of a fused kernel. A slice can call it, but not take it apart
        for chunk, left in self.left.items():
            if not left:
                continue
            axis = -1 if shape is None else self._axis(chunk, shape, left[0][1])
            if axis is not None:
                if shape is None and len(self.slices[chunk]) > 1:
                    how = "draws inside a fused kernel" if "attention" in str(op) else BY_SAMPLE
                    raise ReplayError(f"{op} at {model_line()} {how}")
                place, _ = left.popleft()
                return self._draw(op, args, kwargs, chunk, place, axis)
        self.replay.unmatched.append(f"plain PyTorch draws random numbers at {model_line()}, no chunk does")
        return op(*args, **kwargs)

    def _axis(self, chunk: str, shape: Shape, slice_shape: Shape) -> int | None:
        """Return the axis of the samples in a draw of a chunk, -1 if there is none, None for another draw."""
        if len(shape) != len(slice_shape):
            return None
        differing = [a for a, (n, m) in enumerate(zip(shape, slice_shape, strict=True)) if n != m]
        if self.replay.chunks[chunk].kind == "expert":
            return -1 if differing in ([], [0]) else None
        if len(self.slices[chunk]) <= 1 or len(differing) != 1:
            return None if differing else -1
        axis = differing[0]
        rows = len(self.slices[chunk][0].samples)
        return axis if shape[axis] * rows == slice_shape[axis] * self.samples else None

    def _draw(self, op: Any, args: Any, kwargs: Any, chunk: str, place: int, axis: int) -> Any:  # noqa: ANN401
        slices = self.slices[chunk]
        if not slices:
            raise ReplayError(f"{chunk} runs on other slices of the batch than the loss does")
        if self.replay.chunks[chunk].kind == "expert" and self.replay.ways(chunk) > 1:
            raise ReplayError(f"{chunk} draws random numbers for rows that other devices have sent")
        if len(slices) == 1:
            return self._seeded(op, args, kwargs, chunk, place, slices[0])
        if axis < 0 or op not in BY_ELEMENT:
            raise ReplayError(f"{op} at {model_line()} {BY_SAMPLE}")
        shape = drawn_shape(op, args)
        assert shape is not None
        results: list[Tensor] = []
        for part in slices:
            each = shape[axis] // self.samples
            rows = torch.tensor(part.rows(each), device=self.replay.device)
            given = [rows_of(value, shape, axis, rows) for value in args]
            named = {key: rows_of(value, shape, axis, rows) for key, value in kwargs.items()}
            out = self._seeded(op, given, named, chunk, place, part)
            drawn = [out] if isinstance(out, Tensor) else [*out]
            if not results:
                results = [args[0] if op in IN_PLACE else value.new_empty((*shape,)) for value in drawn]
            for whole, value in zip(results, drawn, strict=True):
                whole.index_copy_(axis, rows, value)
        return results[0] if len(results) == 1 else tuple(results)

    def _seeded(self, op: Any, args: Any, kwargs: Any, chunk: str, place: int, part: Slice) -> Any:  # noqa: ANN401
        """Call a random operation where the generator of its region and slice stands."""
        region = " ".join(f"{tag}={i}" for tag, i in self.replay.chunks[chunk].tags) or "all"
        if self.replay.chunks[chunk].kind == "expert":
            region = f"{chunk} expert"
        generator, key = self.replay.generator, (region, part)
        if key in self.states:
            generator.set_state(self.states[key])
        else:
            generator.manual_seed(self.replay.seed(self.step, region, part.part, part.replica))
        out = op(*args, **kwargs)
        self.states[key] = generator.get_state()
        mask = out if isinstance(out, Tensor) else out[1]
        if isinstance(mask, Tensor) and op in BY_ELEMENT:
            self.replay.note((self.step, chunk, place), part, mask, kept_share(op, args))
        return out


def draws_random(op: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:  # noqa: ANN401
    """Return whether a call draws random numbers. Attention draws only where it drops something."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [argument.name for argument in op._schema.arguments]
    for name in ("dropout_p", "p", "dropout"):
        if name in names and op not in (aten.bernoulli_.float, aten.bernoulli.p):
            position = names.index(name)
            return (args[position] if position < len(args) else kwargs.get(name, 0.0)) != 0.0
    return True


def drawn_shape(op: Any, args: Sequence[Any]) -> Shape | None:  # noqa: ANN401
    """Return the shape of what a call draws; None if it draws inside a fused kernel."""
    if op not in BY_ELEMENT and not op._schema.name.startswith(("aten::rrelu", "aten::bernoulli")):
        return None
    first = next(each for each in args if isinstance(each, Tensor | list | tuple))  # after bounds of randint
    return tuple(first.shape) if isinstance(first, Tensor) else tuple(first)


def kept_share(op: Any, args: Sequence[Any]) -> float | None:  # noqa: ANN401
    """Return the probability that an element is not zero, for draws of zeros and others."""
    if op is aten.native_dropout.default:
        return 1.0 - float(args[1])
    if op in (aten.bernoulli_.float, aten.bernoulli.p):
        return float(args[1]) if len(args) > 1 else 0.5
    return None


def rows_of(value: Any, shape: Shape, axis: int, rows: Tensor) -> Any:  # noqa: ANN401
    """Return some rows of an argument that has the shape of a draw, laid out in memory as it is."""
    if isinstance(value, Tensor) and tuple(value.shape) == shape:
        rows_taken = torch.empty_like(value.narrow(axis, 0, len(rows)))
        return rows_taken.copy_(value.index_select(axis, rows))
    if isinstance(value, list | tuple) and tuple(value) == shape:
        return [len(rows) if a == axis else size for a, size in enumerate(shape)]
    return value


def model_line() -> str:
    """Return `file.py:12` of the innermost frame that is neither of torch, nor of the runtime or check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) and "contextlib" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
