"""Cuts a joint graph into forward, backward, and the backward's two halves.

F holds what the forward ran. BI is what the input gradients need, BW what only the weight gradients need. A
value that F made and a backward reads is saved; one that BI made and BW reads is carried. Parameters, buffers
and inputs are never among them, nor are views. A view is recomputed from its base, which costs nothing and
does not keep a parameter's memory alive between the phases.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from piper.capture.autodiff.joint import Joint
from piper.capture.cost.aliases import (
    cheap,
    is_view,
    memory_of,
    memory_readers,
    recomputable,
    takes_one,
    tensors_in,
)
from piper.capture.cost.workspace import KINDS, Kind, Section, Write
from piper.capture.trace.graph_walks import downstream, reached, ready_first, upstream
from piper.ir.chunk import Phase

_aten = torch.ops.aten
Places = Mapping[fx.Node, tuple[Kind, int]]  # where the values that phases read come from


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A chunk's phases over one joint graph."""

    joint: Joint
    outputs: Sequence[fx.Node]
    saved: Sequence[fx.Node]
    carried: Sequence[fx.Node]
    sections: Mapping[Phase, Section]


@dataclass(slots=True)
class _Needs:
    """The nodes that a phase reads and runs, while they are collected."""

    reads: set[fx.Node]
    body: set[fx.Node]
    lengths: dict[fx.Node, tuple[fx.Node, int]]


