"""The captured graph of one forward and loss, with the facts about its nodes.

Some nodes become chunks without code: the ends of expert regions, and collectives. A collective stands in the
graph as a call of one function here, so the function runs on fakes alone: it gives the shape, and whether
autograd needs a gradient. A `Collective` says what the group does, forward and backward.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, fx, nn

from piper.capture.trace.annotate import PREFIX, Mark, Region
from piper.capture.trace.effects import writes
from piper.capture.trace.graph_walks import upstream
from piper.errors import CaptureError
from piper.ir.chunk import AxisPosition, Batch, Collective, Constant, Tags


@dataclass(frozen=True, slots=True, kw_only=True)
class FromParameter:
    """A graph input that is a parameter of the model."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FromBuffer:
    """A graph input that is a buffer of the model."""

    name: str


OWN_ROWS = "axes of own rows"  # of a route's meta: axes along which each device routes rows of its own
# By name: the operations live outside this package
_ROUTING: Mapping[str, Literal["route", "unroute"]] = {"piper.route": "route", "piper.unroute": "unroute"}
Origin = Batch | Constant | AxisPosition | FromParameter | FromBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The mode an operation runs in: whether autograd records it, and inside which autocasts."""

    grad: bool = True
    autocast: tuple[tuple[fx.node.Argument, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The captured graph. Calls that only change a mode are left out; `modes` has their effect."""

    graph: fx.Graph
    root: nn.Module  # holds the graph's attributes
    origins: Mapping[fx.Node, Origin]  # of each placeholder
    results: tuple[fx.Node, ...]  # the loss, or its sum and its weight; then all metrics in one tensor
    tags: Mapping[fx.Node, Tags]
    modes: Mapping[fx.Node, Mode]
    bundles: Mapping[fx.Node, int]  # nodes that must stay together, by the number of their bundle
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()  # all that were listed or entered, also those without operations
    weighted: bool = False  # the loss is a sum with a weight
    metrics: tuple[str, ...] = ()  # the names of the metrics
    checkpoints: tuple[str, ...] = ()  # the line of each call of `torch.utils.checkpoint`
    in_aten: dict[Hashable, "Recording"] = field(init=False, default_factory=dict, repr=False)  # by `as_aten`

    @property
    def places(self) -> Mapping[tuple[str, int], str]:
        """Return the line or modules of each region, by its tag and index."""
        by_index: dict[tuple[str, int], str] = {}
        for tag in {region.tag for region in self.regions}:
            places = {region.mark: region.where for region in self.regions if region.tag == tag}
            by_index |= {(tag, index): places[mark] for index, mark in enumerate(sorted(places))}
        return by_index

    def unheeded(self) -> tuple[str, ...]:
        """Return a warning if the model asks to recompute activations, which only a strategy can ask for."""
        if not self.checkpoints:
            return ()
        return (
            f"the model asks to recompute activations with torch.utils.checkpoint ({self.checkpoints[0]}, "
            f"{len(self.checkpoints)} times). Here the strategy says what is recomputed: add "
            "piper.remat(piper.at(), budget=0)",
        )


def number_regions(
    marks: Mapping[fx.Node, Mapping[str, Mark]], regions: Iterable[Region] = ()
) -> dict[fx.Node, Tags]:
    """Return each node's annotations, outermost first. Regions of a tag count from 0 in the order made."""
    # A region without operations counts too, so that indices agree with the user's count.
    seen: dict[str, set[Mark]] = {}
    for region in regions:
        seen.setdefault(PREFIX + region.tag, set()).add(region.mark)
    for custom in marks.values():
        for key, mark in custom.items():
            if key.startswith(PREFIX):
                seen.setdefault(key, set()).add(mark)
    indices = {
        key: {mark: index for index, mark in enumerate(sorted(marked))} for key, marked in seen.items()
    }
    for tag in (key.removeprefix(PREFIX) for key in seen):
        if not tag.isidentifier() or tag == "PASS":
            raise CaptureError(
                f"{tag!r} cannot name a region",
                by="annotate",
                hint="a tag is a word that at() can take as a keyword, and not PASS: PP, EP, stage",
            )
    return {
        node: tuple(
            (key.removeprefix(PREFIX), indices[key][mark]) for key, mark in custom.items() if key in indices
        )
        for node, custom in marks.items()
    }


def live(graph: fx.Graph, results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the results, or writes in place, depend on."""
    return upstream([*results, *(node for node in graph.nodes if writes(node) or node.op == "output")])


def collective(value: Tensor, how: Collective) -> Tensor:
    """Stand for a collective: return a new value of the shape that it gives."""
    shape = list(value.shape)
    if how.joined is not None:
        shape[how.joined.dim] *= how.degree
    if how.cut is not None:
        shape[how.cut.dim] //= how.degree
    result = value.new_empty(shape)
    return result.requires_grad_(value.requires_grad and how.op != "max")


def is_collective(node: fx.Node) -> bool:
    """Return whether a node of the captured graph is a collective."""
    return node.op == "call_function" and node.target is collective


def how_of(node: fx.Node) -> Collective:
    """Return what a collective does."""
    how = node.args[1]
    assert isinstance(how, Collective)
    return how


def marker(node: fx.Node) -> Literal["route", "unroute", "collective"] | None:
    """Return what a node that becomes a chunk of its own is: an end of an expert region, or a collective."""
    if is_collective(node):
        return "collective"
    return _ROUTING.get(str(node.target).removesuffix(".default")) if node.op == "call_function" else None
