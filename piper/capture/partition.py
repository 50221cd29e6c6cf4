"""Cuts a joint graph into forward, backward, and the backward's two halves.

F holds what the forward ran. BI is what the input gradients need, BW what only the weight gradients need. A
value that F made and a backward reads is saved; one that BI made and BW reads is carried. Parameters, buffers
and inputs are never among them, nor are views: a view is made again from what it shows, which costs nothing
and does not keep a parameter's memory alive between the phases.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, fx

from piper.capture.aliases import memory_of, recomputable, tensors_in
from piper.capture.joint import Joint
from piper.ir.chunk import Phase

_aten = torch.ops.aten
Kind = Literal["inputs", "params", "buffers", "saved", "carried", "tangents"]
KINDS: tuple[Kind, ...] = ("inputs", "params", "buffers", "saved", "carried", "tangents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A result of a phase. `copy`: it must not share memory with what it was made from."""

    node: fx.Node
    copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a joint graph that one phase runs. Positions are those of the piece."""

    reads: Mapping[Kind, Mapping[int, fx.Node]]
    body: Sequence[fx.Node]
    lengths: Mapping[fx.Node, tuple[fx.Node, int]]  # a size, as an axis of something the phase reads
    writes: Sequence[Write]
    grad_inputs: tuple[int, ...] = ()
    grad_params: tuple[int, ...] = ()

    @property
    def read_nodes(self) -> list[fx.Node]:
        return [node for kind in KINDS for node in self.reads.get(kind, {}).values()]


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
    """What a phase reads and runs, while it is found out."""

    reads: set[fx.Node]
    body: set[fx.Node]
    lengths: dict[fx.Node, tuple[fx.Node, int]]


def partition(joint: Joint) -> Partition:
    """Cut a joint graph into its phases."""
    return _Partitioner(joint).run()


class _Partitioner:
    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.order = {node: position for position, node in enumerate(joint.module.graph.nodes)}
        self.backward = backward_nodes(joint)
        self.overwritten = {joint.buffers[position] for position in joint.mutated}

    @cached_property
    def state(self) -> Mapping[fx.Node, tuple[Kind, int]]:
        """What each placeholder is."""
        groups: tuple[tuple[Kind, Mapping[int, fx.Node]], ...] = (
            ("inputs", self.joint.inputs),
            ("params", self.joint.params),
            ("buffers", self.joint.buffers),
            ("tangents", self.joint.tangents),
        )
        return {node: (kind, position) for kind, nodes in groups for position, node in nodes.items()}

    def run(self) -> Partition:
        joint = self.joint
        inner, weight = list(joint.grad_inputs.values()), list(joint.grad_params.values())
        first = self._closure(inner)
        whole = self._needs([*inner, *weight])
        second = self._needs(weight, made=first)
        carried = self._sorted(node for node in second.reads if node in self.backward and node.op != "placeholder")
        half = self._needs([*inner, *carried])
        outputs = [self._result(node) for node in joint.outputs]
        if not weight and not inner:
            sections: dict[Phase, Section] = {}
            saved: list[fx.Node] = []
        else:
            saved = self._sorted(
                node for needs in (whole, half, second) for node in needs.reads if self._saved(node)
            )
            sections = {
                "B": self._section(whole, saved, [], inner + weight, self._gradients(inner + weight, whole)),
                "BI": self._section(half, saved, [], inner, self._gradients([*carried, *inner], half, len(carried))),
                "BW": self._section(second, saved, carried, weight, self._gradients(weight, second)),
            }
        forward = self._forward(outputs, saved)
        return Partition(
            joint=joint, outputs=outputs, saved=saved, carried=carried, sections={"F": forward, **sections}
        )

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(set(nodes), key=self.order.__getitem__)

    def _closure(self, roots: Iterable[fx.Node]) -> set[fx.Node]:
        """The backward nodes that the roots need, and with a tuple all its parts."""
        stack, reached = list(roots), set()
        while stack:
            node = stack.pop()
            if node in self.backward and node not in reached:
                reached.add(node)
                stack += node.all_input_nodes
        parts = [user for node in reached for user in node.users if not isinstance(node.meta.get("val"), Tensor)]
        return reached | {user for user in parts if user in self.backward and isinstance(user.meta.get("val"), Tensor)}

    def _saved(self, node: fx.Node) -> bool:
        """Whether a value that a backward reads comes out of F."""
        return node in self.overwritten or (node.op != "placeholder" and node not in self.backward)

    def _needs(self, roots: Sequence[fx.Node], made: Collection[fx.Node] = ()) -> _Needs:
        """What a backward phase reads and runs to make the roots, where another has already made `made`."""
        needs = _Needs(set(), set(), {})
        stack = list(roots)
        lengths: list[fx.Node] = []
        while stack or lengths:
            if not stack:
                size = lengths.pop()
                if found := _axis_with(size, needs.reads):
                    needs.lengths[size] = found
                else:
                    needs.body.add(size)
                    stack += size.all_input_nodes
                continue
            node = stack.pop()
            if node in needs.body or node in needs.reads or node in lengths:
                continue
            if node.target is _aten.sym_size.int:
                lengths.append(node)
            elif node.op == "placeholder":
                needs.reads.add(node)
            elif not isinstance(node.meta.get("val"), Tensor | tuple | list) or recomputable(node):
                needs.body.add(node)
                stack += node.all_input_nodes
            elif node in self.backward and node not in made:
                needs.body.add(node)
                stack += node.all_input_nodes
            else:
                needs.reads.add(node)
        return needs

    def _result(self, node: fx.Node) -> fx.Node:
        """An output without the copy that was put around it, where it can do without."""
        source = node.all_input_nodes[0] if node.target is _aten.clone.default else node
        while source.target is _aten.detach.default:
            source = source.all_input_nodes[0]
        read = {memory_of(placeholder) for placeholder in self.state}
        plain = isinstance(source.meta["val"], Tensor) and source.meta["val"].is_contiguous()
        return source if plain and memory_of(source) not in read else node

    def _section(
        self,
        needs: _Needs,
        saved: Sequence[fx.Node],
        carried: Sequence[fx.Node],
        roots: Sequence[fx.Node],
        writes: Sequence[Write],
    ) -> Section:
        reads: dict[Kind, dict[int, fx.Node]] = {kind: {} for kind in KINDS}
        for node in self._sorted(needs.reads):
            if self._saved(node):
                reads["saved"][saved.index(node)] = node
            elif node in self.state:
                kind, position = self.state[node]
                reads[kind][position] = node
            else:
                reads["carried"][carried.index(node)] = node
        made = set(roots)
        return Section(
            reads={kind: dict(sorted(found.items())) for kind, found in reads.items()},
            body=self._sorted(needs.body),
            lengths=needs.lengths,
            writes=writes,
            grad_inputs=tuple(index for index, node in self.joint.grad_inputs.items() if node in made),
            grad_params=tuple(index for index, node in self.joint.grad_params.items() if node in made),
        )

    def _gradients(self, nodes: Sequence[fx.Node], needs: _Needs, carried: int = 0) -> list[Write]:
        """The results of a backward phase. Each has memory of its own: others will add to it, or free it.

        The first `carried` nodes are what BI hands to BW; they come last in what it returns.
        """
        taken = {memory_of(node) for node in needs.reads if not self._is_carried(node)}
        writes = []
        for node in nodes:
            value = node.meta["val"]
            whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()
            late = len(writes) < carried  # carried values keep their strides: they never leave the device
            copy = memory_of(node) in taken or not (whole or late)
            writes.append(Write(node=node, copy=copy))
            taken.add(memory_of(node))
        return [*writes[carried:], *writes[:carried]]

    def _is_carried(self, node: fx.Node) -> bool:
        return node in self.backward and node.op != "placeholder"

    def _forward(self, outputs: Sequence[fx.Node], saved: Sequence[fx.Node]) -> Section:
        mutated = [node for _, node in sorted(self.joint.mutated.items())]
        body: set[fx.Node] = set()
        reads: set[fx.Node] = set()
        stack = [*outputs, *saved, *mutated]
        while stack:
            node = stack.pop()
            if node.op == "placeholder":
                reads.add(node)
            elif node not in body:
                body.add(node)
                stack += node.all_input_nodes
        known: dict[Kind, dict[int, fx.Node]] = {kind: {} for kind in KINDS}
        for node in reads:
            kind, position = self.state[node]
            known[kind][position] = node
        kept = {memory_of(node) for node in [*reads, *outputs, *saved]}
        return Section(
            reads={kind: dict(sorted(found.items())) for kind, found in known.items()},
            body=self._sorted(body),
            lengths={},
            writes=[
                *(Write(node=node) for node in outputs),
                *(Write(node=node, copy=node.op == "placeholder") for node in saved),
                *(Write(node=node, copy=memory_of(node) in kept) for node in mutated),
            ],
        )


def backward_nodes(joint: Joint) -> set[fx.Node]:
    """The nodes that the backward ran: those torch marks so, and all that depends on a gradient."""
    found = set(joint.tangents.values())
    for node in joint.module.graph.nodes:
        marked = node.op == "call_function" and node.meta.get("partitioner_tag") == "is_backward"
        if marked or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _axis_with(size: fx.Node, reads: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """An axis of something a phase reads anyway whose length is the wanted size."""
    wanted = size.meta["val"]
    for node in sorted(reads, key=lambda read: read.name):
        for tensor in tensors_in(node):
            for axis, length in enumerate(tensor.shape):
                if isinstance(length, torch.SymInt) and length.node.expr == wanted.node.expr:
                    return node, axis
    return None
