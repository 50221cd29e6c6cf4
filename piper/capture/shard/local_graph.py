"""Writes the operations of one device of a group: which local value stands for which, in which layout."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import Argument, map_arg

from piper.capture.shard.axis_sharding import AxisSharding, NoRuleError
from piper.capture.shard.layout import CopiedShard, in_words, local_shape, slices_of, tensor_of, value_of
from piper.capture.trace.linear_layers import WEIGHT, weight_of
from piper.capture.trace.recording import OWN_ROWS, Mode, Recording, collective
from piper.capture.trace_errors import node_line
from piper.errors import CaptureError
from piper.ir.chunk import AxisPosition, Collective, Tags
from piper.ir.sharding import REPLICATE, Placement, Shard

aten = torch.ops.aten
RegionOf = Callable[[fx.Node], Tags | None]


class LocalGraph:
    """The graph of one device of a group, while it is written."""

    def __init__(self, recording: Recording, sharding: AxisSharding, region_of: RegionOf) -> None:
        self.recording, self.sharding, self.region_of = recording, sharding, region_of
        self.request = sharding.request
        self.graph = fx.Graph()
        self.local: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[fx.Node, Placement | list[Placement]] = {}
        self.tags: dict[fx.Node, Tags] = {}
        self.modes: dict[fx.Node, Mode] = {}
        self.varying: set[fx.Node] = set()  # local whole values whose gradient is a sum over the group
        self.copied: set[fx.Node] = set()  # local slices that neighbours hold too, and what is made of them
        # Local slices of activations between regions, and what is made of them
        self.between: set[fx.Node] = set()
        self.ranks: dict[AxisPosition, fx.Node] = {}
        self.bundle: int | None = None  # of what is being written: all of one stays in one chunk
        self.bundles: dict[fx.Node, int] = {}
        self.bundled = max(recording.bundles.values(), default=0)
        self.node: fx.Node  # what is being sharded
        example = next(n.meta["example_value"] for n in recording.origins if "example_value" in n.meta)
        self.fakes, self.device, self.degree = example.fake_mode, example.device, self.request.degree

    def layout(self, node: fx.Node) -> Placement:
        """Return how the group holds a value."""
        layout = self.layouts[node]
        if isinstance(layout, list):
            raise NoRuleError("it reads several values at once")
        return layout

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of the unsharded value."""
        try:
            return tuple(int(size) for size in tensor_of(node).shape)
        except GuardOnDataDependentSymNode as error:
            raise NoRuleError("its sizes depend on values") from error

    def trains(self, local: fx.Node) -> bool:
        """Return whether a local value needs a gradient."""
        value = local.meta["example_value"]
        return isinstance(value, Tensor) and value.requires_grad

    def emit(
        self, target: object, args: tuple[Argument, ...], kwargs: Mapping[str, Argument] | None = None
    ) -> fx.Node:
        """Write one operation over local values; its result varies where one of its whole operands does."""
        writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        if writes and args and isinstance(args[0], fx.Node) and args[0].target is collective:
            args = (self.emit(aten.clone.default, (args[0],)), *args[1:])  # what a collective gives stays
        call = self.graph.call_function(target, args, dict(kwargs or {}))  # type: ignore[arg-type]
        mode = self.recording.modes.get(self.node, Mode())
        marks = ("custom", "stack_trace", OWN_ROWS, *((WEIGHT,) if weight_of(call) is not None else ()))
        call.meta = {key: self.node.meta[key] for key in marks if key in self.node.meta}
        fakes, options = map_arg((args, call.kwargs), lambda used: used.meta["example_value"])
        with self.fakes, torch.set_grad_enabled(mode.grad):
            try:
                result = target(*fakes, **options)  # type: ignore[operator]
            except GuardOnDataDependentSymNode as error:
                raise NoRuleError("its sizes depend on values") from error
        call.meta["example_value"] = result
        self.modes[call] = mode
        self.tags[call] = self.region_of(self.node) or ()
        bundle = self.bundle or self.recording.bundles.get(self.node)
        if bundle is not None:
            self.bundles[call] = bundle
        for kind in (self.varying, self.copied, self.between):
            if any(used in kind for used in call.all_input_nodes):
                kind.add(call)
        return call

    def replay(self, node: fx.Node, local: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        """Write an operation with its own arguments. local: its operands; None: as they are."""
        values = self.local if local is None else local
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        return self.emit(node.target, args, kwargs)

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Write operations that become a chunk of their own."""
        self.bundled += 1
        self.bundle = self.bundled
        try:
            yield
        finally:
            self.bundle = None

    def done(self, node: fx.Node, local: fx.Node, layout: Placement | list[Placement]) -> None:
        """Say what became of an operation, in one layout or one for each result, and check its shape."""
        result = local.meta["example_value"]
        if isinstance(result, tuple | list) and not isinstance(layout, list):
            layout = [layout for _ in result]
        each = layout if isinstance(layout, list) else [layout]
        if local in self.copied and not all(isinstance(one, CopiedShard) for one in each):
            raise NoRuleError("several devices hold the same heads of an operand, and would count it twice")
        self.local[node], self.layouts[node] = local, layout
        if isinstance(value_of(node), Tensor) and isinstance(result, Tensor) and isinstance(layout, Shard):
            want = local_shape(self.shape(node), layout, self.degree)
            assert tuple(result.shape) == want, (
                f"{node} {node.target}: {tuple(result.shape)} for {layout} of {want}"
            )

    def exchange(self, local: fx.Node, how: Collective) -> fx.Node:
        """Write a collective on a local value."""
        if local.op == "placeholder":  # a collective is a chunk of its own, and reads what chunks compute
            local = self.emit(aten.clone.default, (local,))
        return self.emit(collective, (local, how))  # type: ignore[arg-type]  # a graph can hold any argument

    def take(self, local: fx.Node, want: Shard) -> fx.Node:
        """Write a device's own slice of a whole value, chosen by its place in the group."""
        index, slices = self.place(), slices_of(want, self.degree)
        if isinstance(want, CopiedShard):
            index = self.emit(aten.div.Scalar_mode, (index, want.copies), {"rounding_mode": "floor"})
        if want.zigzag:
            last = self.emit(aten.rsub.Scalar, (index, 2 * slices - 1))
            index = self.emit(aten.cat.default, ([index, last],))
        return self._picked(local, want, slices, index)

    def own_copy(self, local: fx.Node, have: CopiedShard) -> fx.Node:
        """Write a device's own slice of a slice that its neighbours hold too."""
        index = self.emit(aten.remainder.Scalar, (self.place(), have.copies))
        own = self._picked(local, have, have.copies, index)
        self.copied.discard(own)
        return own

    def _picked(self, local: fx.Node, how: Shard, slices: int, index: fx.Node) -> fx.Node:
        """Write one of so many slices of each block of a dimension; in a zigzag two of twice as many."""
        shape = [int(size) for size in local.meta["example_value"].shape]
        size, dim, pieces = shape[how.dim], how.dim, slices * (2 if how.zigzag else 1)
        apart = [*shape[:dim], how.blocks, pieces, size // (how.blocks * pieces), *shape[dim + 1 :]]
        cut = self.emit(aten.reshape.default, (local, apart))
        own = self.emit(aten.index_select.default, (cut, dim + 1, index))
        return self.emit(aten.reshape.default, (own, [*shape[:dim], size // slices, *shape[dim + 1 :]]))

    def place(self, *, on_host: bool = False) -> fx.Node:
        """Return the placeholder of a device's place in its group, on the host for what decides by it."""
        place = AxisPosition(axis=self.request.axis, on_host=on_host)
        if place not in self.ranks:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                rank = self.graph.placeholder(f"{'host_' * on_host}place_in_{place.axis}")
            with self.fakes:
                device = torch.device("cpu") if on_host else self.device
                rank.meta["example_value"] = torch.empty(1, dtype=torch.int64, device=device)
            self.ranks[place] = rank
        return self.ranks[place]

    def attribute(self, name: str) -> fx.Node:
        """Write the read of something that the traced model holds under a name."""
        local, value = self.graph.get_attr(name), getattr(self.recording.root, name)
        with self.fakes:
            local.meta["example_value"] = (
                self.fakes.from_tensor(value) if isinstance(value, Tensor) else value
            )
        self.modes[local], self.tags[local] = Mode(), ()
        return local

    def is_whole(self, node: fx.Node) -> bool:
        layout = self.layouts[node]
        return all(each == REPLICATE for each in (layout if isinstance(layout, list) else [layout]))

    def refused(self, what: str, hint: str) -> CaptureError:
        """Return the error of an operation: its source line, and how its operands are sharded."""
        operands = [
            f"{source.name} {list(value.shape)} {in_words(layout)}"
            for source in self.node.all_input_nodes
            if isinstance(value := value_of(source), Tensor)
            and not isinstance(layout := self.layouts.get(source, REPLICATE), list)
        ]
        facts = {"operation": f"{self.node.target}{node_line(self.node)}", "operands": ", ".join(operands)}
        return CaptureError(what, by=self.request.by, facts=facts, hint=hint)

    def uneven_heads(self, heads: int) -> CaptureError:
        """Return the error of heads that do not divide by the devices of a group."""
        ways = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        hint = f"choose `ways` among the divisors of {heads}: {ways}"
        return self.refused(f"{heads} heads do not divide by {self.degree}", hint)
