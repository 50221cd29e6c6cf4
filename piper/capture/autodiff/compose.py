"""Joins the traces of a chunk's segments into the trace of the chunk.

Equal segments are traced once. Their forwards follow one another; their backwards follow in reverse, and
where several segments give a gradient for one value these are added in the order autograd would.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, fx, nn

from piper.capture.autodiff.joint import Joint
from piper.capture.autodiff.partition import backward_nodes
from piper.capture.cost.aliases import memories, move_to
from piper.capture.trace.piece import CapturedChunk, Segment, SegmentOutput
from piper.capture.trace.sizes import SymbolicSizes

_aten = torch.ops.aten
_Key = TypeVar("_Key")


class Composer:
    """Writes the joint graph of a chunk, segment by segment."""

    def __init__(self, piece: CapturedChunk, joints: Sequence[Joint], tangents: Sequence[int]) -> None:
        self.piece, self.joints = piece, joints
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.fresh = itertools.count()  # memory that nothing else uses
        self.copies: list[dict[fx.Node, fx.Node]] = [{} for _ in joints]  # of each segment's nodes
        self.moves: list[dict[int, int]] = [{} for _ in joints]  # of each segment's memory
        self.between: dict[SegmentOutput, fx.Node] = {}
        self.outputs: dict[int, fx.Node] = {}
        self.mutated: dict[int, fx.Node] = {}
        self.grads: dict[SegmentOutput, fx.Node] = {}
        self.grad_inputs: dict[int, fx.Node] = {}
        self.grad_params: dict[int, fx.Node] = {}
        assert piece.body is not None
        body = piece.body
        self.inputs = self._placeholders("inputs", range(len(body.inputs)))
        self.params = self._placeholders("params", range(len(body.params)))
        self.buffers = self._placeholders("buffers", range(len(body.buffers)))
        self.tangents = self._placeholders("tangents", tangents)

    def run(self) -> Joint:
        backward = [backward_nodes(joint) for joint in self.joints]
        numbered = list(enumerate(zip(self.piece.segments, self.joints, strict=True)))
        for number, (segment, joint) in numbered:
            self._forward(number, segment, joint, backward[number])
        for number, (segment, joint) in reversed(numbered):
            if joint.tangents:
                self._backward(number, segment, joint, backward[number])
        self.graph.output(())
        return Joint(
            graph=self.graph,
            root=self.root,
            inputs=_bound(self.inputs),
            params=_bound(self.params),
            buffers=_bound(self.buffers),
            tangents=_bound(self.tangents),
            outputs=[self.outputs[index] for index in range(len(self.outputs))],
            mutated=self.mutated,
            grad_inputs=dict(sorted(self.grad_inputs.items())),
            grad_params=dict(sorted(self.grad_params.items())),
            sizes=SymbolicSizes(),
        )

    def _placeholders(self, kind: str, positions: Iterable[int]) -> dict[int, fx.Node]:
        return {position: self.graph.placeholder(f"{kind}_{position}") for position in positions}

    def _bind(self, number: int, node: fx.Node, actual: fx.Node) -> None:
        """Let a segment's placeholder stand for a value of the chunk."""
        if "val" not in actual.meta:  # the chunk's own placeholder, at its first use
            actual.meta = {"val": node.meta["val"]}
            move_to(actual, (next(self.fresh),))
        self.copies[number][node] = actual
        self.moves[number][memories(node)[0]] = memories(actual)[0]

    def _copy(self, number: int, node: fx.Node) -> None:
        copies, moves = self.copies[number], self.moves[number]
        copy = self.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copy.target = f"{node.target}_{number}"
            setattr(self.root, copy.target, getattr(self.joints[number].root, str(node.target)))
        copy.meta = {key: node.meta[key] for key in ("val", "partitioner_tag") if key in node.meta}
        for memory in memories(node):
            if memory not in moves:
                moves[memory] = next(self.fresh)
        move_to(copy, tuple(moves[memory] for memory in memories(node)))
        copies[node] = copy

    def _forward(self, number: int, segment: Segment, joint: Joint, backward: set[fx.Node]) -> None:
        for position, node in joint.inputs.items():
            source = segment.inputs[position]
            actual = self.between[source] if isinstance(source, SegmentOutput) else self.inputs[source]
            self._bind(number, node, actual)
        for position, node in joint.params.items():
            self._bind(number, node, self.params[segment.params[position]])
        for position, node in joint.buffers.items():
            self._bind(number, node, self.buffers[segment.buffers[position]])
        for node in joint.graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in backward:
                self._copy(number, node)
        copies = self.copies[number]
        for index, node in enumerate(joint.outputs):
            self.between[SegmentOutput(segment=number, output=index)] = copies[_without_copy(node)]
        for result, index in segment.returns.items():
            self.outputs[result] = copies[joint.outputs[index]]
        for position, node in joint.mutated.items():
            self.mutated[segment.buffers[position]] = copies[node]

    def _backward(self, number: int, segment: Segment, joint: Joint, backward: set[fx.Node]) -> None:
        for index, node in joint.tangents.items():
            value = SegmentOutput(segment=number, output=index)
            for result, output in segment.returns.items():
                if output == index and result in self.tangents:
                    tangent = self.tangents[result]
                    tangent.meta = tangent.meta or {"val": node.meta["val"]}
                    move_to(tangent, (next(self.fresh),))
                    later = self.grads.pop(value, None)
                    self._add(self.grads, value, tangent)
                    if later is not None:
                        self._add(self.grads, value, later)
            self._bind(number, node, self.grads[value])
        for node in joint.graph.nodes:
            if node.op in ("call_function", "get_attr") and node in backward:
                self._copy(number, node)
        for position, node in joint.grad_inputs.items():
            source = segment.inputs[position]
            grad = self._dense(self.copies[number][node])
            if isinstance(source, SegmentOutput):
                self._add(self.grads, source, grad)
            else:
                self._add(self.grad_inputs, source, grad)
        for position, node in joint.grad_params.items():
            self._add(self.grad_params, segment.params[position], self.copies[number][node])

    def _add(self, grads: dict[_Key, fx.Node], key: _Key, grad: fx.Node) -> None:
        if key in grads:
            grad = self._call(_aten.add.Tensor, (grads[key], grad), grad)
        grads[key] = grad

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


def _bound(placeholders: Mapping[int, fx.Node]) -> dict[int, fx.Node]:
    """Return the placeholders that some segment uses."""
    return {position: node for position, node in placeholders.items() if "val" in node.meta}


def _without_copy(node: fx.Node) -> fx.Node:
    """Return an output without the copy around it, if it is contiguous anyway."""
    source = node.all_input_nodes[0] if node.target is _aten.clone.default else node
    value = source.meta["val"]
    return source if isinstance(value, Tensor) and value.is_contiguous() else node
