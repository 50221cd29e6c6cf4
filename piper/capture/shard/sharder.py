"""Shards a forward over a group of devices: one pass over its operations, each by the rule of its kind.

Whole values come in two kinds. A value whose readers all do the same work has the same gradient on every
device. A value that sharded work reads gets a part of its gradient on each device, and these parts must be
summed: it *varies*. A value goes from the first kind to the second through a collective that passes it on and
sums its gradient. A parameter goes without one, because its bucket takes the sum.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from piper.capture.shard.axis_sharding import HINT, AxisSharding, NoRuleError, hint_for
from piper.capture.shard.layout import (
    REPLAYED,
    CopiedShard,
    OwnOrder,
    change,
    divides,
    local_shape,
    read_later,
    value_of,
)
from piper.capture.shard.local_graph import LocalGraph, RegionOf
from piper.capture.trace.effects import draws, name_of, writes
from piper.capture.trace.recording import FromParameter, Origin, Recording, collective, marker
from piper.capture.trace_errors import reason
from piper.ir.chunk import Batch, Tags
from piper.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard

aten = torch.ops.aten
Rule = Callable[["Sharder", fx.Node], None]


class Sharder(LocalGraph):
    """Writes the forward of one device of a group."""

    def __init__(
        self,
        recording: Recording,
        sharding: AxisSharding,
        rule_of: Callable[["Sharder", fx.Node], Rule | None],
        region_of: RegionOf,
        marked: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(recording, sharding, region_of)
        self.rule_of, self.marked = rule_of, marked
        self.summed: set[str] = set()  # parameters whose gradient is a sum over the group
        self.same: set[str] = set()  # parameters whose gradient is the same on every device
        self.lengths = [
            (field, self.shape(node)[field.dim])
            for node, origin in recording.origins.items()
            if isinstance(origin, Batch) and isinstance(field := sharding.batch.get(origin.field), Shard)
        ]  # of the fields that are sharded
        self.moved: dict[tuple[object, ...], fx.Node] = {}
        self.exponentials: dict[tuple[object, ...], tuple[fx.Node, fx.Node, fx.Node]] = {}  # and their sums
        self.routed: dict[fx.Node, Shard] = {}  # routes to which each device gives rows of its own
        self.unsharded: dict[fx.Node, fx.Node] = {}  # of fields that some regions load whole
        self.leaders: dict[Tags | None, fx.Node] = {}  # of each region one node, for all its readers

    def plain(self, node: fx.Node) -> None:
        """Write an operation as it stands, over whole operands."""
        varies = self.varies(node.all_input_nodes)
        local = {
            source: self.local[source]
            if isinstance(self.layouts[source], list)
            else self.to(source, REPLICATE, varies=varies)
            for source in node.all_input_nodes
        }
        try:
            result = self.replay(node, local)
        except RuntimeError as error:  # any operation: each fake kernel raises a kind of its own
            raise NoRuleError(f"its result is not known before it runs: {reason(error)}") from error
        self.done(node, result, REPLICATE)

    def varies(self, sources: list[fx.Node]) -> bool:
        """Return whether work on whole values is part of sharded work: one of them varies."""
        return any(self.local[source] in self.varying for source in sources if self.is_whole(source))

    def settle(self, node: fx.Node, like: Shard | None = None) -> Placement:
        """Take a pending sum: into slices of `like` or of the activations between regions, else whole."""
        have = self.layout(node)
        if not isinstance(have, Partial):
            return have
        shape = self.shape(node)
        want: Placement = REPLICATE
        wish = None if isinstance(like, CopiedShard) else like
        between = self.request.between
        if wish is None and between is not None and len(shape) > between + 1:
            wish = Shard(between, zigzag=self.request.zigzag)
        if have.op == "sum" and wish is not None and wish.dim < len(shape):
            if divides(shape[wish.dim], wish, self.degree):
                want = wish
            elif like is None:
                raise self.refused(
                    f"dimension {wish.dim} of size {shape[wish.dim]} does not divide by {self.degree}",
                    f"choose another `between` or a size that divides: {list(shape)}",
                )
        local = self.to(node, want, varies=False)
        self.local[node], self.layouts[node] = local, want
        if like is None and want != REPLICATE:
            self.between.add(local)
        return want

    def to(self, node: fx.Node, want: Placement, *, varies: bool) -> fx.Node:
        """Return the local value of a node in a layout, through a collective where it has another."""
        have, local = self.layout(node), self.local[node]
        origin = self.recording.origins.get(node)
        if isinstance(origin, Batch) and isinstance(have, Shard) and self._is_outside():
            return self._unsharded(node)
        same = have == want == REPLICATE and not (varies or self._is_outside()) and self.trains(local)
        if isinstance(origin, FromParameter) and same:
            self.same.add(origin.name)  # every device reads it for the same work
        if have == want and not (isinstance(want, Replicate) and varies and self._must_vary(node)):
            return local
        place = self._place(node, have)
        key = (node, want, varies if isinstance(want, Replicate) else None, place)
        if key not in self.moved:
            reader, self.node = self.node, place
            try:
                self.moved[key] = self._moved(node, have, want, varies)
            finally:
                self.node = reader
        return self.moved[key]

    def _is_outside(self) -> bool:
        """Return whether what is being sharded is in a region that this axis does not shard."""
        region = self.region_of(self.node)
        return region is not None and region not in self.request.regions

    def _unsharded(self, node: fx.Node) -> fx.Node:
        """Return the placeholder of a whole field: regions that the axis does not shard load all of it."""
        if node not in self.unsharded:
            with self.graph.inserting_after(self.local[node]):
                local = self.graph.placeholder(f"unsharded_{node.name}")
            local.meta["example_value"] = node.meta["example_value"]
            self.unsharded[node] = local
        return self.unsharded[node]

    def _must_vary(self, node: fx.Node) -> bool:
        """Return whether a whole value's gradient must be summed for sharded work to read it."""
        if not self.trains(self.local[node]) or self.local[node] in self.varying:
            return False
        origin = self.recording.origins.get(node)
        if isinstance(origin, FromParameter) and origin.name not in self.marked:
            self.summed.add(origin.name)
            return False
        return True

    def _moved(self, node: fx.Node, have: Placement, want: Placement, varies: bool) -> fx.Node:
        local, shape = self.local[node], self.shape(node)
        if isinstance(have, CopiedShard):
            return self._from_copies(node, have, want, varies)
        if isinstance(have, OwnOrder) or isinstance(want, OwnOrder):
            raise NoRuleError("each device has its rows in an order of its own")
        if isinstance(want, CopiedShard):
            return self.take(self.to(node, REPLICATE, varies=True), want)
        if isinstance(want, Shard):
            if not divides(shape[want.dim], want, self.degree):
                raise NoRuleError(f"dimension {want.dim} of {list(shape)} does not divide by {self.degree}")
            if isinstance(have, Replicate) and not self._must_vary(node):
                return self.take(local, want)
        if isinstance(have, Shard) and isinstance(want, Replicate) and (base := self.base(node)) is not None:
            given = self.to(base, want, varies=varies)
            return self.emit(node.target, map_arg(node.args, lambda _: given), node.kwargs)
        if isinstance(have, Partial) and isinstance(want, Replicate):
            return self.collect(local, have, varies=varies)
        return self._collect(local, have, want, varies)

    def _from_copies(self, node: fx.Node, have: CopiedShard, want: Placement, varies: bool) -> fx.Node:
        """Return a device's own part of a slice that its neighbours hold too, or all of the only slice."""
        local = self.local[node]
        if isinstance(want, Replicate) and varies and have.copies == self.degree:
            whole = self.emit(aten.alias.default, (local,))
            self.copied.discard(whole)
            self.varying.add(whole)
            return whole
        if want == Shard(have.dim) and divides(self.shape(node)[have.dim], Shard(have.dim), self.degree):
            return self.own_copy(local, have)
        raise NoRuleError("several devices hold the same heads of an operand")

    def base(self, node: fx.Node) -> fx.Node | None:
        """Return the source of a sharded reshape: gathered there, all its reshapes share one collective."""
        if node.target not in REPLAYED or self.region_of(node) != self.region_of(node.all_input_nodes[0]):
            return None
        base = node.all_input_nodes[0]
        return base if isinstance(self.layouts[base], Shard) else None

    def collect(self, local: fx.Node, have: Partial, *, varies: bool = False) -> fx.Node:
        """Write the sum or maximum of the terms that the devices hold; `varies`: sharded work reads it."""
        whole = self._collect(local, have, REPLICATE, varies=False)
        if varies and self.trains(whole):
            return self._collect(whole, REPLICATE, REPLICATE, varies=True)
        return whole

    def _collect(self, local: fx.Node, have: Placement, want: Placement, varies: bool) -> fx.Node:
        result = self.exchange(local, change(self.request.axis, self.degree, have, want, varies))
        self.varying.discard(result)
        if isinstance(want, Replicate):
            self.between.discard(result)
            self.varying |= {result} if varies else set()
        return result

    def _place(self, node: fx.Node, have: Placement) -> fx.Node:
        """Return the node in whose region a value changes its layout: a sum's maker, a slice's reader."""
        if isinstance(have, Partial):
            return node
        here, there = self.region_of(self.node), self.region_of(node)
        meshes = self.request.regions
        mesh = meshes.get(here) if here is not None else None
        reads_slices = mesh is not None and (there is None or meshes.get(there) == mesh)
        if isinstance(have, Shard) and not reads_slices:
            return node
        return self.leaders.setdefault(here, self.node)

    def run(self) -> None:
        """Shard every operation in order."""
        for node in self.recording.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self.local[node], self.layouts[node] = self.attribute(str(node.target)), REPLICATE
                self.local[node].meta = {**node.meta, **self.local[node].meta}
            elif node.op == "call_function":
                self.node = node
                written = [(source, self.local[source]) for source in writes(node)]
                self._operation(node)
                for source, local in written:
                    self._check_write(node, source, local)
        for result in self.recording.results:
            self.node = result
            self.settle(result)
            try:
                local = self.to(result, REPLICATE, varies=False)
            except NoRuleError as error:
                raise self.refused(f"a result cannot be made whole: {error}", HINT) from None
            assert local not in self.varying, f"{result} has a different gradient on every device"
            if local.target is collective:  # the chunk of the loss must be one that computes
                local = self.emit(aten.clone.default, (local,))
            self.local[result], self.layouts[result] = local, REPLICATE

    def recorded(self) -> Recording:
        """Return the forward of one device, once it is written."""
        known = self.recording.origins
        origins: dict[fx.Node, Origin] = {self.local[node]: origin for node, origin in known.items()}
        origins |= {local: known[node] for node, local in self.unsharded.items()}
        origins |= {node: place for place, node in self.ranks.items()}
        return replace(
            self.recording,
            graph=self.graph,
            origins=origins,
            results=tuple(self.local[result] for result in self.recording.results),
            tags={node: self.tags.get(node, ()) for node in self.graph.nodes},
            modes=self.modes,
            bundles=self.bundles,
        )

    @contextmanager
    def _own_slices(self, node: fx.Node) -> Iterator[None]:
        """Let sharded work read its slices of tied weights, and of what whole regions give it."""
        whole: dict[fx.Node, fx.Node] = {}
        for source in node.all_input_nodes if not self._is_outside() else ():
            origin = self.recording.origins.get(source)
            name = origin.name if isinstance(origin, FromParameter) else ""
            want = self.sharding.shared.get(name) or self._arriving(source)
            if name in self.sharding.shared and name not in self.marked:
                self.summed.add(name)
            if want is not None:
                whole[source] = self.local[source]
                self.local[source] = self.to(source, want, varies=True)
                self.layouts[source] = want
        yield
        for source, local in whole.items():
            self.local[source], self.layouts[source] = local, REPLICATE

    def _arriving(self, source: fx.Node) -> Shard | None:
        """Return how to shard activations that arrive from another region: as fields of the same length."""
        region, value = self.region_of(source), value_of(source)
        if region is None or region in self.request.regions or not self.is_whole(source):
            return None
        if not isinstance(value, Tensor) or value.dim() < 3 or not value.is_floating_point():
            return None
        shards = (shard for shard, length in self.lengths if value.shape[shard.dim] == length)
        return next(shards, None)

    def _placeholder(self, node: fx.Node) -> None:
        origin = self.recording.origins[node]
        given: Placement = REPLICATE
        if isinstance(origin, FromParameter):
            given = self.sharding.weights.get(origin.name, REPLICATE)
        elif (name := getattr(origin, "field", None)) is not None:
            given = self.sharding.batch.get(name, REPLICATE)
        local = self.graph.placeholder(node.name)
        value = node.meta["example_value"]
        shape = local_shape(tuple(value.shape), given, self.degree)
        with self.fakes:
            local.meta["example_value"] = torch.empty(
                shape, dtype=value.dtype, device=value.device
            ).requires_grad_(value.requires_grad)
        self.local[node], self.layouts[node] = local, given
        if isinstance(given, CopiedShard):
            self.copied.add(local)

    def _operation(self, node: fx.Node) -> None:
        try:
            with self._own_slices(node):
                self._by_rule(node, self._rule_of(node))
        except NoRuleError as error:
            what = name_of(node) if node.target is collective else node.target
            raise self.refused(
                f"{what} cannot be sharded: {error}", error.hint or hint_for(node.target)
            ) from None

    def _rule_of(self, node: fx.Node) -> Rule | None:
        tags = self.region_of(node)
        sources = node.all_input_nodes
        sharded = not all(self.is_whole(source) for source in sources)
        sharded = sharded or (draws(node) and any(self.relaid(source) for source in sources))
        if marker(node) == "unroute":  # it may take back rows that each device has routed by itself
            sharded = sharded or sources[1].all_input_nodes[0] in self.routed
        here = tags is None or tags in self.request.regions
        return self.rule_of(self, node) if sharded and here else Sharder.gathered

    def _by_rule(self, node: fx.Node, rule: Rule | None) -> None:
        """Write an operation by its rule; one that has none or that it refuses, on gathered operands."""
        if rule is None and not self.whole(node):
            if not self._may_gather(node):
                raise self.refused(f"{node.target} has no rule for how it is sharded", hint_for(node.target))
            self.plain(node)
        elif rule is not None:
            try:
                rule(self, node)
            except NoRuleError:
                if rule is Sharder.gathered or not self._may_gather(node):
                    raise
                self.gathered(node)

    def relaid(self, node: fx.Node) -> bool:
        """Return whether a value's elements lie in another order than unsharded, which draws follow."""
        local, value = self.local[node].meta["example_value"], value_of(node)
        if not isinstance(local, Tensor) or not isinstance(value, Tensor) or not self.is_whole(node):
            return False
        return local.stride() != value.stride()

    def gathered(self, node: fx.Node) -> None:
        """Write an operation as it stands, on operands that are made whole."""
        if not self.whole(node):
            self.plain(node)

    def _check_write(self, node: fx.Node, source: fx.Node, local: fx.Node) -> None:
        """Refuse a write in place that went into a copy, where the value is read again under another name."""
        if local not in self.local[node].all_input_nodes and any(read_later(source, node).values()):
            raise self.refused(
                f"{node.target} writes into a copy, because a layout changes, of what a view reads later",
                "write `x = f(x)` in place of `f_(x)`, or read the view after the write",
            )

    def whole(self, node: fx.Node) -> bool:
        """Take the sums among the operands of an operation, and write it if all operands are whole then."""
        sources = node.all_input_nodes
        for source in sources:
            if isinstance(self.layouts[source], Partial):
                self.settle(source)
        is_whole = all(self.is_whole(source) for source in sources)
        if is_whole:
            self.plain(node)
        return is_whole

    def _may_gather(self, node: fx.Node) -> bool:
        """Return whether what an operation reads of the group may be gathered, for each device to do it all.

        Integers have no gradient and are few: labels, of which those of the next position are in part on the
        next device, masks, positions. Activations between regions are gathered where a layer needs all of
        them, as a product with sharded weights does: a convolution along the sequence, a recurrence.
        """

        def may(source: fx.Node) -> bool:
            value = value_of(source)
            rows = self.sharding.gathers_rows and self.local[source] in self.between
            return isinstance(value, Tensor) and (rows or not value.is_floating_point())

        read = [source for source in node.all_input_nodes if not self.is_whole(source)]
        return bool(read) and all(map(may, read))
