"""The property after each rewrite holds, and can fail: a rewrite that broke it would be found."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from piper.directives import apply, average, offload, protect, remat, replicate, split
from piper.ir.graph import Graph, start
from piper.ir.ids import SlotId
from piper.ir.node import Compute, Node
from piper.ir.select import at
from piper.lower.buckets import make_buckets
from piper.lower.lower import LOWERING, first_state
from piper.lower.state import LoweringState, Property, Settings
from piper.plan.bucket import Bucket
from piper.schedules import gpipe
from tests.lower.outlines import fitted, skips

Break = Callable[[LoweringState], LoweringState]


def stages() -> dict[str, tuple[LoweringState, Property]]:
    """The work after each rewrite, with the property that it must have."""
    strategy = [replicate(at(PP=i), [2 * i, 2 * i + 1], zero=3) for i in range(3)]
    more = [remat(at(PP=0), 1, across="PP"), protect(at()), offload(at(PP=1), least_mb=0)]
    more.append(offload(at(PP=0), what="optimizer"))
    graph = apply(start(skips()), [*strategy, split(at(), parts=4), *more, *gpipe(3, 4)])
    return rewritten(graph)


def rewritten(graph: Graph) -> dict[str, tuple[LoweringState, Property]]:
    """The work after each rewrite, with the property that then holds."""
    graph = replace(graph, outline=fitted(graph))
    work = first_state(graph, Settings(), make_buckets(graph))
    found = {}
    for rewrite, holds in LOWERING:
        work = rewrite(work)
        found[rewrite.__name__] = (work, holds)
    return found


def apart() -> dict[str, tuple[LoweringState, Property]]:
    """The work after the rewrites of groups that train apart."""
    graph = apply(start(skips()), [replicate(at(), [0, 1, 2, 3], zero=1), average(at(), across=[0, 2])])
    return rewritten(graph)


def unplaced(work: LoweringState) -> LoweringState:
    node = work.graph.nodes["B[PP=1 MB=0]"]
    return replace(work, graph=work.graph.update([replace(node, devices=())]))


def idle(work: LoweringState) -> LoweringState:
    chunks = tuple(replace(chunk, phases={"F": chunk.phases["F"]}) for chunk in work.graph.outline.chunks)
    return replace(work, graph=replace(work.graph, outline=replace(work.graph.outline, chunks=chunks)))


def bucketless(work: LoweringState) -> LoweringState:
    return replace(work, chunk_buckets={**work.chunk_buckets, "PP=0": ()})


def untransferred(work: LoweringState) -> LoweringState:
    gone = [node for node in work.nodes if not node.name.startswith("transfer[PP=0.out0[MB=0]")]
    return replace(work, nodes=tuple(gone))


def written_twice(work: LoweringState) -> LoweringState:
    return replace(work, nodes=(*work.nodes, work.nodes[0]))


def dangling(work: LoweringState) -> LoweringState:
    return replace(work, temporal=(("F[PP=0 MB=0]", "nowhere", 0),))


def reversed_line(work: LoweringState) -> LoweringState:
    return replace(work, sequence=work.sequence[::-1])


def out_of_order(work: LoweringState) -> LoweringState:
    return replace(work, temporal=(("B[PP=0 MB=0]", "F[PP=0 MB=0]", 0),))


def shortened(work: LoweringState) -> LoweringState:
    return replace(work, sequence=work.sequence[:-1])


def reading_first(name: str) -> Break:
    """Let a node read what its region's forwards gave when they ran first."""

    def stale(node: Node) -> Node:
        if node.name != name:
            return node
        first = {
            value: SlotId(value.kind, value.owner, value.position, part=value.part) for value in node.reads
        }
        return replace(node, reads=tuple(first[v] if v.again else v for v in node.reads))

    return lambda work: replace(work, sequence=tuple(map(stale, work.sequence)))


def kept_reading(work: LoweringState) -> LoweringState:
    """Let backwards read what was copied out."""

    def changed(node: Node) -> Node:
        stale = [
            SlotId("saved", "PP=1", part=value.part) if value.kind == "fetched" else value
            for value in node.reads
        ]
        return replace(node, reads=tuple(stale)) if isinstance(node, Compute) else node

    return replace(work, sequence=tuple(map(changed, work.sequence)))


