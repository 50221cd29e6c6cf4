"""Runs a chunk that cannot be traced backward under eager autograd, behind the same interface.

F saves autograd's graph in one opaque object. BI runs the whole backward and carries the weight gradients,
which BW returns. The split gains nothing, but schedules that split the backward can run the chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from piper.capture.autodiff.code import PhaseCode, Shape, Signature
from piper.capture.cost.section import Kind
from piper.capture.trace.graph_walks import upstream
from piper.capture.trace.piece import CapturedChunk
from piper.ir.chunk import Phase, TensorSpec

_OPAQUE = TensorSpec(shape=(), dtype="object", nbytes=0)


@dataclass(slots=True)
class Tape:
    """The state that F saves for the backward: outputs with their autograd graph, and leaves."""

    outputs: list[Tensor]
    leaves: list[Tensor]


class EagerCode:
    """Code that runs the captured forward under eager autograd."""

    def __init__(
        self,
        piece: CapturedChunk,
        trained: Sequence[bool],
        tangents: Sequence[int],
        params: Sequence[TensorSpec],
    ) -> None:
        assert piece.body is not None
        self.piece, self.body = piece, piece.body
        self.tangents = tuple(tangents)
        self.mutated = [piece.chunk.buffers.index(name) for name in piece.chunk.mutated]
        reached = _reached(self.body.graph, tangents)
        wants = [tensor.requires_grad for tensor in piece.inputs]
        self.grad_inputs = tuple(i for i, wanted in enumerate(wants) if wanted and i in reached)
        first = len(piece.inputs)
        self.grad_params = tuple(i for i, wanted in enumerate(trained) if wanted and first + i in reached)
        self.shape = self._make_shape(params)

    def _make_shape(self, params: Sequence[TensorSpec]) -> Shape:
        piece = self.piece
        everything: dict[Kind, tuple[int, ...]] = {
            "inputs": tuple(range(len(piece.inputs))),
            "params": tuple(range(len(self.body.params))),
            "buffers": tuple(range(len(self.body.buffers))),
        }
        phases: dict[Phase, Signature] = {"F": Signature(reads=everything)}
        trains = bool(self.tangents and (self.grad_inputs or self.grad_params))
        if trains:
            back: dict[Kind, tuple[int, ...]] = {"saved": (0,), "tangents": self.tangents}
            phases["B"] = Signature(reads=back, grad_inputs=self.grad_inputs, grad_params=self.grad_params)
            phases["BI"] = Signature(reads=back, grad_inputs=self.grad_inputs)
            phases["BW"] = Signature(
                reads={"carried": tuple(range(len(self.grad_params)))}, grad_params=self.grad_params
            )
        return Shape(
            outputs=piece.chunk.outputs,
            saved=(_OPAQUE,) if trains else (),
            carried=tuple(params[i] for i in self.grad_params) if trains else (),
            storages=(),
            keeps_inputs=trains,
            mutated=tuple(self.mutated),
            random=piece.chunk.random,
            phases=phases,
        )

    def build(self, phase: Phase) -> PhaseCode:
        match phase:
            case "F":
                return _Forward(self, fx.GraphModule(self.body.root, self.body.graph))
            case "B" | "BI":
                return _backward
            case "BW":
                return lambda *carried: carried


def _backward(tape: Tape, *tangents: Tensor) -> tuple[Tensor, ...]:
    grads = torch.autograd.grad(
        tape.outputs, tape.leaves, tangents, allow_unused=True, materialize_grads=True
    )
    taken = {tangent.untyped_storage().data_ptr() for tangent in tangents}
    results = []
    for grad in grads:  # each result has memory of its own: others will add to it, or free it
        shared = grad.untyped_storage().data_ptr() in taken
        results.append(grad.clone(memory_format=torch.contiguous_format) if shared else grad.contiguous())
        taken.add(results[-1].untyped_storage().data_ptr())
    return tuple(results)


class _Forward:
    """F of an eager chunk. It keeps nothing of the capture, so that it can be sent to other processes."""

    def __init__(self, code: EagerCode, module: fx.GraphModule) -> None:
        first_param = len(code.body.inputs)
        first_buffer = first_param + len(code.body.params)
        self.module, self.tangents, self.trains = module, code.tangents, bool(code.shape.saved)
        self.asked = [*code.grad_inputs, *(first_param + i for i in code.grad_params)]
        self.changed = [first_buffer + i for i in code.mutated]

    def __call__(self, *reads: Tensor) -> tuple[Tensor, ...]:
        asked, changed = self.asked, self.changed
        arguments = [tensor.detach() for tensor in reads]
        for index in asked:
            arguments[index].requires_grad_()
        for index in changed:  # F has no side effects: it returns the new values
            arguments[index] = arguments[index].clone()
        with torch.enable_grad():
            outputs = self.module(*arguments)
        copies = (output.detach().clone(memory_format=torch.contiguous_format) for output in outputs)
        results: list[Tensor] = list(copies)
        if self.trains:
            tape = Tape([outputs[i] for i in self.tangents], [arguments[i] for i in asked])
            results.append(tape)  # type: ignore[arg-type]
        return (*results, *(arguments[index] for index in changed))


def _reached(graph: fx.Graph, tangents: Sequence[int]) -> set[int]:
    """Return the positions of the placeholders that the differentiated outputs depend on."""
    results = next(iter(reversed(graph.nodes))).args[0]
    needed = upstream(results[index] for index in tangents)
    inputs = graph.find_nodes(op="placeholder")
    return {position for position, node in enumerate(inputs) if node in needed}
