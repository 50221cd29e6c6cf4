"""The code of a distinct chunk: what each phase reads, writes and costs, and how to build it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from piper.capture.autodiff.partition import Partition
from piper.capture.autodiff.remat import Choice
from piper.capture.compile.operators import EMBEDDING_GRAD
from piper.capture.cost.aliases import is_view, memory_of
from piper.capture.cost.estimate import cost_of
from piper.capture.cost.workspace import KINDS, Section, Write
from piper.capture.trace.assemble import CapturedChunk
from piper.capture.trace.effects import draws
from piper.capture.trace.graph_walks import upstream
from piper.capture.trace.sizes import SymbolicSizes
from piper.capture.trace_errors import line_of
from piper.ir.chunk import PHASES, Chunk, Phase, PhaseSpec, TensorSpec
from piper.ir.grouping import grouped
from piper.process.usercode import LINES

_aten = torch.ops.aten
PhaseCode = Callable[..., tuple[Tensor, ...]]


class GraphCode:
    """Code as explicit graphs, one for each phase."""

    def __init__(
        self,
        partition: Partition,
        choice: Choice | None = None,  # of the saved values, where there was one
        *,
        compiled: bool = False,  # it will be, so it costs what compiled code does
        flat: bool = False,  # its backward writes gradients into given memory, where it can
    ) -> None:
        self.partition, self.choice, self.compiled = partition, choice, compiled
        self.given: dict[Phase, tuple[int, ...]] = {}  # gradients of parameters written into given memory
        self.costs: dict[Phase, PhaseSpec] = {}
        sections, sizes = partition.sections, partition.joint.sizes
        for phase, section in sections.items():
            if phase == "BW" and section == sections["B"]:  # as no input has a gradient
                self.given[phase], self.costs[phase] = self.given["B"], self.costs["B"]
                continue
            self.given[phase] = _written_in_place(section, sizes) if compiled and flat else ()
            self.costs[phase] = cost_of(
                section,
                sizes,
                compiled=compiled,
                lasting=sections["BW"].read_nodes if phase == "BI" else (),
                given=[section.writes[place].node for place in self.in_place(phase)],
            )

    def build(self, phase: Phase) -> fx.GraphModule:
        """Copy the phase's part of the joint graph into a module of its own. Its arguments are `examples`."""
        section = self.partition.sections[phase]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for kind in KINDS:
            for position, node in section.reads[kind].items():
                copies[node] = graph.placeholder(f"{kind}_{position}")
                copies[node].meta = {"val": node.meta["val"]}
        for size, (node, axis) in section.lengths.items():
            copies[size] = graph.call_function(torch.ops.aten.sym_size.int, (copies[node], axis))
        for node in section.body:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {"val": node.meta.get("val")}  # not the stacks: large
            if node.target is torch.ops.aten.view.default and not self.compiled:
                # Some kernels lay their results out otherwise than a trace says: such a view needs a copy.
                copies[node].target = torch.ops.aten.reshape.default
        results = []
        for write in section.writes:
            result = copies[write.node]
            if write.copy:
                result = graph.call_function(
                    torch.ops.aten.clone.default, (result,), {"memory_format": torch.contiguous_format}
                )
            results.append(result)
        graph.output(tuple(results))
        module = fx.GraphModule(self.partition.joint.root, graph)
        module.meta[LINES] = {copies[node].name: line for node in section.body if (line := line_of(node))}
        return module

    def in_place(self, phase: Phase) -> tuple[int, ...]:
        """Return the results of a phase that compiled code writes into given memory, by position."""
        return tuple(len(self.partition.sections[phase].grad_inputs) + place for place in self.given[phase])

    def examples(self, phase: Phase) -> list[Tensor]:
        """Return the fake tensors that a phase was traced with."""
        return [node.meta["val"] for node in self.partition.sections[phase].read_nodes]

    def complete(self, chunk: Chunk) -> Chunk:
        """Return a chunk that has this code with what its phases read, write and cost."""
        partition, joint = self.partition, self.partition.joint
        kept, forward = [*partition.outputs, *partition.saved], partition.sections["F"]
        index, storages = _storages(kept, joint.sizes)
        specs = tuple(
            joint.sizes.spec(
                node.meta["val"], index.get(memory_of(node), -1) if node.op != "placeholder" else -1
            )
            for node in kept
        )
        phases = {phase: self._spec(chunk, phase) for phase in PHASES if phase in partition.sections}
        mutated = tuple(chunk.buffers[i] for i in sorted(joint.mutated))
        return replace(
            chunk,
            params=phases["F"].params,
            buffers=tuple(dict.fromkeys((*phases["F"].buffers, *mutated))),  # some are only overwritten
            mutated=mutated,
            outputs=specs[: len(partition.outputs)],
            saved=specs[len(partition.outputs) :],
            carried=tuple(joint.sizes.spec(node.meta["val"]) for node in partition.carried),
            storages=storages,
            phases=phases,
            random=any(draws(node) for node in forward.body),
        )

    def _spec(self, chunk: Chunk, phase: Phase) -> PhaseSpec:
        section = self.partition.sections[phase]
        grad_params = tuple(chunk.params[i] for i in section.grad_params)
        return replace(
            self.costs[phase],
            inputs=tuple(section.reads["inputs"]),
            params=tuple(chunk.params[i] for i in section.reads["params"]),
            buffers=tuple(chunk.buffers[i] for i in section.reads["buffers"]),
            saved=tuple(section.reads["saved"]),
            carried=tuple(section.reads["carried"]),
            tangents=tuple(section.reads["tangents"]),
            grad_inputs=section.grad_inputs,
            grad_params=grad_params,
            in_place=tuple(grad_params[place] for place in self.given[phase]),
        )


