"""Gradients between backward and update: accumulated, reduced over replicas, summed over tied copies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper.ir.chunk import Chunk
from piper.ir.devices import Devices, columns
from piper.ir.ids import Pass, SlotId
from piper.ir.node import Accumulate, Compute, Node, Reduce
from piper.lower.sequence import UseRun, computes_by_set, meetings, runs, same_members, woven
from piper.lower.state import LoweringState
from piper.plan.plan import Bucket, Slot


@dataclass(slots=True)
class Weaving:
    """Nodes to insert into the sequence, and the values they need."""

    sequence: tuple[Node, ...]
    values: dict[SlotId, Slot] = field(default_factory=dict)
    chunks: Mapping[str, Chunk] = field(default_factory=dict)
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    behind: dict[int, list[tuple[int, Node]]] = field(default_factory=dict)
    renamed: dict[int, dict[SlotId, SlotId]] = field(default_factory=dict)  # by place: what it writes instead
    added: dict[int, list[SlotId]] = field(default_factory=dict)  # by place: sums that it adds to itself

    def put(self, place: int, node: Node, behind: int | None = None) -> None:
        """Insert a node after the place that writes what it reads, or later."""
        self.behind.setdefault(place if behind is None else behind, []).append((place, node))

    def rename(self, place: int, value: SlotId, slot: SlotId) -> None:
        """Make a node write a value into another slot."""
        self.renamed.setdefault(place, {})[value] = slot

    def add(self, place: int, value: SlotId, total: SlotId) -> None:
        """Make a node add a value to a total, which it reads for that."""
        self.rename(place, value, total)
        self.added.setdefault(place, []).append(total)

    def writes_flat(self, place: int, value: SlotId) -> bool:
        """Return whether compiled code writes a gradient as one flat tensor, and can add it to one."""
        node = self.sequence[place]
        if value.owner not in self.buckets or not isinstance(node, Compute):
            return False
        written = self.chunks[node.chunk].phases[node.phase].in_place
        return any(piece.name in written for piece in self.buckets[value.owner].pieces)

    def run(self, place: int) -> Pass:
        """Return the pass at a place."""
        node = self.sequence[place]
        assert isinstance(node, Compute), f"{node.name} gives no gradients"
        return node.run

    def woven(self) -> tuple[Node, ...]:
        """Return the sequence with all the nodes of this weaving inserted."""
        sequence = list(self.sequence)
        for place, names in self.renamed.items():
            node = sequence[place]
            reads = (*node.reads, *self.added.get(place, ()))
            sequence[place] = replace(node, reads=reads, writes=tuple(names.get(v, v) for v in node.writes))
        return woven(sequence, {}, self.after)

    @property
    def after(self) -> dict[int, list[Node]]:
        """Return the nodes to insert after each place, in the order they were created."""
        first_made = {place: sorted(nodes, key=lambda made: made[0]) for place, nodes in self.behind.items()}
        return {place: [node for _, node in nodes] for place, nodes in first_made.items()}


def add_reductions(work: LoweringState) -> LoweringState:
    """Accumulate each backward's gradients and reduce them: once a step (zero 0, 1) or after each run (2, 3).

    B[PP=0 MB=0]  B[PP=0 MB=1]
    -->
    B[PP=0 MB=0], accumulate, B[PP=0 MB=1], accumulate, reduce

    Compiled backwards that write gradients flat begin the sum and add to it themselves.
    """
    givers = gradient_givers(work)
    weaving = Weaving(
        sequence=work.sequence, values=dict(work.values), chunks=work.graph.chunks, buckets=work.buckets
    )
    sets = {work.sequence[place].devices for given in givers.values() for place in given}
    places = computes_by_set(work.sequence, sets)
    for bucket in work.buckets.values():
        given = givers.get(bucket.name, {})
        if not given:
            continue
        if bucket.zero >= 2:
            reduce_each_run(weaving, bucket, given, places)
        else:
            reduce_once(weaving, bucket, given)
    return replace(work, sequence=weaving.woven(), values=weaving.values)


def every_gradient_is_reduced(work: LoweringState) -> Iterator[str]:
    """Yield each trained bucket whose gradient is missing, or not summed over replicas, or partly lost."""
    read = {value for node in work.sequence for value in node.reads}
    written = {value for node in work.sequence for value in node.writes}
    reduced = {node.bucket for node in work.sequence if isinstance(node, Reduce)}
    gives = gradient_givers(work)
    for bucket in work.buckets.values():
        if bucket.name not in gives:
            continue
        if final_gradient(bucket) not in written:
            yield f"{bucket.name} has no gradient to apply"
        if bucket.group_size > 1 and bucket.name not in reduced:
            yield f"{bucket.name} is never reduced over its {bucket.group_size} replicas"
        for value in gives[bucket.name].values():
            if value not in read and value != final_gradient(bucket):
                yield f"the gradient {value} is lost"


def gradient_givers(work: LoweringState) -> dict[str, dict[int, SlotId]]:
    """Return, for each bucket, the places of the backwards that write its gradient, with their slots."""
    givers: dict[str, dict[int, SlotId]] = {}
    for place, node in enumerate(work.sequence):
        if isinstance(node, Compute) and node.phase in ("B", "BW"):
            for value in node.writes:
                if value.kind in ("gradient", "grad"):
                    givers.setdefault(value.owner, {})[place] = value
    return givers


def full_gradient(bucket: Bucket) -> SlotId:
    """Return the slot where a bucket's gradients are accumulated before any reduction."""
    return SlotId("grad", bucket.name)


