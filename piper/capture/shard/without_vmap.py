"""Writes what runs under vmap as operations on whole tensors, which have rules.

`create_block_mask` and the masks of `transformers` call a function of single indices under vmap.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg


def without_vmap(graph: fx.Graph, root: nn.Module, bundles: Mapping[fx.Node, int]) -> None:
    """Replace each bundle of a graph by the operations that vmap makes of it, in place."""
    for bundle in dict.fromkeys(bundles.values()):
        nodes = [node for node in graph.nodes if bundles.get(node) == bundle]
        inside = set(nodes)
        reads = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        traced = _traced(nodes, reads, results, root)
        _replace(graph, traced, reads, results)
        for node in reversed(nodes):
            graph.erase_node(node)


def _traced(
    nodes: Sequence[fx.Node], reads: Sequence[fx.Node], results: Sequence[fx.Node], root: nn.Module
) -> fx.GraphModule:
    """Trace some nodes of a graph as a function of what they read."""
    alone = fx.Graph()
    copies = {node: alone.placeholder(node.name) for node in reads}
    for node in nodes:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(tuple(copies[node] for node in results))
    examples = [node.meta["example_value"] for node in reads]
    mode = next(value.fake_mode for value in examples if hasattr(value, "fake_mode"))
    with mode, torch.no_grad():
        given = [torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device) for x in examples]
        return make_fx(fx.Interpreter(fx.GraphModule(root, alone)).run)(*given)


def _replace(
    graph: fx.Graph, traced: fx.GraphModule, reads: Sequence[fx.Node], results: Sequence[fx.Node]
) -> None:
    """Write a traced function before the first result that it has, and let all read its results."""
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), reads, strict=True))
    with graph.inserting_before(results[0]):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = graph.call_function(node.target, args, kwargs)
                copies[node].meta = {**results[0].meta, "example_value": node.meta["val"]}
    output = next(iter(traced.graph.find_nodes(op="output"))).args[0]
    assert isinstance(output, list | tuple)
    for old, new in zip(results, output, strict=True):
        assert isinstance(new, fx.Node)
        old.replace_all_uses_with(copies[new])
