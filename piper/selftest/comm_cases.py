"""What every communicator must do: collectives on tensors of several types and lengths, and their results.

Expected values are computed from what all ranks give, with plain operations on one host. The tests of
communicators and `piper selftest` use the same cases.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from piper.runtime.comm.base import Comms, Form
from piper.selftest.rank_process import Crew

Shape = tuple[int, ...]
Shapes = Callable[[int], list[Shape]]  # of the tensors that ranks give, by how many ranks there are
WIDE = 3  # columns of rows that are exchanged
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
UNEVEN = (0, 5, 1, 8)  # lengths of the ranks, one after another
ROWS = {  # that rank i gives to rank j, in a pattern that repeats after four ranks
    "uneven": ((0, 2, 1, 0), (3, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 4)),
    "none": ((0,) * 4,) * 4,
    "to all but the first": ((0, 7, 7, 7), (0, 3, 3, 3), (0, 1, 1, 1), (0, 5, 5, 5)),
    "even": ((3,) * 4,) * 4,
}
PIPED = ((2, 3), (), (4097,))  # shapes of values that follow each other through a pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedValue:
    """A value that a rank must get."""

    value: Tensor
    near: tuple[Tensor, Tensor] | None = None  # exact numbers, and how far each may be off. None: to the bit

    def problem(self, got: Tensor) -> str | None:
        """Return what is wrong with a value. None: nothing is."""
        value = self.value
        if got.shape != value.shape or got.dtype != value.dtype:
            return f"{list(got.shape)} of {got.dtype} instead of {list(value.shape)} of {value.dtype}"
        exact, slack = (value, 0) if self.near is None else self.near
        wrong = got != value if self.near is None else ~((got.double() - exact).abs() <= slack)
        if not wrong.any():
            return None
        first, flat, wanted = int(wrong.flatten().int().argmax()), got.flatten(), value.flatten()
        return f"{flat[first]} instead of {wanted[first]} at {first}, {int(wrong.sum())} of {len(flat)} wrong"


Total = Callable[[Sequence[Tensor]], ExpectedValue]  # of the tensors of all ranks


def first_to_last(given: Sequence[Tensor]) -> ExpectedValue:
    """Return the sum from the first to the last, to the bit; short types are added in float32."""
    total = given[0].float() if given[0].dtype == torch.bfloat16 else given[0]
    for value in given[1:]:
        total = total + value.to(total.dtype)
    return ExpectedValue(value=total.to(given[0].dtype))


def in_any_order(given: Sequence[Tensor]) -> ExpectedValue:
    """Return the sum, and how far it may be off if it is taken in any order. Whole numbers are exact."""
    if not given[0].is_floating_point():
        return first_to_last(given)
    wide = torch.stack([value.double() for value in given])
    slack = len(given) * torch.finfo(given[0].dtype).eps * wide.abs().sum(0)
    return ExpectedValue(value=first_to_last(given).value, near=(wide.sum(0), slack))


@dataclass(frozen=True, slots=True)
class CommCase:
    """A collective on tensors of one type: what a rank does with its own, and what it must get."""

    collective: str
    about: str
    dtype: torch.dtype
    shapes: Shapes
    act: Callable[[Comms, int, Tensor], list[Tensor]]
    want: Callable[[list[Tensor], int, Total], list[ExpectedValue]]

    def __str__(self) -> str:
        return f"{self.collective} {str(self.dtype).removeprefix('torch.')} {self.about}"

    def given(self, size: int) -> list[Tensor]:
        """Return a tensor for each rank, on the host, always the same."""
        rng = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in self.shapes(size)]
        return [value.mul(1000).to(self.dtype) for value in drawn]

    def problems(self, crew: Crew) -> list[str]:
        """Let all ranks of a crew do it, and return what is wrong with what they get."""
        given, place = self.given(crew.size), crew.place
        total = first_to_last if crew.exact else in_any_order
        wanted = [self.want(given, rank, total) for rank in range(crew.size)]
        got = crew.run(lambda rank, comms: self.act(comms, rank, given[rank].to(place, copy=True)))
        pairs = (
            (rank, expected.problem(value))
            for rank, values in enumerate(cast("list[list[Tensor]]", got))
            for value, expected in zip(values, wanted[rank], strict=True)
        )
        return [f"{self}: rank {rank} gets {problem}" for rank, problem in pairs if problem is not None]


def all_reduce(dtype: torch.dtype, length: int, group: str = "all") -> CommCase:
    """Sum over all ranks, or over each of two groups ("halves"), which know nothing of each other."""

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        cut = (len(given) + 1) // 2 if group == "halves" else len(given)
        return [total(given[:cut] if rank < cut else given[cut:])]

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        return [comms.group(group).all_reduce(mine)]

    return CommCase("all_reduce", f"{length} {group}", dtype, lambda size: [(length,)] * size, act, want)


def reduce_scatter(dtype: torch.dtype, length: int | None) -> CommCase:
    """Sum, of which each rank gets an equal part, zeros beyond its end; without a length, uneven parts."""

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        group = comms.group("all")
        if length is None:
            return [group.reduce_scatter_uneven(mine, uneven(group.size))]
        return [group.reduce_scatter(mine, -(-length // group.size))]

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        parts = uneven(len(given)) if length is None else [-(-length // len(given))] * len(given)
        padded = [torch.cat([value, value.new_zeros(sum(parts) - len(value))]) for value in given]
        return [total([value.split(parts)[rank] for value in padded])]

    def shapes(size: int) -> list[Shape]:
        return [(sum(uneven(size)) if length is None else length,)] * size

    return CommCase("reduce_scatter", named(length), dtype, shapes, act, want)


def all_gather(dtype: torch.dtype, length: int | None) -> CommCase:
    """Gather, to other memory and in place. Without a length ranks have different ones."""

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        group = comms.group("all")
        sizes = lengths(length, group.size)
        apart, within = mine.new_zeros(sum(sizes)), mine.new_zeros(sum(sizes))
        own = within.split(sizes)[rank].copy_(mine)
        for shard, out in ((mine, apart), (own, within)):
            if length is None:
                group.all_gather_uneven(shard, out, sizes)
            else:
                group.all_gather(shard, out)
        return [apart, within]

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        return [ExpectedValue(value=torch.cat(given))] * 2

    return CommCase("all_gather", named(length), dtype, partial(vectors, length), act, want)


def all_to_all(dtype: torch.dtype, about: str) -> CommCase:
    """Give each rank some rows, none to some of them."""

    def gives(rank: int, size: int) -> list[int]:
        return [ROWS[about][rank % 4][other % 4] for other in range(size)]

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        group = comms.group("all")
        gets = [gives(other, group.size)[rank] for other in range(group.size)]
        return [torch.cat(group.all_to_all(mine, gives(rank, group.size), gets))]

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        rows = [value.split(gives(other, len(given)))[rank] for other, value in enumerate(given)]
        return [ExpectedValue(value=torch.cat(rows))]

    def shapes(size: int) -> list[Shape]:
        return [(sum(gives(rank, size)), WIDE) for rank in range(size)]

    return CommCase("all_to_all", f"{about} rows", dtype, shapes, act, want)


def shift(dtype: torch.dtype, length: int | None, by: int = 1) -> CommCase:
    """Give to the next rank, or to the one before. What arrives by an even shift may be added to."""
    added = 0 if length is None else 1

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        group = comms.group("all")
        if length is not None:
            return [group.shift(mine, by).add_(added), mine]
        return [group.shift_uneven(mine, uneven(group.size)[rank - by]), mine]

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        return [
            ExpectedValue(value=given[(rank - by) % len(given)] + added),
            ExpectedValue(value=given[rank]),
        ]

    return CommCase("shift", f"{named(length)} by {by}", dtype, partial(vectors, length), act, want)


def broadcast(dtype: torch.dtype, shape: Shape) -> CommCase:
    """Give the first rank's value to all."""

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        return [comms.group("all").broadcast(mine)]

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        return [ExpectedValue(value=given[0])]

    return CommCase("broadcast", str(list(shape)), dtype, lambda size: [shape] * size, act, want)