def shard_gradient(bucket: Bucket) -> SlotId:
    """Return the slot of a device's shard of the reduced gradient."""
    return SlotId("grad_shard", bucket.name)


def final_gradient(bucket: Bucket) -> SlotId:
    """Return the slot of the gradient that the update reads."""
    return shard_gradient(bucket) if bucket.zero else full_gradient(bucket)


def accumulate(
    weaving: Weaving, place: int, value: SlotId, total: SlotId, begun: dict[Devices, bool]
) -> None:
    """Add one backward's gradients to a total, or begin it on the devices that have none yet.

    begun: the sets of devices that have begun it, and whether it is one flat tensor there.
    """
    source = weaving.sequence[place]
    if weaving.writes_flat(place, value):
        met = [flat for devices, flat in begun.items() if not set(devices).isdisjoint(source.devices)]
        have = {device for devices in begun for device in devices}
        if not met:
            begun[source.devices] = True
            weaving.rename(place, value, total)
            return
        if all(met) and have.issuperset(source.devices):
            weaving.add(place, value, total)
            return
    older: Devices = source.devices if source.devices in begun else ()
    fresh: Devices = () if older else source.devices
    if fresh:
        have = {device for devices in begun for device in devices}
        if not have.isdisjoint(fresh):
            older = tuple(device for device in fresh if device in have)
            fresh = tuple(device for device in fresh if device not in have)
        begun[source.devices] = True
    for devices, reads in ((fresh, (value,)), (older, (value, total))):
        if devices:
            weaving.put(
                place,
                Accumulate(
                    run=weaving.run(place),
                    devices=devices,
                    reads=reads,
                    writes=(total,),
                    some=bool(fresh and older),  # of sets that overlap: a tied parameter, or microbatches
                    origin=source.origin,
                ),
            )


def reduce_node(
    weaving: Weaving, bucket: Bucket, place: int, value: SlotId, *, again: bool, behind: int | None = None
) -> None:
    """Add the reduction of the gradient written at a place. A reduce-scatter adds to the shard so far."""
    scatter = bucket.zero > 0
    result = shard_gradient(bucket) if scatter else full_gradient(bucket)
    if scatter:
        weaving.values[result] = Slot(nbytes=bucket.largest_shard * bucket.sum_itemsize)
    node = Reduce(
        bucket=bucket.name,
        run=weaving.run(place),
        devices=bucket.devices,
        scatter=scatter,
        reads=(value, result) if again else (value,),
        writes=(result,),
        stream=bucket.reduce_stream,
        origin=bucket.origin,
    )
    weaving.put(place, node, behind)


def reduce_once(weaving: Weaving, bucket: Bucket, given: dict[int, SlotId]) -> None:
    """Accumulate all gradients on each device, then reduce once."""
    total = full_gradient(bucket)
    single = len(given) == 1 and not any(weaving.writes_flat(*giver) for giver in given.items())
    alone = single and not bucket.travels  # a gradient that nothing is added to keeps its type
    weaving.values[total] = Slot(nbytes=bucket.numel * (bucket.itemsize if alone else bucket.sum_itemsize))
    in_place = alone or (not bucket.travels and bucket.sum_dtype == bucket.dtype)
    begun: dict[Devices, bool] = {}
    for place, value in given.items():
        if not begun and in_place:  # the first gradient can be added to as it is
            begun[weaving.sequence[place].devices] = weaving.writes_flat(place, value)
            weaving.rename(place, value, total)
        else:
            accumulate(weaving, place, value, total, begun)
    if bucket.group_size > 1:
        reduce_node(weaving, bucket, max(given), total, again=False)


