"""Lowers graphs that tests make: validated first, with an outline of their own if one is given."""

from dataclasses import replace

from piper.ir.chunk import CapturedModel
from piper.ir.graph import Graph
from piper.lower.lower import lower as lower_validated
from piper.lower.state import LoweringState, Settings
from piper.lower.validate import validate
from piper.plan.plan import Plans


def lower(
    graph: Graph,
    settings: Settings | None = None,
    outline: CapturedModel | None = None,
    samples: int | None = None,
) -> tuple[Plans, LoweringState]:
    """Lower a graph to plans and prove them. outline: with every phase; None: that of the graph.

    samples: in the global batch. None: any number that divides.
    """
    graph = validate(graph, samples)
    graph = graph if outline is None else replace(graph, outline=outline)
    return lower_validated(graph, settings)
