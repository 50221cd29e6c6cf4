"""Chooses where experts are computed, by the clock of the simulator and the rows that were counted.

A plan's costs assume that rows are spread evenly. Here the chunks of experts take as long as on the busiest
device of a group, since the others wait for its rows, and so do the exchanges of rows. Clones take the time
to send their parameters and gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper.ir.chunk import CapturedModel, Chunk, Output, Phase
from piper.plan.bucket import Bucket
from piper.plan.expert_table import ExpertTable, balanced_tables, first_table, fits
from piper.plan.instr import Instr
from piper.plan.ops import OfBucket, Routing
from piper.plan.plan import Plans
from piper.simulate.costs import Costs
from piper.simulate.simulate import simulate

MOST_TRIES = 12  # numbers of clones that are simulated


class RoutedCosts:
    """Costs in which chunks of experts take several times as long."""

    def __init__(self, costs: Costs, factors: Mapping[str, float]) -> None:
        self.costs, self.factors = costs, factors
        self.cores, self.node, self.period, self.wake = costs.cores, costs.node, costs.period, costs.wake
        self.touch, self.talk = costs.touch, costs.talk

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """Return the cost of a phase; of experts on the device with the most rows."""
        factor = 1.0 if chunk is None else self.factors.get(chunk.name, 1.0)
        return factor * self.costs.compute(chunk, phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedStep:
    """A simulated step with experts where tables say, and with the rows of each expert that were counted."""

    tables: Mapping[str, ExpertTable]
    seconds: float


def routed_step(
    plans: Plans,
    outline: CapturedModel,
    costs: Costs,
    rows: Mapping[str, Sequence[int]],
    tables: Mapping[str, ExpertTable],
) -> RoutedStep:
    """Simulate a step. rows: of each expert, by regions with clones; tables: by these regions."""
    factors = {region: tables[region].skew(rows[region]) for region in tables}
    experts = (chunk for chunk in outline.chunks if chunk.name in tables)
    routes = {source.chunk: chunk.name for chunk in experts for source in chunk.sources}
    routes |= {chunk.name: routes[route] for chunk in outline.chunks if (route := unrouted(chunk)) in routes}

    def changed(ins: Instr) -> Instr:
        match ins.payload:
            case Routing(run=run) if ins.op == "exchange" and run.chunk in routes:
                return replace(ins, nbytes=int(ins.nbytes * factors[routes[run.chunk]]))
            case OfBucket(bucket=name) if (bucket := plans.buckets[name]).clones and moves_clones(
                ins, bucket
            ):
                table = tables[bucket.chunks[0]]
                return replace(ins, nbytes=ins.nbytes * table.moved // bucket.clones)
        return ins

    step = simulate(plans.with_instrs(changed), outline, RoutedCosts(costs, factors)).step
    return RoutedStep(tables=tables, seconds=step)


def unrouted(chunk: Chunk) -> str:
    """Return the route whose rows an unroute sends back. Empty: the chunk is none."""
    source = chunk.inputs[1] if chunk.kind == "unroute" else None
    return source.chunk if isinstance(source, Output) else ""


def moves_clones(ins: Instr, bucket: Bucket) -> bool:
    """Return whether an instruction sends clones of a bucket, or their gradients back."""
    first = bucket.reductions[0]
    return (ins.op == "gather" and ins.writes != ins.reads) or (
        ins.op == "reduce_scatter" and ins.writes[0] == bucket.gradient(first.gets)
    )


def best_tables(
    plans: Plans, outline: CapturedModel, costs: Costs, rows: Mapping[str, Sequence[int]]
) -> RoutedStep:
    """Return where the experts of all regions are best computed, with as many clones as it takes."""
    lists = {
        region: list(balanced_tables(rows[region], bucket.table_sizes[0], bucket.clones))
        for region, bucket in plans.cloned.items()
    }
    most = max(map(len, lists.values()))
    tries = sorted({round(i * (most - 1) / max(1, MOST_TRIES - 1)) for i in range(MOST_TRIES)})
    steps = [
        routed_step(
            plans, outline, costs, rows, {r: tables[min(n, len(tables) - 1)] for r, tables in lists.items()}
        )
        for n in tries
    ]
    return min(steps, key=lambda step: step.seconds)


def present_step(
    plans: Plans,
    outline: CapturedModel,
    costs: Costs,
    rows: Mapping[str, Sequence[int]],
    tables: Mapping[str, ExpertTable],
) -> RoutedStep:
    """Simulate a step with the tables that a run has: the first ones, where it has moved nothing."""
    present = {
        region: table
        if (table := tables.get(region)) is not None and fits(table, *bucket.table_sizes)
        else first_table(*bucket.table_sizes)
        for region, bucket in plans.cloned.items()
    }
    return routed_step(plans, outline, costs, rows, present)
