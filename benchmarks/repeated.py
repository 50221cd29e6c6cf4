"""A captured model with more layers than were captured: equal layers cost the same and run the same code."""

from dataclasses import replace

from piper.ir.chunk import CapturedModel, Chunk, Output, PhaseSpec, Source, Tags, region_name

TAG = "LAYER"
SECOND = 2  # the region that is repeated: 0 is the embedding, 1 the first layer


def repeated(outline: CapturedModel, layers: int) -> CapturedModel:
    """Return the outline of a model with `layers` layers, from one with two.

    Region 0 is the embedding, the last one the head. The second layer is repeated; each copy reads the layer
    before it, has its own parameters, and shares code.
    """
    index = {chunk.name: dict(chunk.tags)[TAG] for chunk in outline.chunks}
    last = max(index.values())
    assert last == SECOND + 1, "capture two layers"
    before = [chunk for chunk in outline.chunks if index[chunk.name] < SECOND]
    layer = [chunk for chunk in outline.chunks if index[chunk.name] == SECOND]
    after = [chunk for chunk in outline.chunks if index[chunk.name] > SECOND]
    own = {name for chunk in layer for name in (*chunk.params, *chunk.buffers)}
    taken = {tag for chunk in layer for tag in chunk.tags}
    per_layer = {tag: sum(one[0] == tag for one in taken) for tag, _ in taken}
    copier = Copier(outline, index, own, per_layer)
    chunks = [*before, *layer]
    for shift in range(1, layers - 1):
        chunks += [copier.copied(chunk, shift) for chunk in layer]
    chunks += [copier.copied(chunk, layers - 2) for chunk in after]
    held = [p for p in outline.parameters if p.name in own]
    parameters = [*outline.parameters]
    for shift in range(1, layers - 1):
        parameters += [replace(p, name=copier.parameter(p.name, shift)) for p in held]
    moved = {
        copier.tags(tags, layers - 2): n for tags, n in outline.degrees.items() if dict(tags)[TAG] == last
    }
    degrees = {tags: n for tags, n in outline.degrees.items() if dict(tags)[TAG] != last}
    for tags, n in outline.degrees.items():
        if dict(tags)[TAG] == SECOND:
            degrees |= {copier.tags(tags, shift): n for shift in range(1, layers - 1)}
    return replace(
        outline,
        chunks=tuple(chunks),
        loss=copier.output(outline.loss, layers - 2),
        weight=copier.maybe(outline.weight, layers - 2),
        metrics=copier.maybe(outline.metrics, layers - 2),
        parameters=tuple(parameters),
        degrees={**degrees, **moved},
    )


class Copier:
    """Copies chunks of a layer to later layers."""

    def __init__(
        self, outline: CapturedModel, index: dict[str, int], own: set[str], per_layer: dict[str, int]
    ) -> None:
        self.index, self.own = index, own
        self.per_layer = per_layer  # by tag: how many numbers a layer takes
        self.by_name = {chunk.name: chunk for chunk in outline.chunks}

    def tags(self, tags: Tags, shift: int) -> Tags:
        """Return the tags of a copy: collectives and experts are numbered through the model."""
        return tuple((tag, number + shift * self.per_layer.get(tag, 1)) for tag, number in tags)

    def name(self, name: str, shift: int) -> str:
        """Return the name of a copy: its region, and what follows it in the name."""
        tags = self.by_name[name].tags
        return region_name(self.tags(tags, shift)) + name.removeprefix(region_name(tags))

    def parameter(self, name: str, shift: int) -> str:
        """Return the name of a copy's parameter."""
        return f"{name}+{shift}" if shift and name in self.own else name

    def output(self, source: Output, shift: int) -> Output:
        """Return the output that a copy reads: of its own layer, or of the one before."""
        if self.index[source.chunk] == 0:
            return source
        return replace(source, chunk=self.name(source.chunk, shift))

    def maybe(self, source: Output | None, shift: int) -> Output | None:
        """Return a result of the step in the copy, if there is such a result."""
        return None if source is None else self.output(source, shift)

    def source(self, source: Source, shift: int) -> Source:
        return self.output(source, shift) if isinstance(source, Output) else source

    def phase(self, spec: PhaseSpec, shift: int) -> PhaseSpec:
        return replace(
            spec,
            params=tuple(self.parameter(name, shift) for name in spec.params),
            grad_params=tuple(self.parameter(name, shift) for name in spec.grad_params),
            in_place=tuple(self.parameter(name, shift) for name in spec.in_place),
        )

    def copied(self, chunk: Chunk, shift: int) -> Chunk:
        """Return a chunk of a layer so many layers later."""
        return replace(
            chunk,
            name=self.name(chunk.name, shift),
            tags=self.tags(chunk.tags, shift),
            inputs=tuple(self.source(source, shift) for source in chunk.inputs),
            params=tuple(self.parameter(name, shift) for name in chunk.params),
            phases={phase: self.phase(spec, shift) for phase, spec in chunk.phases.items()},
        )
