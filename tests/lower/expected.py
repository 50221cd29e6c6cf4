"""What every compute instruction of some plans should read and give: the same in every order they allow."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from piper.ir.chunk import Chunk, Output, Phase, PhaseSpec, Tags
from piper.ir.graph import Graph
from piper.plan.instr import Instr
from piper.plan.plan import Bucket, Plans
from tests.lower.symbols import Held, Note, Rows, Slope, Value, Weights
from tests.lower.truth import Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """One phase of a chunk on one device, for one part."""

    before: list[Value]  # what it reads before the buffers, in the order of its PhaseSpec
    buffers: tuple[str, ...]
    after: list[Value]
    gives: tuple[Value, ...]
    mutated: tuple[str, ...]  # buffers that it writes beside

    def reads(self, slots: Mapping[str, Value]) -> list[Value]:
        """All that it should read; buffers are as they are."""
        if not self.buffers:
            return [*self.before, *self.after]
        return [*self.before, *(slots[f"buffer.{name}"] for name in self.buffers), *self.after]


class Expected:
    """Finds what an instruction should read and give, and works it out once."""

    def __init__(self, plans: Plans, graph: Graph) -> None:
        self.truth = Truth(graph, plans.cells)
        self.known: dict[tuple[int, Phase, str, Tags], Computed] = {}
        self.buckets: dict[str, list[Bucket]] = {name: [] for name in self.truth.chunks}
        for bucket in plans.buckets.values():
            for name in bucket.chunks:
                self.buckets[name].append(bucket)

    def of(self, number: int, ins: Instr) -> Computed:
        """The instruction of a device."""
        phase, name = ins.computes.phase, ins.computes.chunk
        key = (number, phase, name, ins.part)
        if key not in self.known:
            chunk = self.truth.chunks[name]
            spec = chunk.phases[phase]
            before, after = self.wanted(number, ins.part, chunk, spec)
            forward = phase == "F"
            given = self.forward if forward else self.backward
            self.known[key] = Computed(
                before=before,
                buffers=spec.buffers,
                after=after,
                gives=given(number, ins.part, chunk, phase, spec),
                mutated=chunk.mutated if forward else (),
            )
        return self.known[key]

    def wanted(
        self, number: int, part: Tags, chunk: Chunk, spec: PhaseSpec
    ) -> tuple[list[Value], list[Value]]:
        """What a phase should read before its buffers, and after them."""
        name, truth = chunk.name, self.truth
        rows, share = truth.rows(name, number, part)
        before: list[Value] = [truth.value(chunk.inputs[i], name, number, part) for i in spec.inputs]
        for bucket in self.buckets[name]:
            if any(piece.name in spec.params for piece in bucket.pieces):
                before.append(Held(("old",) * bucket.group_size))
        after: list[Value] = [Note(f"{name}.{bundle}", rows, share) for bundle in bundles(chunk, spec.saved)]
        after += [Note(f"{name}.carried", rows, share)] if spec.carried else []
        for index in spec.tangents:
            first = Output(chunk=name, index=index) == truth.outline.loss
            after.append(Note("seed") if first else truth.slope(index, name, number, part))
        return before, after

    def forward(
        self, number: int, part: Tags, chunk: Chunk, phase: str, spec: PhaseSpec
    ) -> tuple[Value, ...]:
        """What a forward gives, but for the buffers it writes."""
        rows, share = self.truth.rows(chunk.name, number, part)
        outputs = [self.truth.output(chunk.name, i, number, part) for i in range(len(chunk.outputs))]
        saved = bundles(chunk, range(len(chunk.saved)))
        return (*outputs, *(Note(f"{chunk.name}.{bundle}", rows, share) for bundle in saved))

    def backward(
        self, number: int, part: Tags, chunk: Chunk, phase: str, spec: PhaseSpec
    ) -> tuple[Value, ...]:
        """What a backward, or a half of one, gives."""
        name, truth = chunk.name, self.truth
        rows, share = truth.rows(name, number, part)
        given: list[Value] = [
            Slope(Rows(truth.name(chunk.inputs[position]), rows, share), ((name, position),))
            for position in spec.grad_inputs
        ]
        if phase == "BI":
            return (*given, *([Note(f"{name}.carried", rows, share)] if chunk.carried else []))
        terms = Counter((name, row, share) for row in rows)
        for bucket in self.buckets[name]:
            pieces = [piece.name for piece in bucket.pieces if piece.name in spec.grad_params]
            if pieces:
                given.append(Weights(dict.fromkeys(pieces, terms)))
        return tuple(given)


def bundles(chunk: Chunk, saved: tuple[int, ...] | range) -> list[str]:
    """The bundles that hold some saved values: `kept` those that BW needs, `saved` the others."""
    late = set(chunk.phases["BW"].saved) if "BW" in chunk.phases else set()
    return [
        name for name, kept in (("saved", False), ("kept", True)) if any((i in late) == kept for i in saved)
    ]