def pipes(dtype: torch.dtype) -> CommCase:
    """Send values of several shapes round a ring, twice: they arrive in their order."""

    def act(comms: Comms, rank: int, mine: Tensor) -> list[Tensor]:
        out, into = comms.outgoing("ring"), comms.incoming("ring")
        got: list[Tensor] = []
        for step in range(2):
            # A send may wait for its receive, so half of the ranks receive first.
            for receive in (rank % 2 == 1, rank % 2 == 0):
                if receive:
                    got += [into.recv(Form(shape, dtype)) for shape in PIPED]
                    continue
                for shape in PIPED:
                    out.send(mine.new_full(shape, 10 * rank + step))
        return got

    def want(given: list[Tensor], rank: int, total: Total) -> list[ExpectedValue]:
        numbers = [10 * ((rank - 1) % len(given)) + step for step in range(2)]
        return [ExpectedValue(value=torch.full(shape, n, dtype=dtype)) for n in numbers for shape in PIPED]

    return CommCase("send, recv", "in order", dtype, lambda size: [()] * size, act, want)


def uneven(size: int) -> list[int]:
    """Return a length for each rank."""
    return [UNEVEN[rank % len(UNEVEN)] for rank in range(size)]


def lengths(length: int | None, size: int) -> list[int]:
    """Return a length for each rank: the same, or without one different ones."""
    return uneven(size) if length is None else [length] * size


def vectors(length: int | None, size: int) -> list[Shape]:
    return [(each,) for each in lengths(length, size)]


def named(length: int | None) -> str:
    """Return a length as text."""
    return "uneven" if length is None else str(length)


def all_cases() -> Iterator[CommCase]:
    """Yield the cases of every collective."""
    moved = [  # types and lengths of values that only travel
        *((torch.float32, n) for n in (0, 7)),
        *((torch.bfloat16, n) for n in (1, 4097)),
        (torch.int64, 9),
    ]
    scattered = [*((torch.float32, n) for n in (1, 2, 8, 9, 5000)), (torch.bfloat16, 4097), (torch.int64, 7)]
    for dtype in (torch.float64, *DTYPES):
        yield from (all_reduce(dtype, length) for length in (1, 3, 4096, 4097, 10_001))
    yield all_reduce(torch.float32, 5, "halves")
    yield from (reduce_scatter(*each) for each in scattered)
    yield from (all_gather(*each) for each in moved)
    yield from (shift(*each, by) for by in (1, -1) for each in moved)
    yield from (all_to_all(torch.bfloat16, about) for about in ROWS if about != "uneven")
    for dtype in DTYPES:
        yield reduce_scatter(dtype, None)
        yield all_gather(dtype, None)
        yield shift(dtype, None)
        yield all_to_all(dtype, "uneven")
        yield pipes(dtype)
    yield from (broadcast(torch.float32, shape) for shape in ((), (0, 3)))
    yield from (broadcast(torch.bfloat16, (3,)), broadcast(torch.int64, (2, 2)))


CASES = tuple(all_cases())
