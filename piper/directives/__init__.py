"""The directives: what a user can ask of the graph."""

from collections.abc import Sequence
from dataclasses import replace

from piper.directives.average import average, first_group
from piper.directives.base import Directive, naming
from piper.directives.offload import offload
from piper.directives.order import Order as Order
from piper.directives.order import order
from piper.directives.place import Place as Place
from piper.directives.place import place
from piper.directives.policies import with_common_policies
from piper.directives.precision import precision
from piper.directives.protect import protect
from piper.directives.remat import Remat as Remat
from piper.directives.remat import remat
from piper.directives.replicate import Replicate as Replicate
from piper.directives.replicate import replicate
from piper.directives.shard import Shard as Shard
from piper.directives.shard import ShardAxis as ShardAxis
from piper.directives.shard import shard
from piper.directives.split import Split as Split
from piper.directives.split import split
from piper.errors import ScheduleError
from piper.ir.graph import AppliedDirective, Graph

__all__ = [
    "Directive",
    "average",
    "offload",
    "order",
    "place",
    "precision",
    "protect",
    "remat",
    "replicate",
    "shard",
    "split",
]  # as `piper` has them


def apply(graph: Graph, strategy: Sequence[Directive], *, orders: bool = True) -> Graph:
    """Return the graph after every directive of a strategy.

    orders: False leaves out `order`, which may select collectives that are not in the graph yet.
    """
    for number, directive in enumerate(strategy):
        if not isinstance(directive, Directive):
            raise ScheduleError(
                f"{type(directive).__name__} is not a directive",
                by=f"strategy[{number}]",
                hint="a strategy is a flat list of directives: add a schedule with +, not inside the list",
            )
        title = directive.title(number)
        with naming(title):
            directive.check_arguments()
            if orders or not isinstance(directive, Order):
                graph = directive.apply(graph, number)
        asked = AppliedDirective(verb=directive.verb, title=title, places=directive.places)
        graph = replace(graph, directives=(*graph.directives, asked))
    graph = with_common_policies(graph)
    averages = [each.title for each in graph.directives if each.verb == "average"]
    with naming("".join(averages[-1:])):
        return first_group(graph)
