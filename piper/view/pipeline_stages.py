"""Finds the stages of a pipeline whose stages are several regions, such as ranges of layers."""

from collections.abc import Iterable, Mapping

from piper.ir.graph import Ordering
from piper.ir.ids import Tags

Region = tuple[str, int] | None  # a chunk's outermost tag; None: it has none


def stage_tags(tags: Mapping[str, Tags], orderings: Iterable[Ordering]) -> Mapping[str, Tags]:
    """Return each chunk's tags, with its stage as the outermost where stages are several regions each.

    tags: of each chunk, in topological order. A stage is the regions whose forwards are in the same groups of
    all orders. Without orders, or where some region is in none, tags stay as they are.

    order([at(LAYER=[0, 1], MB=0, PASS="F"), ...]), order([at(LAYER=[2, 3], MB=0, PASS="F"), ...])
    -->
    LAYER=0 and LAYER=1 are stage 0, LAYER=2 and LAYER=3 are stage 1
    """
    groups: dict[Region, set[tuple[int, int, Tags]]] = {}
    for number, ordering in enumerate(orderings):
        for place, group in enumerate(ordering.groups):
            for step in group:
                if step.phase == "F" and step.chunk in tags:
                    groups.setdefault(_outermost(tags[step.chunk]), set()).add((number, place, step.part))
    regions = dict.fromkeys(_outermost(found) for found in tags.values())
    if not groups.keys() >= regions.keys():
        return tags
    stages: dict[frozenset[tuple[int, int, Tags]], int] = {}
    numbers = {region: stages.setdefault(frozenset(groups[region]), len(stages)) for region in regions}
    if len(stages) == len(regions):
        return tags
    return {chunk: (("stage", numbers[_outermost(found)]), *found[1:]) for chunk, found in tags.items()}


def _outermost(tags: Tags) -> Region:
    return tags[0] if tags else None
