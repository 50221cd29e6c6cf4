"""Orders the nodes of a compiled backward so that a kernel writes forward values again beside its own result.

A compiler fuses a value into a kernel if nothing that the kernel waits for comes between them.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from piper.capture.cost.aliases import cheap, memory_readers, read_from_memory, recomputable
from piper.capture.trace.graph_walks import reached, ready_first, upstream


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
        return node in inside and cheap(node) and not read_from_memory(node, inside.__contains__)

    return upstream([result], fused)


def _awaits_itself(node: fx.Node, awaited: Mapping[fx.Node, set[fx.Node]]) -> bool:
    return node in reached(awaited.get(node, ()), lambda other: awaited.get(other, ()))
