"""The overlapped groups that a strategy's orders ask for, such as the pairs of DualPipe-V."""

from collections.abc import Iterator, Mapping, Sequence

from piper.ir.graph import Graph
from piper.ir.ids import Pass
from piper.ir.node import compute_name


def overlapped(graph: Graph) -> list[tuple[str, ...]]:
    """Return, for each overlapped group of several passes, the names of the nodes that start them.

    A forward or backward in several chunks, as around experts, is one pass, named by its first chunk.
    """
    before = sources(graph)
    stage = {chunk.name: chunk.tags[:1] for chunk in graph.outline.chunks}
    found = []
    for ordering in graph.orderings:
        for group in ordering.groups:
            passes: dict[object, str] = {}
            for step in starts(group, before):
                name = compute_name(step.chunk, step.phase, step.part)
                passes.setdefault((stage[step.chunk], step.phase, step.part), name)
            if len(passes) > 1:
                found.append(tuple(passes.values()))
    return found


def starts(group: Sequence[Pass], before: Mapping[str, set[str]]) -> Iterator[Pass]:
    """Yield the members of a group that read no result of another member."""
    members = {(step.chunk, step.phase, step.part) for step in group}
    for step in group:
        if step.phase == "F":
            needed = [(chunk, "F") for chunk in before[step.chunk]]
        else:
            later = [chunk for chunk, others in before.items() if step.chunk in others]
            needed = [(chunk, phase) for chunk in later for phase in ("B", "BI")]
            needed += [(step.chunk, "BI")] if step.phase == "BW" else []
        if not any((chunk, phase, step.part) in members for chunk, phase in needed):
            yield step


def sources(graph: Graph) -> dict[str, set[str]]:
    """Return, for each chunk, the chunks whose results it reads."""
    return {chunk.name: {source.chunk for source in chunk.sources} for chunk in graph.outline.chunks}
