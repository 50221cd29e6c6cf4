"""Joins the traces of a chunk's segments into the trace of the chunk.

Equal segments are traced once. Their forwards follow one another; their backwards follow in reverse, and
where several segments give a gradient for one value these are added in the order autograd would.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from piper.capture.autodiff.joint import Joint
from piper.capture.autodiff.partition import backward_nodes
from piper.capture.cost.aliases import memories, move_to
from piper.capture.trace.assemble import CapturedChunk, Segment
from piper.capture.trace.sizes import SymbolicSizes

_aten = torch.ops.aten


class Composer:
    """Writes the joint graph of a chunk, segment by segment. Values go by their nodes of the recording."""

    def __init__(self, piece: CapturedChunk, joints: Sequence[Joint], tangents: Sequence[int]) -> None:
        self.piece, self.joints = piece, joints
        self.graph, self.root = fx.Graph(), nn.Module()
        self.fresh = itertools.count()  # memory that nothing else uses
        self.copies: list[dict[fx.Node, fx.Node]] = [{} for _ in joints]  # of each segment's nodes
        self.moves = [defaultdict[int, int](self.fresh.__next__) for _ in joints]  # of each segment's memory
        self.outputs: dict[fx.Node, fx.Node] = {}
        self.mutated: dict[fx.Node, fx.Node] = {}
        self.grads: dict[fx.Node, fx.Node] = {}
        self.values: dict[fx.Node, fx.Node] = {}  # that segments read: what the chunk reads, and results
        for kind, nodes in zip(("inputs", "params", "buffers"), piece.reads, strict=True):
            for position, node in enumerate(nodes):
                self.values[node] = self.graph.placeholder(f"{kind}_{position}")
        self.tangents = {piece.makes[i]: self.graph.placeholder(f"tangents_{i}") for i in tangents}

    def run(self) -> Joint:
        backward = [backward_nodes(joint) for joint in self.joints]
        numbered = list(enumerate(zip(self.piece.segments, self.joints, strict=True)))
        for number, (segment, joint) in numbered:
            self._forward(number, segment, joint, backward[number])
        for number, (segment, joint) in reversed(numbered):
            if joint.tangents:
                self._backward(number, segment, joint, backward[number])
        self.graph.output(())
        (inputs, params, buffers), makes = self.piece.reads, self.piece.makes
        return Joint(
            graph=self.graph,
            root=self.root,
            inputs=_by_position(inputs, self.values),
            params=_by_position(params, self.values),
            buffers=_by_position(buffers, self.values),
            tangents=_by_position(makes, self.tangents),
            outputs=[self.outputs[node] for node in makes],
            mutated=_by_position(buffers, self.mutated),
            grad_inputs=_by_position(inputs, self.grads),
            grad_params=_by_position(params, self.grads),
            sizes=SymbolicSizes(),
        )

    def _bind(self, number: int, node: fx.Node, actual: fx.Node) -> None:
        """Let a segment's placeholder stand for a value of the chunk."""
        self._describe(actual, node)
        self.copies[number][node] = actual
        self.moves[number][memories(node)[0]] = memories(actual)[0]

    def _describe(self, placeholder: fx.Node, like: fx.Node) -> None:
        """Give a placeholder of the chunk, at its first use, a value and memory."""
        if "val" not in placeholder.meta:
            placeholder.meta = {"val": like.meta["val"]}
            move_to(placeholder, (next(self.fresh),))

    def _copy(self, number: int, node: fx.Node) -> None:
        copies, moves = self.copies[number], self.moves[number]
        copy = self.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copy.target = f"{node.target}_{number}"
            setattr(self.root, copy.target, getattr(self.joints[number].root, str(node.target)))
        copy.meta = {key: node.meta[key] for key in ("val", "partitioner_tag") if key in node.meta}
        move_to(copy, tuple(moves[memory] for memory in memories(node)))
        copies[node] = copy

    def _forward(self, number: int, segment: Segment, joint: Joint, backward: set[fx.Node]) -> None:
        given = zip(segment.reads, (joint.inputs, joint.params, joint.buffers), strict=True)
        for reads, placeholders in given:
            for position, node in placeholders.items():
                self._bind(number, node, self.values[reads[position]])
        for node in joint.graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in backward:
                self._copy(number, node)
        copies = self.copies[number]
        for recorded, node in zip(segment.makes, joint.outputs, strict=True):
            self.values[recorded], self.outputs[recorded] = copies[_without_copy(node)], copies[node]
        for position, node in joint.mutated.items():
            self.mutated[segment.reads[2][position]] = copies[node]

    def _backward(self, number: int, segment: Segment, joint: Joint, backward: set[fx.Node]) -> None:
        for index, node in joint.tangents.items():
            value = segment.makes[index]
            if tangent := self.tangents.get(value):  # that of the chunk comes before those of later segments
                self._describe(tangent, node)
                later = self.grads.get(value)
                total = tangent if later is None else self._call(_aten.add.Tensor, (tangent, later), later)
                self.grads[value] = total
            self._bind(number, node, self.grads[value])
        for node in joint.graph.nodes:
            if node.op in ("call_function", "get_attr") and node in backward:
                self._copy(number, node)
        for position, node in joint.grad_inputs.items():
            self._add(segment.reads[0][position], self._dense(self.copies[number][node]))
        for position, node in joint.grad_params.items():
            self._add(segment.reads[1][position], self.copies[number][node])

    def _add(self, value: fx.Node, grad: fx.Node) -> None:
        if value in self.grads:
            grad = self._call(_aten.add.Tensor, (self.grads[value], grad), grad)
        self.grads[value] = grad

    def _dense(self, grad: fx.Node) -> fx.Node:
        """Return a gradient as a contiguous tensor, which is how the segment that takes it was traced."""
        if grad.meta["val"].is_contiguous():
            return grad
        copy = self._call(_aten.clone.default, (grad,), grad)
        copy.kwargs = {"memory_format": torch.contiguous_format}
        copy.meta["val"] = grad.meta["val"].contiguous()
        return copy

    def _call(self, target: torch._ops.OpOverload, arguments: tuple[fx.Node, ...], like: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        node.meta = {"val": like.meta["val"], "partitioner_tag": "is_backward"}
        move_to(node, (next(self.fresh),))
        return node


def _by_position(nodes: Sequence[fx.Node], found: Mapping[fx.Node, fx.Node]) -> dict[int, fx.Node]:
    """Return what was found for nodes, by position, without placeholders that no segment uses."""
    return {i: found[node] for i, node in enumerate(nodes) if node in found and "val" in found[node].meta}


def _without_copy(node: fx.Node) -> fx.Node:
    """Return an output without the copy around it, if it is contiguous anyway."""
    source = node.all_input_nodes[0] if node.target is _aten.clone.default else node
    value = source.meta["val"]
    return source if isinstance(value, Tensor) and value.is_contiguous() else node
