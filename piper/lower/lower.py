"""The compiler from a directed graph to proven plans. `LOWERING` lists its rewrites in order."""

from piper.ir.graph import Graph
from piper.lower.averages import add_averages, repeat_in_groups
from piper.lower.buckets import ProgramBuckets, every_parameter_has_a_bucket, hold_buckets, make_buckets
from piper.lower.emit import emit
from piper.lower.flow import bind_values, no_value_crosses_devices
from piper.lower.gathers import add_gathers
from piper.lower.offloads import add_offloads, add_state_offloads, offloaded_values_come_back
from piper.lower.orders import add_orders, edges_join_nodes_that_exist
from piper.lower.protections import add_protections
from piper.lower.reductions import add_reductions, add_tied_sums
from piper.lower.reruns import add_reruns, backwards_read_what_ran_last
from piper.lower.schedule import schedule, sequence_respects_every_edge
from piper.lower.state import LoweringState, Property, Rewrite, Settings
from piper.lower.step_end import add_loads, add_losses, add_updates
from piper.lower.validate import drop_idle_nodes, every_node_has_a_place_and_a_phase
from piper.plan.plan import Plans
from piper.plan.prove import ProofError, prove
from piper.process.gc_pause import no_collection
from piper.proof.values import prove_values

# Each rewrite with the property that holds after it. None: the proof of the plans shows, as exactly, what it
# left undone.
LOWERING: tuple[tuple[Rewrite, Property | None], ...] = (
    (drop_idle_nodes, every_node_has_a_place_and_a_phase),
    (hold_buckets, every_parameter_has_a_bucket),
    (bind_values, no_value_crosses_devices),
    (add_orders, edges_join_nodes_that_exist),
    (schedule, sequence_respects_every_edge),
    (add_reruns, backwards_read_what_ran_last),
    (add_gathers, None),
    (add_reductions, None),
    (add_tied_sums, None),
    (add_losses, None),
    (add_loads, None),
    (add_offloads, offloaded_values_come_back),
    (add_updates, None),
    (add_state_offloads, None),
    (add_averages, None),
    (add_protections, None),
    (emit, None),
    (repeat_in_groups, None),
)


def first_state(graph: Graph, settings: Settings, buckets: ProgramBuckets) -> LoweringState:
    """Return the state before the first rewrite."""
    return LoweringState(
        graph=graph, settings=settings, buckets=buckets.read, held_buckets=buckets.held, why=buckets.why
    )


def lower(
    graph: Graph, settings: Settings | None = None, buckets: ProgramBuckets | None = None
) -> tuple[Plans, LoweringState]:
    """Lower a validated graph, whose chunks have all their phases, to plans, and prove them.

    Each rewrite's property is checked right after it, and the plans of all devices are proven together: first
    their order, then the values they compute. A failure is our bug, and raises ProofError.
    buckets: None: those that `make_buckets` makes.
    """
    state = first_state(graph, settings or Settings(), buckets or make_buckets(graph))
    with no_collection():
        for rewrite, holds in LOWERING:
            state = rewrite(state)
            if holds is not None and (broken := next(holds(state), None)) is not None:
                raise ProofError(f"{rewrite.__name__} broke {holds.__name__}: {broken}")
        assert state.plans is not None
        prove(state.plans)
        prove_values(state.plans, state.graph, clip=state.settings.clip, whole=state.settings.whole)
    return state.plans, state
