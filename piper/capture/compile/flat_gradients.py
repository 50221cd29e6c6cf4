"""Lets a compiled backward write parameter gradients into memory that its caller gives.

A gradient that is reduced over replicas has to lie in one flat tensor with the others of its bucket. If the
compiled code writes it there, no copy of the gradients is made before they are reduced.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, fx

from piper.capture.compile.inductor import Source, is_traced
from piper.capture.compile.operators import mm_into

_aten = torch.ops.aten
Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


def source_in_place(source: Source) -> Source:
    """Return a phase that writes those of its results that it can into further arguments."""
    outputs = _outputs(source.module)
    targets = [outputs[place].meta["val"] for place in source.in_place]
    module = write_in_place(source.module, source.in_place)
    return replace(source, module=module, arguments=[*source.arguments, *targets])


def flat_phase(code: Callable[..., Sequence[Tensor]], plain: Source, source: Source) -> "FlatPhase":
    """Return a compiled phase, of a source that writes results into its last arguments."""
    targets = source.arguments[len(plain.arguments) :]
    like = [(target.shape, target.dtype) for target in targets]
    return FlatPhase(code, plain.in_place, like, targets[0].device, plain.module)


def write_in_place(module: fx.GraphModule, results: Sequence[int]) -> fx.GraphModule:
    """Return a graph that writes some of its results into further arguments, and returns the others."""
    outputs = _outputs(module)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        copies[node] = graph.node_copy(node)
    targets: dict[fx.Node, fx.Node] = {}  # by the node that is written: a product, or a result
    for number, place in enumerate(results):
        given = graph.placeholder(f"into_{number}")
        given.meta = {"val": outputs[place].meta["val"]}
        targets[_source(outputs[place])] = given
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        target = targets.get(node)
        if target is not None and node.target is _aten.mm.default:
            graph.call_function(mm_into, (*(copies[source] for source in node.all_input_nodes), target))
            copies[node] = target  # its views are not read
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if target is not None:
            graph.call_function(_aten.copy_.default, (target, copies[node])).meta = dict(target.meta)
    graph.output(tuple(copies[node] for place, node in enumerate(outputs) if place not in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _outputs(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    found = module.graph.output_node().args[0]
    assert isinstance(found, tuple) and all(isinstance(node, fx.Node) for node in found)
    return cast(tuple[fx.Node, ...], found)


def _source(result: fx.Node) -> fx.Node:
    """Return the product that a result only views, or the result."""
    node = result
    while node.target in (_aten.permute.default, _aten.t.default, _aten.view.default, _aten.alias.default):
        node = node.all_input_nodes[0]
    same = node.target is _aten.mm.default and node.meta["val"].shape == result.meta["val"].shape
    return node if same else result


class FlatPhase:
    """A compiled phase that writes gradients into given memory, called as its `PhaseSpec` says."""

    def __init__(
        self,
        code: Callable[..., Sequence[Tensor]],
        results: Sequence[int],
        like: Sequence[tuple[torch.Size, torch.dtype]],
        device: torch.device,
        plain: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> None:
        """Keep compiled code. results: those that it writes. like: their shapes. plain: not compiled."""
        self.code, self.results, self.like = code, tuple(results), tuple(like)
        self.device, self.plain = device, plain
        self.inner: Boxed = code.boxed  # type: ignore[attr-defined]

    def boxed_into(self, arguments: list[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Call the code with arguments in a list, which it empties. Return all results, the targets too."""
        arguments += targets
        found = list(self.inner(arguments))
        for place, target in zip(self.results, targets, strict=True):
            found.insert(place, target)
        return found

    def boxed(self, arguments: list[Tensor]) -> list[Tensor]:
        """Call the code with arguments in a list, which it empties, and give it memory for each gradient."""
        made = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.like]
        return self.boxed_into(arguments, made)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        if self.plain is not None and torch.is_grad_enabled() and any(map(is_traced, arguments)):
            return self.plain(*arguments)  # compiled code cannot be differentiated
        return tuple(self.boxed(list(arguments)))

    def __reduce__(self) -> tuple[type["FlatPhase"], tuple[object, ...]]:
        return FlatPhase, (self.code, self.results, self.like, self.device)