def _written_in_place(section: Section, sizes: SymbolicSizes) -> tuple[int, ...]:
    """Return which of a phase's parameter gradients can be written into given memory, by their positions."""
    # These are products, and gradients of tables. None, if they are the smaller part in bytes: the others
    # would be copied.
    body, writes = set(section.body), section.writes[len(section.grad_inputs) :][: len(section.grad_params)]
    taken = [write.node for write in section.writes]
    in_place = [
        place
        for place, write in enumerate(writes)
        if taken.count(write.node) == 1 and _can_be_given_memory(write, body)
    ]
    nbytes = [sizes.nbytes(write.node.meta["val"]) for write in writes]
    return tuple(in_place) if 2 * sum(nbytes[place] for place in in_place) > sum(nbytes) else ()


def _can_be_given_memory(write: Write, body: Collection[fx.Node]) -> bool:
    """Return whether a gradient is a product or that of a table, in its shape, that nothing else reads."""
    node, seen = write.node, None
    while node in body and all(user is seen or user not in body for user in node.users):
        by_count = node.target is EMBEDDING_GRAD and bool(node.args[4])  # of all reads
        if node.target in (_aten.mm.default, EMBEDDING_GRAD) and not by_count:
            gradient, wanted = node.meta["val"], write.node.meta["val"]
            return gradient.shape == wanted.shape and gradient.is_contiguous() and not write.copy
        if not is_view(node):
            return False
        seen, node = node, node.all_input_nodes[0]
    return False


def _storages(kept: Sequence[fx.Node], sizes: SymbolicSizes) -> tuple[dict[int, int], tuple[int, ...]]:
    """Number the memory that several values share, or of which a value shows only a part."""
    # A buffer is saved as a copy.
    users = grouped((memory_of(node), node) for node in kept if node.op != "placeholder")
    index: dict[int, int] = {}
    bytes_of: list[int] = []
    for storage, nodes in users.items():
        total = max(sizes.storage_bytes(node.meta["val"]) for node in nodes)
        if len(nodes) > 1 or total != sizes.nbytes(nodes[0].meta["val"]):
            index[storage] = len(bytes_of)
            bytes_of.append(total)
    return index, tuple(bytes_of)


@dataclass(slots=True)
class Tape:
    """The state that F saves for the backward: outputs with their autograd graph, and leaves."""

    outputs: list[Tensor]
    leaves: list[Tensor]


class EagerCode:
    """Code of a chunk that cannot be traced backward: its captured forward under eager autograd.

    F saves autograd's graph in one opaque object. BI runs the whole backward and carries the gradients of
    weights, which BW returns. The split gains nothing, but schedules that split the backward can run it.
    """

    def __init__(
        self, piece: CapturedChunk, trained: Sequence[bool], tangents: Sequence[int], why: str
    ) -> None:
        assert piece.body is not None
        self.body, self.why = piece.body, why
        self.tangents = tuple(tangents)
        self.mutated = [piece.chunk.buffers.index(name) for name in piece.chunk.mutated]
        results = next(iter(reversed(self.body.graph.nodes))).args[0]
        given = self.body.graph.find_nodes(op="placeholder")
        needed = upstream(results[index] for index in tangents)  # what the differentiated outputs depend on
        reached = {position for position, node in enumerate(given) if node in needed}
        wants = [tensor.requires_grad for tensor in piece.inputs]
        self.grad_inputs = tuple(i for i, wanted in enumerate(wants) if wanted and i in reached)
        first = len(piece.inputs)
        self.grad_params = tuple(i for i, wanted in enumerate(trained) if wanted and first + i in reached)
        self.trains = bool(self.tangents and (self.grad_inputs or self.grad_params))
        params = (self.body.params[i] for i in self.grad_params if self.trains)
        self.carried = tuple(map(SymbolicSizes().spec, params))

    def complete(self, chunk: Chunk) -> Chunk:
        forward = PhaseSpec(
            inputs=tuple(range(len(chunk.inputs))), params=chunk.params, buffers=chunk.buffers
        )
        if not self.trains:
            return replace(chunk, phases={"F": forward})
        inner = PhaseSpec(saved=(0,), tangents=self.tangents, grad_inputs=self.grad_inputs)
        weights = tuple(chunk.params[i] for i in self.grad_params)
        outer = PhaseSpec(carried=tuple(range(len(weights))), grad_params=weights)
        return replace(
            chunk,
            saved=(TensorSpec(shape=(), dtype="object", nbytes=0),),
            carried=self.carried,
            kept_inputs={"B": forward.inputs, "BI": forward.inputs},
            phases={"F": forward, "B": replace(inner, grad_params=weights), "BI": inner, "BW": outer},
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
        self.module, self.tangents, self.trains = module, code.tangents, code.trains
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


Code = GraphCode | EagerCode  # of one distinct chunk
