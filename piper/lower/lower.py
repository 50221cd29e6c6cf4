"""The compiler from a directed graph to proven plans. `LOWERING` lists its rewrites in order."""

from piper.ir.graph import Graph
from piper.lower.averages import add_averages, every_update_is_averaged, repeat_in_groups
from piper.lower.buckets import ProgramBuckets, every_parameter_has_a_bucket, hold_buckets, make_buckets
from piper.lower.emit import emit, every_device_has_a_plan, plans_can_run
from piper.lower.flow import bind_values, no_value_crosses_devices
from piper.lower.gathers import add_gathers, sharded_parameters_are_gathered
from piper.lower.offloads import (
    add_offloads,
    add_state_offloads,
    offloaded_state_comes_back,
    offloaded_values_come_back,
)
from piper.lower.orders import add_orders, edges_join_nodes_that_exist
from piper.lower.protections import add_protections, everything_written_is_copied
from piper.lower.reductions import (
    add_reductions,
    add_tied_sums,
    every_gradient_is_reduced,
    every_tied_copy_is_summed,
)
from piper.lower.reruns import add_reruns, backwards_read_what_ran_last
from piper.lower.schedule import schedule, sequence_respects_every_edge
from piper.lower.state import LoweringState, Property, Rewrite, Settings
from piper.lower.step_end import (
    add_loads,
    add_losses,
    add_updates,
    every_field_is_loaded,
    every_gradient_is_applied,
    every_sum_is_added_up,
)
from piper.lower.validate import drop_idle_nodes, every_node_has_a_place_and_a_phase
from piper.plan.plan import Plans
from piper.plan.prove import ProofError
from piper.process.gc_pause import no_collection

LOWERING: tuple[tuple[Rewrite, Property], ...] = (
    (drop_idle_nodes, every_node_has_a_place_and_a_phase),
    (hold_buckets, every_parameter_has_a_bucket),
    (bind_values, no_value_crosses_devices),
    (add_orders, edges_join_nodes_that_exist),
    (schedule, sequence_respects_every_edge),
    (add_reruns, backwards_read_what_ran_last),
    (add_gathers, sharded_parameters_are_gathered),
    (add_reductions, every_gradient_is_reduced),
    (add_tied_sums, every_tied_copy_is_summed),
    (add_losses, every_sum_is_added_up),
    (add_loads, every_field_is_loaded),
    (add_offloads, offloaded_values_come_back),
    (add_updates, every_gradient_is_applied),
    (add_state_offloads, offloaded_state_comes_back),
    (add_averages, every_update_is_averaged),
    (add_protections, everything_written_is_copied),
    (emit, every_device_has_a_plan),
    (repeat_in_groups, plans_can_run),
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

    Each rewrite's property is checked right after it: a failure is our bug, and raises ProofError.
    buckets: None: those that `make_buckets` makes.
    """
    state = first_state(graph, settings or Settings(), buckets or make_buckets(graph))
    with no_collection():
        for rewrite, holds in LOWERING:
            state = rewrite(state)
            broken = next(holds(state), None)
            if broken is not None:
                raise ProofError(f"{rewrite.__name__} broke {holds.__name__}: {broken}")
    assert state.plans is not None
    return state.plans, state
