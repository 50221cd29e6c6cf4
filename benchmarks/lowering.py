"""Lowers graphs without the proofs of plans, which take longer than all rewrites together."""

from piper.ir.graph import Graph
from piper.lower.buckets import make_buckets
from piper.lower.lower import LOWERING, first_state, lower
from piper.lower.state import Settings
from piper.lower.validate import validate
from piper.plan.plan import Plans
from piper.process.gc_pause import no_collection


def lowered(graph: Graph, samples: int, *, prove: bool = False) -> Plans:
    """Lower a graph to plans, and prove them where that is asked for."""
    graph, settings = validate(graph, samples), Settings(state_bytes=8)
    if prove:
        return lower(graph, settings)[0]
    state = first_state(graph, settings, make_buckets(graph))
    with no_collection():
        for rewrite, _ in LOWERING:
            state = rewrite(state)
    assert state.plans is not None
    return state.plans
