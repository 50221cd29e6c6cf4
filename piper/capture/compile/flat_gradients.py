"""Lets a compiled backward write parameter gradients into memory that its caller gives, or add them there.

A gradient that is reduced over replicas has to lie in one flat tensor with the others of its bucket. If the
compiled code writes it there, no copy of the gradients is made before they are reduced. The gradients of
later microbatches are added by the products that compute them, so they never lie in memory of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, fx

from piper.capture.compile.hashing import Source
from piper.capture.compile.inductor import Boxed, CompiledPhase
from piper.capture.compile.operators import EMBEDDING_GRAD, embedding_grad_into, mm_into

_aten = torch.ops.aten


def source_in_place(source: Source) -> Source:
    """Return a phase that writes those of its results that it can into further arguments, or adds to them."""
    outputs = _outputs(source.module)
    targets = [_summed(outputs[place]) for place in source.in_place]
    module = write_in_place(source.module, source.in_place)
    return replace(source, module=module, arguments=[*source.arguments, *targets, torch.tensor(False)])


def write_in_place(module: fx.GraphModule, results: Sequence[int]) -> fx.GraphModule:
    """Write some gradients into further arguments, or add them if the last one says so; return the others."""
    outputs, graph, copies = _outputs(module), fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, copies)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        targets = [graph.placeholder(f"into_{number}") for number, _ in enumerate(results)]
        add = graph.placeholder("add")
    add.meta = {"val": torch.tensor(False)}
    for place, target in zip(results, targets, strict=True):
        target.meta = {"val": _summed(outputs[place])}
        product = _product(outputs[place])  # neither it nor its views are read
        with graph.inserting_before(copies[product]):
            if product.target is EMBEDDING_GRAD:
                grad, rows, _, padding, _ = product.args
                looked_up = (copies[cast(fx.Node, grad)], copies[cast(fx.Node, rows)])
                graph.call_function(embedding_grad_into, (*looked_up, target, add, padding))
                continue
            first, second = cast(tuple[fx.Node, fx.Node], product.args)
            if first.target is _aten.t.default or (
                first.target is _aten.permute.default and [*cast(list[int], first.args[1])] == [1, 0]
            ):
                left = copies[_rows(first.all_input_nodes[0])]
            else:
                left = graph.call_function(_aten.t.default, (copies[first],))
            graph.call_function(mm_into, (left, copies[_rows(second)], target, add))
    graph.output(tuple(copies[node] for place, node in enumerate(outputs) if place not in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _summed(gradient: fx.Node) -> Tensor:
    """Return a fake tensor for a sum of gradients: float32 where the gradients are shorter."""
    value: Tensor = gradient.meta["val"]
    return value.new_empty(value.shape, dtype=torch.promote_types(value.dtype, torch.float32))


def _outputs(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, tuple) and all(isinstance(node, fx.Node) for node in outputs)
    return cast(tuple[fx.Node, ...], outputs)


def _product(result: fx.Node) -> fx.Node:
    """Return the product, or the gradient of a table, of which a result is a view."""
    node = result
    while node.target not in (_aten.mm.default, EMBEDDING_GRAD):
        node = node.all_input_nodes[0]
    return node


def _rows(matrix: fx.Node) -> fx.Node:
    """Return the value of which a matrix is a view that joins all axes but the last."""
    value = matrix
    while value.target in (_aten.view.default, _aten.reshape.default):
        source = value.all_input_nodes[0]
        shape = source.meta["val"].shape
        if not source.meta["val"].is_contiguous() or shape[-1:] != matrix.meta["val"].shape[-1:]:
            break
        value = source
    return value


class FlatPhase(CompiledPhase):
    """A compiled phase that writes or adds gradients to given memory, called as its `PhaseSpec` says."""

    def __init__(
        self,
        code: Callable[..., Sequence[Tensor]],
        results: Sequence[int],
        like: Sequence[tuple[torch.Size, torch.dtype]],
        device: torch.device,
    ) -> None:
        """Keep compiled code. results: those that it writes into its last arguments. like: their shapes."""
        self.code, self.results, self.like, self.device = code, tuple(results), tuple(like), device
        self.inner: Boxed = code.boxed  # type: ignore[attr-defined]
        self.flags = (torch.tensor(False), torch.tensor(True))

    def boxed_into(
        self, arguments: list[Tensor], targets: Sequence[Tensor], *, add: bool = False
    ) -> list[Tensor]:
        """Call the code with arguments in a list, which it empties. Return all results, the targets too."""
        # add: the targets hold sums, to which gradients are added. Else they are overwritten.
        arguments += (*targets, self.flags[add])
        results = list(self.inner(arguments))
        for place, target in zip(self.results, targets, strict=True):
            results.insert(place, target)
        return results

    def boxed(self, arguments: list[Tensor]) -> list[Tensor]:
        """Call the code with arguments in a list, which it empties, and give it memory for each gradient."""
        targets = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.like]
        return self.boxed_into(arguments, targets)

    def __reduce__(self) -> tuple[type["FlatPhase"], tuple[object, ...]]:
        return FlatPhase, (self.code, self.results, self.like, self.device)
