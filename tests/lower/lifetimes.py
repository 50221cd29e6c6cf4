"""How long plans hold what ZeRO shards and what runs again, how often they reduce, and what they run."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from piper.ir.graph import Graph
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans


def check_lifetimes(plans: Plans) -> None:
    """Assert that no whole gradient outlives its reduction, nor a gathered parameter its run of uses, unless kept.

    A reduction is issued behind one other compute, which it overlaps. Where microbatches run on several sets of
    devices, it may wait for one more, until the other sets have something to add.
    """
    for plan in plans:
        mine = [bucket for bucket in plans.buckets.values() if plan.devices[0] in bucket.devices]
        for bucket in mine:
            if bucket.keep:
                continue
            if bucket.zero >= 2:
                spread = any(plans.chunks[name].elsewhere for name in bucket.chunks)
                check_span(plan, bucket, slots_of(plan, bucket, "g", "grad"), others=2 if spread else 1)
            if bucket.zero == 3:
                check_span(plan, bucket, slots_of(plan, bucket, "whole"))
        reduced = Counter(ins.bucket for ins in plan.instrs if ins.op in ("all_reduce", "reduce_scatter"))
        for bucket in mine:
            trained = any(ins.op == "update" and f"{bucket.name}.param" in ins.writes for ins in plan.instrs)
            if trained and bucket.zero < 2 and not bucket.siblings:
                assert reduced[bucket.name] == int(bucket.group_size > 1), f"{bucket.name}: {reduced}"


def slots_of(plan: Plan, bucket: Bucket, *kinds: str) -> list[str]:
    """A bucket's slots of some kinds: `PP=0/0.whole[F[PP=0 MB=0]]`."""
    written = dict.fromkeys(slot for ins in plan.instrs for slot in ins.writes)
    names = [f"{bucket.name}.{kind}" for kind in kinds]
    starts = tuple(name + bracket for name in names for bracket in "[<")
    return [slot for slot in written if slot in names or slot.startswith(starts)]


def check_span(plan: Plan, bucket: Bucket, slots: list[str], others: int = 0) -> None:
    """Between its first use and its end, a slot sees nothing computed but its own chunks, and a few others."""
    for slot in slots:
        uses = [
            i
            for i, ins in enumerate(plan.instrs)
            if ins.op == "compute" and slot in (*ins.reads, *ins.writes)
        ]
        first = uses[0] if uses else next(i for i, ins in enumerate(plan.instrs) if slot in ins.writes)
        end = next(i for i, ins in enumerate(plan.instrs) if slot in ins.frees)
        foreign = [
            ins.node
            for ins in plan.instrs[first:end]
            if ins.op == "compute" and ins.computes.chunk not in bucket.chunks
        ]
        assert len(foreign) <= others, f"{slot} is still there when {foreign} run"


def check_reruns(plans: Plans, regions: Mapping[str, str]) -> None:
    """Assert that a region keeps nothing of its first run for its own backwards, and never sends rows twice.

    It runs again right before them. What is read outside it lives until then, and not longer.
    """
    for plan in plans:
        makers = {slot: ins for ins in plan.instrs for slot in ins.writes}
        firsts = {slot: region_of(ins, regions) for slot, ins in makers.items() if is_first(ins)}
        last: dict[str, int] = {}  # the last to read or write each slot
        for place, ins in enumerate(plan.instrs):
            last.update(dict.fromkeys((*ins.reads, *ins.writes), place))
            if ins.op == "compute" and not is_first(ins) and (region := region_of(ins, regions)):
                stale = [slot for slot in ins.reads if firsts.get(slot) == region]
                assert not stale, f"{ins.node} reads {stale} of the first run"
        for place, ins in enumerate(plan.instrs):
            late = [slot for slot in ins.frees if firsts.get(slot) and place > last[slot]]
            assert not late, f"{late} are kept until {ins.node}"
        for ins, then in pairwise(ins for ins in plan.instrs if ins.op == "compute"):
            if ins.again:
                alike = (region_of(ins, regions), ins.part) == (region_of(then, regions), then.part)
                assert alike and not is_first(then), f"{ins.node} runs before {then.node}"
        travels = Counter(ins.node for ins in plan.instrs if ins.op == "exchange")
        assert set(travels.values()) <= {1}, f"{travels}"


def check_passes(plans: Plans, graph: Graph) -> None:
    """Assert that each pass of the graph runs once on its devices, and again only what others then read."""
    for plan in plans:
        ran = Counter(ins.computes for ins in plan.instrs if ins.op == "compute")
        assert set(ran.values()) <= {1}, f"{ran}"
        wanted = {node.run for node in graph.nodes.values() if plan.devices[0] in node.devices}
        once = {done for done in ran if not done.again}
        skipped = {done for done in wanted if graph.chunks[done.chunk].kind not in ("compute", "expert")}
        assert once == wanted - skipped, f"{once ^ (wanted - skipped)} on {plan.devices}"
        read = {slot for ins in plan.instrs for slot in ins.reads}
        for ins in plan.instrs:
            if ins.op == "compute" and ins.again:
                assert graph.options[ins.computes.chunk].rerun, f"{ins.node} should not run again"
                assert not read.isdisjoint(ins.writes), f"nothing reads what {ins.node} writes"


def is_first(ins: Instr) -> bool:
    """Whether it is a forward, not one that runs again."""
    return ins.op == "compute" and ins.computes.phase == "F" and not ins.again


def region_of(ins: Instr, regions: Mapping[str, str]) -> str | None:
    """The region that an instruction belongs to, if its forwards run again."""
    return regions.get(ins.computes.chunk)
