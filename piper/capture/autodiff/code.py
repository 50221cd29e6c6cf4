"""The code of a distinct chunk: what each phase reads, writes and costs, and how to build it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, fx

from piper.capture.autodiff.partition import Partition
from piper.capture.compile.operators import EMBEDDING_GRAD
from piper.capture.cost.aliases import is_view, memory_of
from piper.capture.cost.estimate import Cost, cost_of
from piper.capture.cost.section import KINDS, Kind, Section, Write
from piper.capture.trace.effects import draws
from piper.capture.trace.sizes import SymbolicSizes
from piper.capture.trace_errors import line_of
from piper.ir.chunk import Phase, TensorSpec
from piper.process.usercode import LINES

_aten = torch.ops.aten
PhaseCode = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The reads, writes and cost of one phase. Values go by position in the chunk."""

    reads: Mapping[Kind, tuple[int, ...]]
    grad_inputs: tuple[int, ...] = ()
    grad_params: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()  # which of grad_params are written into given memory, by place among them
    cost: Cost = field(default_factory=lambda: Cost(flops=0, bytes_moved=0, workspace=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The values that a chunk's phases exchange. Positions are those of its params, buffers and outputs."""

    outputs: tuple[TensorSpec, ...]
    saved: tuple[TensorSpec, ...]
    carried: tuple[TensorSpec, ...]
    storages: tuple[int, ...]
    mutated: tuple[int, ...]
    random: bool
    phases: Mapping[Phase, Signature]
    keeps_inputs: bool = False  # the saved values hold on to the inputs


class Code(Protocol):
    """The code of one distinct chunk."""

    shape: Shape  # what the chunk's phases read and write

    def build(self, phase: Phase) -> PhaseCode:
        """Make the callable of a phase."""
        ...


class GraphCode:
    """Code as explicit graphs, one for each phase."""

    def __init__(self, partition: Partition, *, compiled: bool = False, flat: bool = False) -> None:
        """Build the code of a chunk.

        compiled: it will be, so it costs what compiled code does. flat: its backward writes parameter
        gradients into memory that the caller gives, where it can.
        """
        self.partition, self.compiled = partition, compiled
        self.shape = _shape_of(partition, compiled, flat)

    def build(self, phase: Phase) -> fx.GraphModule:
        """Copy the phase's part of the joint graph into a module of its own. Its arguments are `examples`."""
        section = self.partition.sections[phase]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for kind in KINDS:
            for position, node in section.reads.get(kind, {}).items():
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
        signature = self.shape.phases[phase]
        return tuple(len(signature.grad_inputs) + place for place in signature.in_place)

    def examples(self, phase: Phase) -> list[Tensor]:
        """Return the fake tensors that a phase was traced with."""
        return [node.meta["val"] for node in self.partition.sections[phase].read_nodes]


def _written_in_place(section: Section, sizes: SymbolicSizes) -> tuple[int, ...]:
    """Return which of a phase's parameter gradients can be written into given memory, by their positions.

    These are products, and gradients of tables. None, if they are the smaller part in bytes: the others
    would be copied.
    """
    writes = section.writes[len(section.grad_inputs) :][: len(section.grad_params)]
    taken = [write.node for write in section.writes]
    in_place = [
        place
        for place, write in enumerate(writes)
        if taken.count(write.node) == 1 and _can_be_given_memory(write, section)
    ]
    nbytes = [sizes.nbytes(write.node.meta["val"]) for write in writes]
    return tuple(in_place) if 2 * sum(nbytes[place] for place in in_place) > sum(nbytes) else ()


def _can_be_given_memory(write: Write, section: Section) -> bool:
    """Return whether a gradient is a product or that of a table, in its shape, that nothing else reads."""
    body, node = set(section.body), write.node
    seen: fx.Node | None = None
    while node in body and all(user is seen or user not in body for user in node.users):
        by_count = node.target is EMBEDDING_GRAD and bool(node.args[4])  # of all reads
        if node.target in (_aten.mm.default, EMBEDDING_GRAD) and not by_count:
            gradient, wanted = node.meta["val"], write.node.meta["val"]
            return gradient.shape == wanted.shape and gradient.is_contiguous() and not write.copy
        if not is_view(node):
            return False
        seen, node = node, node.all_input_nodes[0]
    return False


def _shape_of(partition: Partition, compiled: bool, flat: bool) -> Shape:
    joint, sizes = partition.joint, partition.joint.sizes
    kept = [*partition.outputs, *partition.saved]
    index, storages = _storages(partition, kept)
    specs = tuple(
        sizes.spec(node.meta["val"], index.get(memory_of(node), -1) if node.op != "placeholder" else -1)
        for node in kept
    )
    forward = partition.sections["F"]
    phases: dict[Phase, Signature] = {
        name: _signature(name, partition, compiled, flat) for name in partition.sections if name != "BW"
    }
    if "BW" in partition.sections:
        alone = partition.sections["BW"] == partition.sections["B"]  # as no input has a gradient
        phases["BW"] = phases["B"] if alone else _signature("BW", partition, compiled, flat)
    return Shape(
        outputs=specs[: len(partition.outputs)],
        saved=specs[len(partition.outputs) :],
        carried=tuple(sizes.spec(node.meta["val"]) for node in partition.carried),
        storages=storages,
        mutated=tuple(sorted(joint.mutated)),
        random=any(draws(node) for node in forward.body),
        phases=phases,
    )


def _storages(partition: Partition, kept: Sequence[fx.Node]) -> tuple[dict[int, int], tuple[int, ...]]:
    """Number the memory that several values share, or of which a value shows only a part."""
    sizes = partition.joint.sizes
    users: dict[int, list[fx.Node]] = {}
    for node in kept:
        if node.op != "placeholder":  # a buffer is saved as a copy
            users.setdefault(memory_of(node), []).append(node)
    index: dict[int, int] = {}
    bytes_of: list[int] = []
    for storage, nodes in users.items():
        total = max(sizes.storage_bytes(node.meta["val"]) for node in nodes)
        if len(nodes) > 1 or total != sizes.nbytes(nodes[0].meta["val"]):
            index[storage] = len(bytes_of)
            bytes_of.append(total)
    return index, tuple(bytes_of)


def _signature(phase: Phase, partition: Partition, compiled: bool, flat: bool) -> Signature:
    section, sizes = partition.sections[phase], partition.joint.sizes
    lasting = partition.sections["BW"].read_nodes if phase == "BI" else []
    in_place = _written_in_place(section, sizes) if compiled and flat else ()
    given = [section.writes[len(section.grad_inputs) + place].node for place in in_place]
    return Signature(
        reads={kind: tuple(section.reads.get(kind, {})) for kind in KINDS},
        grad_inputs=section.grad_inputs,
        grad_params=section.grad_params,
        in_place=in_place,
        cost=cost_of(section, sizes, compiled=compiled, lasting=lasting, given=given),
    )