def reduce_each_run(
    weaving: Weaving, bucket: Bucket, given: dict[int, SlotId], places: Mapping[Devices, list[int]]
) -> None:
    """Reduce after each run of neighbouring backwards, so that no whole gradient outlives its reduction.

    The reduction is issued behind one more compute node, which it may overlap: it starts when the run has
    ended, and the gradient counts as live until that node has ended too.
    """
    sets = dict.fromkeys(weaving.sequence[place].devices for place in given)
    found = [run for alike in same_members(sets) for run in giving(weaving, given, alike, places[alike[0]])]
    for count, met in enumerate(meetings(found, lambda run: run.places[-1], places)):
        where = [place for run in met for place in run.places]
        value = given[where[0]]
        if len(where) > 1:
            value = full_gradient(bucket).of_run(weaving.run(where[0]))
            weaving.values[full_gradient(bucket)] = Slot(nbytes=bucket.numel * bucket.sum_itemsize)
            begun: dict[Devices, bool] = {}
            apart = are_apart([run.devices for run in met])
            for run in met:
                if apart and len(run.places) == 1:  # its gradient is its devices' whole contribution
                    weaving.rename(run.places[0], given[run.places[0]], value)
                    continue
                for place in run.places:
                    accumulate(weaving, place, given[place], value, begun)
        last, behind = max(run.places[-1] for run in met), max(run.beside for run in met)
        reduce_node(weaving, bucket, last, value, again=count > 0, behind=behind)


def giving(
    weaving: Weaving, given: dict[int, SlotId], alike: list[Devices], places: list[int]
) -> Iterator[UseRun]:
    """Yield the runs of neighbouring backwards on the same devices that give a bucket gradients."""
    mine = [place in given and weaving.sequence[place].devices in alike for place in places]
    for run in runs(mine):
        where = tuple(places[use] for use in run)
        yield UseRun(devices=alike[0], places=where, beside=places[min(run[-1] + 1, len(places) - 1)])


def are_apart(sets: Sequence[Devices]) -> bool:
    """Return whether there are several sets of devices, of which no two share one."""
    return len(sets) > 1 and sum(map(len, sets)) == len({device for devices in sets for device in devices})


def add_tied_sums(work: LoweringState) -> LoweringState:
    """Sum the gradients of a tied parameter over the sets of devices that hold a copy of it.

    reduce PP=0's copy     reduce PP=3's copy
    -->
    reduce PP=0's copy, reduce PP=3's copy, reduce both, shard by shard
    """
    sums: list[Node] = []
    values = dict(work.values)
    done: set[str] = set()
    written = {value for node in work.sequence for value in node.writes}
    for bucket in work.buckets.values():
        if not bucket.siblings or bucket.name in done or not bucket.trainable:
            continue
        family = [bucket, *(work.buckets[name] for name in bucket.siblings)]
        done.update(member.name for member in family)
        slots = [final_gradient(member) for member in family]
        given = [slot for slot in slots if slot in written]
        if not given:
            continue
        for slot in slots:
            values.setdefault(slot, values[given[0]])
        devices = tuple(device for column in columns([b.devices for b in family]) for device in column)
        sums.append(
            Reduce(
                bucket=bucket.name,
                run=None,
                devices=devices,
                scatter=False,
                reads=tuple(given),  # a copy that no backward reaches adds nothing, but gets the sum
                writes=tuple(slots),
                stream=bucket.reduce_stream,
                origin=tuple(dict.fromkeys(n for member in family for n in member.origin)),
            )
        )
    return replace(work, sequence=(*work.sequence, *sums), values=values)


def every_tied_copy_is_summed(work: LoweringState) -> Iterator[str]:
    """Yield each trainable tied parameter whose gradients are not summed over its buckets."""
    sums = [node for node in work.sequence if isinstance(node, Reduce) and node.run is None]
    summed = {slot for node in sums for slot in node.writes}
    gives = gradient_givers(work)
    for bucket in work.buckets.values():
        reached = any(name in gives for name in (bucket.name, *bucket.siblings))
        if bucket.siblings and reached and final_gradient(bucket) not in summed:
            yield f"{bucket.name} is not summed with {', '.join(bucket.siblings)}"