class Partitioner:
    """Finds what each phase of one joint graph reads, runs and writes.

    A backward recomputes the values that it needs and may not save.
    """

    def __init__(
        self,
        joint: Joint,
        keep: Collection[fx.Node] | None = None,  # values of the forward that may be saved; None: all
        writers: Mapping[fx.Node, fx.Node] | None = None,  # recomputed values, and results made beside them
    ) -> None:
        self.joint, self.keep, self.writers = joint, keep, writers or {}
        self.order = {node: position for position, node in enumerate(joint.graph.nodes)}
        self.backward = backward_nodes(joint)
        self.overwritten = {joint.buffers[position] for position in joint.mutated}
        self.given = _places(
            inputs=joint.inputs, params=joint.params, buffers=joint.buffers, tangents=joint.tangents
        )
        self.casts = casts(joint, self.backward)

    def run(self) -> Partition:
        joint = self.joint
        inner, weight = list(joint.grad_inputs.values()), list(joint.grad_params.values())
        whole = self._needs([*inner, *weight])
        second = self._needs(weight, computed=self._computed_by_inner(inner))
        carried = self._sorted(node for node in second.reads if self._carried(node))
        half = self._needs([*inner, *carried])
        reads = [node for needs in (whole, half, second) for node in needs.reads]
        saved = self._sorted(node for node in reads if self._saved(node))
        outputs = [self._result(node) for node in joint.outputs]
        sections: dict[Phase, Section] = {"F": self._forward(outputs, saved)}
        if inner or weight:
            handed = _places(saved=dict(enumerate(saved)), carried=dict(enumerate(carried)))
            places = {**self.given, **handed}
            sections["B"] = self._backward(whole, places, joint.grad_inputs, joint.grad_params)
            sections["BI"] = self._backward(half, places, joint.grad_inputs, {}, carried)
            sections["BW"] = self._backward(second, places, {}, joint.grad_params)
        return Partition(joint=joint, outputs=outputs, saved=saved, carried=carried, sections=sections)

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(set(nodes), key=self.order.__getitem__)

    def _late(self, body: Collection[fx.Node]) -> list[fx.Node]:
        """Return a backward's nodes in order, with each value recomputed right before its first read."""
        placed: dict[fx.Node, None] = {}
        for node in self._sorted(body):
            if node in self.backward:
                missing = upstream([node], lambda source: source in body and source not in placed)
                placed.update(dict.fromkeys(self._sorted(missing)))
        return [*placed, *(node for node in self._sorted(body) if node not in placed)]

    def _within(self, body: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the values that a phase writes again in the kernel of one of its own results."""
        # A value that a recomputed operation of the forward reads from memory is needed before.

        def early(node: fx.Node) -> bool:
            return node in body and node not in self.backward

        return {
            value: result
            for value, result in self.writers.items()
            if value in body and result in body and not any(memory_readers(value, early))
        }

    def _computed_by_inner(self, inner: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the values that BI computes and BW need not compute again."""
        # These are BI's own values, those it recomputes at some cost, and those that its kernels write again.
        needed = upstream(inner, self.backward.__contains__)
        tuples = [node for node in needed if isinstance(node.meta.get("val"), tuple | list)]
        # Phases exchange tensors: of a tuple all items are computed.
        computed = needed.union(user for node in tuples for user in node.users if user in self.backward)
        if self.keep is None:
            return computed
        computed |= {value for value, result in self.writers.items() if result in computed}
        again = {node for node in self._needs(inner).body if node not in self.backward and not cheap(node)}
        return computed | again | {user for node in again for user in node.users if takes_one(user)}

    def _saved(self, node: fx.Node) -> bool:
        """Return whether a value that a backward phase reads is saved by F."""
        if node.op == "placeholder" or node in self.backward:
            return node in self.overwritten
        return self.keep is None or node in self.keep

    def _carried(self, node: fx.Node) -> bool:
        """Return whether a value that BW reads is handed on by BI."""
        return node.op != "placeholder" and not self._saved(node)

    def _needs(self, roots: Sequence[fx.Node], computed: Collection[fx.Node] = ()) -> _Needs:
        """Return what a backward phase reads and runs for the roots. `computed`: by another phase."""
        needs = _Needs(set(), set(), {})
        stack, lengths = list(roots), dict[fx.Node, None]()
        while stack or lengths:
            if not stack:  # now that the reads are known, take sizes off one of them
                size, _ = lengths.popitem()
                if axis := _axis_with(size, needs.reads):
                    needs.lengths[size] = axis
                else:
                    needs.body.add(size)
                    stack += size.all_input_nodes
                continue
            node = stack.pop()
            if node in needs.body or node in needs.reads or node in needs.lengths:
                continue
            if node.target is _aten.sym_size.int:
                lengths[node] = None
            elif node.op != "placeholder" and self._runs(node, computed):
                needs.body.add(node)
                stack += node.all_input_nodes
            else:
                needs.reads.add(node)
        return needs

    def _runs(self, node: fx.Node, computed: Collection[fx.Node]) -> bool:
        """Return whether a backward phase computes a value itself, rather than reads it."""
        if not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return True  # a number
        if recomputable(node) or node in self.casts:
            return True
        return node not in computed and not self._saved(node)

    def _result(self, node: fx.Node) -> fx.Node:
        """Return an output without the copy around it, where the copy is not needed."""
        source = node.all_input_nodes[0] if node.target is _aten.clone.default else node
        while source.target is _aten.detach.default:
            source = source.all_input_nodes[0]
        given = {memory_of(placeholder) for placeholder in self.given}
        return source if source.meta["val"].is_contiguous() and memory_of(source) not in given else node

    def _backward(
        self,
        needs: _Needs,
        places: Places,
        grad_inputs: Mapping[int, fx.Node],
        grad_params: Mapping[int, fx.Node],
        hands_on: Sequence[fx.Node] = (),
    ) -> Section:
        # Each result has its own memory, because readers add to it or free it. A carried value keeps its
        # strides, since it stays on the device. A gradient may be sent and is dense.
        taken = {memory_of(node) for node in needs.reads if not self._carried(node)}
        taken |= {memory_of(node) for node in hands_on}
        writes = []
        for node in (*grad_inputs.values(), *grad_params.values()):
            writes.append(Write(node=node, copy=memory_of(node) in taken or not _fills_memory(node)))
            taken.add(memory_of(node))
        body, writers = order_recomputed(self._late(needs.body), self._within(needs.body))
        return Section(
            reads=_by_kind(needs.reads, places),
            body=body,
            lengths=needs.lengths,
            writers=writers,
            writes=[*writes, *(Write(node=node) for node in hands_on)],
            grad_inputs=tuple(grad_inputs),
            grad_params=tuple(grad_params),
        )

    def _forward(self, outputs: Sequence[fx.Node], saved: Sequence[fx.Node]) -> Section:
        mutated = [self.joint.mutated[position] for position in sorted(self.joint.mutated)]
        needed = upstream([*outputs, *saved, *mutated])
        body = {node for node in needed if node.op != "placeholder"}
        kept = {memory_of(node) for node in [*outputs, *saved, *self.given]}
        return Section(
            reads=_by_kind(needed - body, self.given),
            body=self._sorted(body),
            lengths={},
            writes=[
                *(Write(node=node) for node in outputs),
                *(Write(node=node, copy=node.op == "placeholder") for node in saved),
                *(Write(node=node, copy=memory_of(node) in kept) for node in mutated),
            ],
        )


def _places(**groups: Mapping[int, fx.Node]) -> Places:
    """Return the kind and the position of each value, of values by kind and position."""
    return {node: (kind, position) for kind in KINDS for position, node in groups.get(kind, {}).items()}


def _by_kind(nodes: Collection[fx.Node], places: Places) -> dict[Kind, dict[int, fx.Node]]:
    """Return what a phase reads by its kind, and in order by its position."""
    reads: dict[Kind, dict[int, fx.Node]] = {kind: {} for kind in KINDS}
    for node in sorted(nodes, key=lambda node: places[node][1]):
        kind, position = places[node]
        reads[kind][position] = node
    return reads


def _fills_memory(node: fx.Node) -> bool:
    """Return whether a tensor is contiguous and fills its storage."""
    value = node.meta["val"]
    size: int = value.numel() * value.element_size()
    return bool(value.is_contiguous() and value.untyped_storage().nbytes() == size)


def casts(joint: Joint, backward: Collection[fx.Node]) -> set[fx.Node]:
    """Return the casts of parameters: were they saved, each microbatch would hold a copy of the weights."""
    params = set(joint.params.values())
    copied: set[fx.Node] = set()
    for node in joint.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(s in params or s in copied for s in sources):
            copies = node.target in (_aten._to_copy.default, _aten.clone.default) or is_view(node)
            if copies and node not in backward:
                copied.add(node)
    return copied


def backward_nodes(joint: Joint) -> set[fx.Node]:
    """Return the nodes of the backward: those torch marks so, and all that depend on a gradient."""
    called = (node for node in joint.graph.nodes if node.op == "call_function")
    marked = (node for node in called if node.meta.get("partitioner_tag") == "is_backward")
    return downstream([*joint.tangents.values(), *marked])


def _axis_with(size: fx.Node, reads: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return an axis of a tensor the phase reads whose length is the wanted size. None: there is none."""
    wanted = size.meta["val"]
    for node in sorted(reads, key=lambda read: read.name):
        for tensor in tensors_in(node):
            for axis, length in enumerate(tensor.shape):
                if isinstance(length, torch.SymInt) and length.node.expr == wanted.node.expr:
                    return node, axis
    return None


def order_recomputed(
    body: Sequence[fx.Node], writers: Mapping[fx.Node, fx.Node]
) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """Return a body with each value that is written again next to its writer, and its readers behind.

    Return too the writers that can be used. A value that its writer's kernel waits for stays where it is.
    """
    used = dict(writers)
    while used:
        awaited = _awaited(body, used)
        ordered = ready_first(awaited)
        if len(ordered) == len(body):
            return ordered, used
        stuck = {node: awaited[node] for node in awaited.keys() - set(ordered)}
        circular = (v for v in body if v in used and any(_awaits_itself(n, stuck) for n in (v, used[v])))
        del used[next(circular)]
    return list(body), {}


def _awaited(body: Sequence[fx.Node], writers: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes of a body that each of them has to wait for."""
    inside = set(body)
    awaited = {node: set(node.all_input_nodes) & inside for node in body}
    kernels = {writer: _kernel(writer, writers, inside) for writer in writers.values()}
    for value, writer in writers.items():
        kernel = kernels[writer]
        if value in kernel:  # the writer reads it, and so is behind it
            awaited[value] |= {source for node in kernel for source in awaited[node]} - kernel
        else:
            awaited[value] |= awaited[writer]
        for reader in memory_readers(value, inside.__contains__):
            awaited[reader].add(writer)
    return awaited


def _kernel(result: fx.Node, writers: Mapping[fx.Node, fx.Node], inside: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are fused into the kernel that writes a result."""

    def fused(node: fx.Node) -> bool:
        if node is result:
            return True
        if node in inside and (writers.get(node) is result or recomputable(node)):
            return True
        return node in inside and cheap(node) and not any(memory_readers(node, inside.__contains__))

    return upstream([result], fused)


def _awaits_itself(node: fx.Node, awaited: Mapping[fx.Node, set[fx.Node]]) -> bool:
    return node in reached(awaited.get(node, ()), lambda other: awaited.get(other, ()))