def without(*ops: str) -> Break:
    """Leave out every node of some operations."""
    return lambda work: replace(work, sequence=tuple(node for node in work.sequence if node.op not in ops))


def reading(node: Compute, bucket: Bucket) -> Compute:
    return replace(node, reads=(*node.reads, SlotId("param", bucket.name)))


def ungathered(work: LoweringState) -> LoweringState:
    bucket = next(bucket for bucket in work.buckets.values() if bucket.zero == 3)
    sequence = tuple(reading(node, bucket) if isinstance(node, Compute) else node for node in work.sequence)
    return replace(work, sequence=sequence)


@pytest.mark.parametrize(
    ("rewrite", "breaks", "said"),
    [
        ("drop_idle_nodes", unplaced, "B[PP=1 MB=0] is not placed"),
        ("drop_idle_nodes", idle, "B[PP=0 MB=0] has nothing to do"),
        ("hold_buckets", bucketless, "PP=0 finds a in 0 of its buckets"),
        ("bind_values", untransferred, "F[PP=1 MB=0] on 2,3 reads PP=0.out0@2,3[MB=0], written on None"),
        ("bind_values", written_twice, "PP=0.out0[MB=0] is written twice"),
        ("add_orders", dangling, "F[PP=0 MB=0] ..> nowhere leads nowhere"),
        ("schedule", reversed_line, "B[PP=0 MB=1] stands before"),
        ("schedule", out_of_order, "B[PP=0 MB=0] stands after F[PP=0 MB=0]"),
        ("schedule", shortened, "in line"),
        (
            "add_reruns",
            reading_first("B[PP=0 MB=1]"),
            "B[PP=0 MB=1] reads PP=0.saved[MB=1] of F[PP=0 MB=1]",
        ),
        (
            "add_reruns",
            reading_first("R[PP=0 #1 MB=0]"),
            "R[PP=0 #1 MB=0] reads PP=0.out0[MB=0] of F[PP=0 MB=0]",
        ),
        ("add_gathers", ungathered, "reads the shard"),
        ("add_reductions", without("all_reduce", "reduce_scatter"), "has no gradient to apply"),
        ("add_reductions", without("all_reduce", "reduce_scatter"), "is lost"),
        ("add_tied_sums", without("all_reduce", "reduce_scatter"), "is not summed with"),
        ("add_losses", without("accumulate"), "loss is never added up"),
        ("add_loads", without("load"), "before it is loaded"),
        ("add_offloads", without("fetch"), "PP=1.saved.host[MB=0] of offload["),
        ("add_offloads", kept_reading, "B[PP=1 MB=0] reads PP=1.saved[MB=0], which offload["),
        ("add_updates", without("update"), "is applied on [], not on"),
        (
            "add_state_offloads",
            without("offload"),
            "PP=0/0.state is on the host, and copied or updated only by",
        ),
        (
            "add_protections",
            without("protect"),
            "update[PP=0/0 @0,1] writes PP=0/0.param, which is not copied before",
        ),
    ],
)
def test_a_property_can_fail(rewrite: str, breaks: Break, said: str) -> None:
    work, holds = stages()[rewrite]
    assert list(holds(work)) == []
    assert any(said in problem for problem in holds(breaks(work))), list(holds(breaks(work)))[:3]


def planless(work: LoweringState) -> LoweringState:
    assert work.plans is not None
    return replace(work, plans=replace(work.plans, plans=work.plans.plans[1:]))


@pytest.mark.parametrize(
    ("rewrite", "breaks", "said"),
    [
        (
            "add_averages",
            without("average"),
            "update[@0,1] updates PP=0/0.param, which is not averaged after it",
        ),
        ("emit", planless, "there are plans for [], and nodes on (0, 1)"),
    ],
)
def test_a_property_of_groups_apart_can_fail(rewrite: str, breaks: Break, said: str) -> None:
    work, holds = apart()[rewrite]
    assert list(holds(work)) == []
    assert any(said in problem for problem in holds(breaks(work))), list(holds(breaks(work)))[:3]


def test_every_rewrite_has_a_property_here() -> None:
    assert len(LOWERING) == len(stages()) == 18
