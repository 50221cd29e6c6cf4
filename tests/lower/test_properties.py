"""A rewrite that leaves out its work is found: by its property, or by the proof of the plans."""

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
from piper.lower.state import LoweringState, Settings
from piper.plan.bucket import Bucket
from piper.plan.prove import problems_of
from piper.proof.values import value_problems
from piper.schedules import gpipe
from tests.lower.outlines import fitted, skips

Break = Callable[[LoweringState], LoweringState]


def together() -> Graph:
    """Return a graph with most directives on it."""
    strategy = [replicate(at(PP=i), [2 * i, 2 * i + 1], zero=3) for i in range(3)]
    more = [remat(at(PP=0), 1, across="PP"), protect(at()), offload(at(PP=1), least_mb=0)]
    more.append(offload(at(PP=0), what="optimizer"))
    return apply(start(skips()), [*strategy, split(at(), parts=4), *more, *gpipe(3, 4)])


def apart() -> Graph:
    """Return a graph of groups that train apart."""
    return apply(start(skips()), [replicate(at(), [0, 1, 2, 3], zero=1), average(at(), across=[0, 2])])


def rewritten(graph: Graph, broken: str = "", breaks: Break = lambda work: work) -> dict[str, LoweringState]:
    """Return the work after each rewrite. breaks: changes it after the one that is broken."""
    graph = replace(graph, outline=fitted(graph))
    work = first_state(graph, Settings(), make_buckets(graph))
    found = {}
    for rewrite, _ in LOWERING:
        work = rewrite(work)
        if rewrite.__name__ == broken:
            work = breaks(work)
        found[rewrite.__name__] = work
    return found


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


def unaveraged(work: LoweringState) -> LoweringState:
    """Leave out the average of one bucket."""
    gone = [node for node in work.sequence if not node.name.startswith("average[PP=0/0")]
    return replace(work, sequence=tuple(gone))


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
        ("add_offloads", without("fetch"), "PP=1.saved.host[MB=0] of offload["),
        ("add_offloads", kept_reading, "B[PP=1 MB=0] reads PP=1.saved[MB=0], which offload["),
    ],
)
def test_a_property_can_fail(rewrite: str, breaks: Break, said: str) -> None:
    work = rewritten(together())[rewrite]
    holds = next(holds for each, holds in LOWERING if each.__name__ == rewrite)
    assert holds is not None
    assert list(holds(work)) == []
    assert any(said in problem for problem in holds(breaks(work))), list(holds(breaks(work)))[:3]


def planless(work: LoweringState) -> LoweringState:
    assert work.plans is not None
    return replace(work, plans=replace(work.plans, plans=work.plans.plans[1:]))


def state_stays(work: LoweringState) -> LoweringState:
    """Leave out the copy of a bucket's state back to the host."""
    gone = [node for node in work.sequence if not node.name.startswith("offload[PP=0/0.state")]
    return replace(work, sequence=tuple(gone))


@pytest.mark.parametrize(
    ("graph", "rewrite", "breaks", "said"),
    [
        (together, "add_gathers", ungathered, "F[PP=0 MB=0] reads 5 slots; it should read 4"),
        (together, "add_reductions", without("reduce_scatter"), "norm[@4,5] leaves out PP=2/0"),
        (together, "add_tied_sums", without("all_reduce"), "norm[@4,5] leaves out tied@PP=2"),
        (together, "add_losses", without("accumulate"), "norm[@4,5] leaves out loss"),
        (together, "add_loads", without("load"), "reads batch.x@0,1[MB=0], which nothing has written"),
        (
            together,
            "add_updates",
            without("update"),
            "PP=0/0.param on device 0 holds the old shard parameters of PP=0/0; it should hold the new shard",
        ),
        (
            together,
            "add_state_offloads",
            state_stays,
            "PP=0/0.state on device 0 holds outdated PP=0/0.state, on the host; it should hold new",
        ),
        (together, "add_protections", without("protect"), "no instruction copies all of PP=0/0.param before"),
        (apart, "add_averages", unaveraged, "PP=0/0 is not averaged with other groups"),
        (apart, "emit", planless, "the groups have devices [0, 1, 2, 3], the plans "),
    ],
)
def test_the_proof_finds_what_a_rewrite_without_a_property_leaves_out(
    graph: Callable[[], Graph], rewrite: str, breaks: Break, said: str
) -> None:
    """What is broken after a rewrite stays so, through the rewrites that follow, until the plans are proven."""
    for broken in (False, True):
        work = rewritten(graph(), rewrite if broken else "", breaks)["repeat_in_groups"]
        assert work.plans is not None
        problems = [*problems_of(work.plans), *value_problems(work.plans, work.graph)]
        assert bool(problems) == broken
    assert any(said in problem for problem in problems), problems[:3]


def test_every_rewrite_has_a_property_or_a_mistake_for_the_proof_here() -> None:
    marks = [
        mark
        for test in (
            test_a_property_can_fail,
            test_the_proof_finds_what_a_rewrite_without_a_property_leaves_out,
        )
        for mark in vars(test)["pytestmark"]
    ]
    tried = {entry[-3] for mark in marks for entry in mark.args[1]}
    assert tried == {rewrite.__name__ for rewrite, _ in LOWERING} - {"repeat_in_groups"}
