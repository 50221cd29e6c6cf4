"""Fills in the layers that a trace skipped: equal layers have equal chunks, with other names.

[Note: skipped blocks] A trace takes as long as the model is deep. Where all blocks after the first do the
same, which `equal_blocks` proves on fakes, the blocks between the first four and the last one only pass on
their input. Their regions are then empty in the outline. Here each gets the chunks of the fourth block.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from piper.ir.chunk import CapturedModel, Chunk, Output, PhaseSpec, Tags, region_name

Record = TypeVar("Record", Chunk, PhaseSpec)
FIRST = 4  # blocks at the begin that are traced; the last one is too


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """An outline with all its layers."""

    outline: CapturedModel
    origins: Mapping[str, Chunk]  # by the name of a chunk: the chunk of the shorter outline that it copies


def skipped_blocks(blocks: Sequence[str]) -> Sequence[str]:
    """Return the blocks that a trace may skip."""
    return blocks[FIRST:-1]


def filled(outline: CapturedModel, blocks: Sequence[str]) -> Filled | None:
    """Return the outline of the whole model, from one whose trace skipped blocks.

    blocks: the paths of all blocks, in order. None: the outline does not show which regions are missing, or
    the third and the fourth block differ.
    """
    for tag, _ in outline.chunks[0].tags:
        numbers = [dict(chunk.tags).get(tag, -1) for chunk in outline.chunks]
        missing = sorted({*range(max(numbers))} - {*numbers})
        period, rest = divmod(len(missing), len(skipped_blocks(blocks)))
        if min(numbers) >= 0 and period and not rest and missing[-1] - missing[0] + 1 == len(missing):
            return _Filler(outline, blocks, tag, missing[0], period).filled()
    return None


class _Filler:
    """Copies the chunks of one block."""

    def __init__(
        self, outline: CapturedModel, blocks: Sequence[str], tag: str, gap: int, period: int
    ) -> None:
        """Read an outline whose regions from `gap` on are missing; a block has `period` regions."""
        self.outline, self.blocks, self.tag, self.period = outline, blocks, tag, period
        self.skipped = len(skipped_blocks(blocks))

        def between(first: int, last: float) -> list[Chunk]:
            return [chunk for chunk in outline.chunks if first <= dict(chunk.tags)[tag] < last]

        self.begin, self.end = between(0, gap - period), between(gap, math.inf)
        self.second, self.before, self.block = (
            between(gap - (back + 1) * period, gap - back * period) for back in (2, 1, 0)
        )

    def filled(self) -> Filled | None:
        """Return the whole outline. None: the blocks are not equal."""
        growth = self._steps()
        if growth is None or list(self.outline.chunks) != self.begin + self.block + self.end:
            return None
        steps, ends = growth
        third, fourth, last_block = self.blocks[FIRST - 2], self.blocks[FIRST - 1], self.blocks[-1]
        # A region may end with operations of the block that runs after its own.
        moves = _Moves(steps, [*self.second, *self.before, *self.block])
        if [moves.chunk(chunk, {third: fourth, fourth: last_block}) for chunk in self.before] != self.block:
            return None
        chunks = {chunk.name: chunk for chunk in self.begin}
        origins = dict(chunks)
        for shift in range(self.skipped + 1):
            here, after = self.blocks[FIRST - 1 + shift], self.blocks[FIRST + shift]
            by = {tag: shift * step for tag, step in steps.items()}
            moves = _Moves(by, [*self.before, *self.block])
            for chunk in self.block:
                copy = moves.chunk(chunk, {fourth: here, last_block: after})
                chunks[copy.name], origins[copy.name] = copy, chunk
        # What the end of the model reads of the block is that of the last one skipped.
        moves = _Moves(ends, self.end, {chunk.name: moves.names[chunk.name] for chunk in self.block})
        before = {chunk.name for chunk in self.before}
        for chunk in self.end:
            if any(isinstance(source, Output) and source.chunk in before for source in chunk.inputs):
                return None
            copy = moves.chunk(chunk, {})
            chunks[copy.name], origins[copy.name] = copy, chunk
        return self._whole(chunks, origins, moves)

    def _whole(
        self, chunks: Mapping[str, Chunk], origins: Mapping[str, Chunk], moves: "_Moves"
    ) -> Filled | None:
        outline = self.outline
        known = {parameter.name: parameter for parameter in outline.parameters}
        copied = dict.fromkeys(skipped_blocks(self.blocks), self.blocks[FIRST - 1])
        parameters = []
        for parameter in outline.parameters:
            likeness = known.get(_moved(parameter.name, copied))
            if likeness is None or (likeness.shape, likeness.dtype) != (parameter.shape, parameter.dtype):
                return None
            parameters.append(replace(likeness, name=parameter.name, aliases=parameter.aliases))
        tagged = {pair for chunk in chunks.values() for pair in chunk.tags}
        degrees = dict(outline.degrees)
        for name, chunk in chunks.items():
            if origins[name].tags in outline.degrees:
                degrees[chunk.tags] = outline.degrees[origins[name].tags]
        whole = replace(
            outline,
            chunks=tuple(chunks.values()),
            loss=moves.output(outline.loss),
            weight=outline.weight and moves.output(outline.weight),
            metrics=outline.metrics and moves.output(outline.metrics),
            parameters=tuple(parameters),
            degrees=degrees,
            empty={pair: place for pair, place in outline.empty.items() if pair not in tagged},
        )
        return Filled(outline=whole, origins=origins)

    def _steps(self) -> tuple[dict[str, int], dict[str, int]] | None:
        """Return by how much each tag grows from block to block, and in the end behind the skipped blocks.

        A region that is entered while the model runs is counted as it runs, so the end counts too low.
        """
        steps, ends = {self.tag: self.period}, {self.tag: 0}
        for tag in {tag for chunk in self.outline.chunks for tag, _ in chunk.tags} - {self.tag}:
            before, here, after = (_indices(each, tag) for each in (self.before, self.block, self.end))
            if len(before) != len(here):
                return None
            steps[tag] = here[0] - before[0] if here else 0
            skipped = self.skipped * steps[tag]
            if not here or not after or not skipped or after[0] == here[-1] + 1 + skipped:
                ends[tag] = 0
            elif after[0] == here[-1] + 1:
                ends[tag] = skipped
            else:
                return None
        return steps, ends


class _Moves:
    """Copies chunks to later regions, with other names."""

    def __init__(
        self, by: Mapping[str, int], chunks: Sequence[Chunk], known: Mapping[str, str] | None = None
    ) -> None:
        """Note by how much each tag grows. known: new names of other chunks that are read."""
        self.by = by
        self.names = dict(known or {})
        for chunk in chunks:
            old, new = region_name(chunk.tags), region_name(self.tags(chunk))
            assert chunk.name.startswith(old), f"{chunk.name} does not begin with its tags"
            self.names[chunk.name] = new + chunk.name.removeprefix(old)

    def tags(self, chunk: Chunk) -> Tags:
        return tuple((tag, number + self.by[tag]) for tag, number in chunk.tags)

    def output(self, source: Output) -> Output:
        return replace(source, chunk=self.names.get(source.chunk, source.chunk))

    def chunk(self, chunk: Chunk, paths: Mapping[str, str]) -> Chunk:
        """Return a copy of a chunk. paths: blocks, and those that take their place."""
        inputs = (self.output(each) if isinstance(each, Output) else each for each in chunk.inputs)
        return replace(
            _renamed(chunk, ("params", "buffers", "mutated", "products", "rowwise"), paths),
            name=self.names[chunk.name],
            tags=self.tags(chunk),
            inputs=tuple(inputs),
            phases={
                kind: _renamed(spec, ("params", "buffers", "grad_params", "in_place"), paths)
                for kind, spec in chunk.phases.items()
            },
        )


def _renamed(record: Record, fields: Sequence[str], paths: Mapping[str, str]) -> Record:
    """Return a record whose fields hold the names of parameters and buffers in other blocks."""
    changes: dict[str, Any] = {
        field: tuple(_moved(name, paths) for name in getattr(record, field)) for field in fields
    }
    return replace(record, **changes)


def _indices(chunks: Sequence[Chunk], tag: str) -> list[int]:
    """Return the indices of a tag that chunks have, in order."""
    return sorted({number for chunk in chunks for name, number in chunk.tags if name == tag})


def _moved(name: str, paths: Mapping[str, str]) -> str:
    """Return the name of a parameter or buffer in another block."""
    for old, new in paths.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name
