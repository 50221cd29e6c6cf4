"""The directives: what a user can ask of the graph."""

from collections.abc import Sequence
from dataclasses import replace

from piper.directives.base import Directive
from piper.directives.order import Order, order
from piper.directives.place import Place, place
from piper.directives.remat import Remat, remat
from piper.directives.replicate import Replicate, replicate
from piper.directives.shard import Shard, shard
from piper.directives.shard_axis import ShardAxis
from piper.directives.split import Split, split
from piper.errors import ScheduleError
from piper.ir.graph import Asked, Graph

__all__ = [
    "Directive",
    "Order",
    "Place",
    "Remat",
    "Replicate",
    "Shard",
    "ShardAxis",
    "Split",
    "apply",
    "order",
    "place",
    "remat",
    "replicate",
    "shard",
    "split",
]


def apply(graph: Graph, strategy: Sequence[Directive]) -> Graph:
    """Return the graph after every directive of a strategy, in order."""
    for number, directive in enumerate(strategy):
        if not isinstance(directive, Directive):
            raise ScheduleError(
                f"{type(directive).__name__} is not a directive",
                by=f"strategy[{number}]",
                hint="a strategy is a flat list of directives: add a schedule with +, not inside the list",
            )
        graph = directive.apply(graph, number)
        asked = Asked(verb=directive.verb, title=directive.title(number), places=directive.places)
        graph = replace(graph, directives=(*graph.directives, asked))
    return graph
