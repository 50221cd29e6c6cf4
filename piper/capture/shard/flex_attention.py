"""Writes one device's part of `flex_attention`, whose mask and scores are functions of indices.

The functions get a sample, a head, a query and a key by their places in the whole sequence. A device that
holds some of the heads or queries numbers its own from zero, so its functions look each up in a table of
places first. Blocks of the mask are those that the device's queries touch.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument, map_arg

from piper.capture.shard.attention_operators import SEQUENCE
from piper.capture.shard.compute_rules import aligned
from piper.capture.shard.shape_rules import operand
from piper.capture.shard.sharder import Sharder, aten
from piper.ir.sharding import REPLICATE, Shard

FLEX = torch.ops.higher_order.flex_attention
SCORE, BLOCKS, SCALE, OPTIONS, SCORE_READS, MASK_READS = range(3, 9)  # positions of its arguments
BLOCKS_STOP = 10  # behind its blocks by queries and by keys: counts and indices, partial then full
INDICES = 4  # a sample, a head, a query, a key


def attend(d: Sharder, node: fx.Node, local: Sequence[fx.Node], have: Shard) -> fx.Node:
    """Write the attention of a device's own samples, heads or queries. local: its queries, keys, values."""
    places = own_places(d, d.shape(operand(node))[have.dim], have)
    mask = _through_table(d, f"{node.name}_mask", _blocks(node)[-1], have.dim)
    blocks = (*_own_blocks(d, node, have, places), *_sizes(node), mask)
    score = _through_table(d, f"{node.name}_score", node.args[SCORE], 1 + have.dim)
    score_reads, mask_reads = ((*reads(d, node, position), places) for position in (SCORE_READS, MASK_READS))
    return d.emit(
        FLEX, (*local, score, blocks, node.args[SCALE], node.args[OPTIONS], score_reads, mask_reads)
    )


def own_places(d: Sharder, size: int, have: Shard) -> fx.Node:
    """Write the places in the whole of what a device holds of one dimension."""
    return d.take(_counted(d, size), have.at(0))


def _counted(d: Sharder, size: int) -> fx.Node:
    options: dict[str, Argument] = {"dtype": torch.int32, "device": d.device}
    return d.emit(aten.arange.default, (size,), options)


def reads(d: Sharder, node: fx.Node, position: int) -> list[fx.Node]:
    """Return the tensors that a function of indices reads, whole on every device."""
    tensors = node.args[position]
    assert isinstance(tensors, list | tuple)
    return [d.to(x, REPLICATE, varies=True) for x in tensors if isinstance(x, fx.Node)]


def changes_scores(d: Sharder, node: fx.Node) -> bool:
    """Return whether an attention changes scores: its function returns something else than the score."""
    score, *_ = (graph := _function(d, node.args[SCORE]).graph).find_nodes(op="placeholder")
    return graph.output_node().args[0] is not score


def mask_rows(d: Sharder, node: fx.Node, have: Shard) -> fx.Node:
    """Write which keys each of a device's own queries sees, for one sample or head where all are alike."""
    query, key = operand(node), operand(node, 1)
    function = _function(d, _blocks(node)[-1])
    samples, heads, *_ = function.graph.find_nodes(op="placeholder")
    counts = [
        d.shape(query)[0] if samples.users else 1,
        d.shape(query)[1] if heads.users else 1,
        d.shape(query)[SEQUENCE],
        d.shape(key)[SEQUENCE],
    ]
    indices = [_counted(d, count) for count in counts]
    indices[have.dim] = own_places(d, d.shape(query)[have.dim], have)
    tensors = reads(d, node, MASK_READS)
    whole: Callable[..., Tensor] = function
    for dim in reversed(range(INDICES)):
        of_one = [0 if dim == other else None for other in range(INDICES)]
        whole = torch.vmap(whole, in_dims=(*of_one, *(None for _ in tensors)))
    given = [*indices, *tensors]
    with d.fakes:
        traced = make_fx(whole)(*(x.meta["example_value"] for x in given))
    return _spliced(d, traced, given)


def _spliced(d: Sharder, traced: fx.GraphModule, given: Sequence[fx.Node]) -> fx.Node:
    """Write the operations of a traced function of some values, and return its result."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, fx.Node] = dict(zip(placeholders, given, strict=True))
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            setattr(d.recording.root, str(node.target), getattr(traced, str(node.target)))
            values[node] = d.attribute(str(node.target))
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = d.emit(node.target, args, kwargs)
    result = traced.graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    return values[result]


def _blocks(node: fx.Node) -> Sequence[Argument]:
    """Return what an attention knows of its mask: the lengths, the blocks, and at last the function."""
    blocks = node.args[BLOCKS]
    assert isinstance(blocks, list | tuple)
    return blocks


def _sizes(node: fx.Node) -> tuple[Argument, ...]:
    """Return what stands between the blocks of a mask and its function: orders of writing, their sizes."""
    between = _blocks(node)[BLOCKS_STOP:-1]
    return (*(None for _ in between[:-2]), *between[-2:])  # another order of writing is as good


def _own_blocks(d: Sharder, node: fx.Node, have: Shard, places: fx.Node) -> tuple[Argument, ...]:
    """Return the lengths and blocks of a mask for a device's own samples, heads or queries."""
    blocks = _blocks(node)
    lengths, tensors = blocks[:2], blocks[2:BLOCKS_STOP]
    if have.dim != SEQUENCE:
        return (*lengths, *(_aligned(d, x, have) for x in tensors))
    whole = [d.to(x, REPLICATE, varies=True) if isinstance(x, fx.Node) else None for x in tensors]
    first = whole[0]
    assert first is not None
    if int(first.meta["example_value"].shape[-1]) == 1:  # one block is that of any queries
        return (*lengths, *whole)
    count = int(places.meta["example_value"].shape[0])
    by_queries = [x for x in whole[:4] if x is not None]
    own = d.emit(torch.ops.piper.own_blocks.default, (by_queries, places, blocks[-3]))
    half = len(by_queries)
    apart = [d.emit(operator.getitem, (own, index)) for index in range(2 * half)]
    absent = [None] * (4 - half)
    return (count, lengths[1], *apart[:half], *absent, *apart[half:], *absent)


def _aligned(d: Sharder, x: Argument, have: Shard) -> fx.Node | None:
    """Return a device's own samples or heads of a tensor of blocks, which may have one for all."""
    if not isinstance(x, fx.Node):
        return None
    return d.to(x, aligned(d, x, have, len(d.shape(x))), varies=True)


def _function(d: Sharder, attribute: Argument) -> fx.GraphModule:
    """Return the graph of a function that an attention is given."""
    assert isinstance(attribute, fx.Node)
    module = getattr(d.recording.root, str(attribute.target))
    assert isinstance(module, fx.GraphModule)
    return module


def _through_table(d: Sharder, name: str, attribute: Argument, position: int) -> fx.Node:
    """Write a function of indices that looks one of them up in a table, which it reads after all others."""
    function, graph = _function(d, attribute), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(function.graph, copies)
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        table = graph.placeholder(f"places_{d.request.axis}")
    index = placeholders[position]
    with graph.inserting_after(table):
        place = graph.call_function(aten.index.Tensor, (table, [index]))
    index.replace_all_uses_with(place, delete_user_cb=lambda user: user is not place)
    graph.output(result)
    setattr(d.recording.root, f"{name}_{d.request.axis}", fx.GraphModule(function, graph))
    return d.attribute(f"{name}_{d.request.axis}")


@torch.library.custom_op("piper::own_blocks", mutates_args=())
def own_blocks(blocks: Sequence[Tensor], places: Tensor, size: int) -> list[Tensor]:
    """Return the blocks of a sparse mask for some queries: by blocks of queries, then by those of keys.

    blocks: the count and the indices of the blocks of keys that each block of queries sees in part; then, if
    the mask knows them, of those that it sees whole. places: of the queries in the whole sequence. size: of a
    block of queries. Queries from several blocks see the keys that any of those sees.
    """
    partial, *full = (_dense_blocks(*blocks[i : i + 2]) for i in range(0, len(blocks), 2))
    seen = partial | full[0] if full else partial
    number = torch.arange(len(places), device=places.device) // size
    source = places.long() // size

    def counted(dense: Tensor) -> Tensor:
        """Count the queries of each new block whose old block sees a block of keys."""
        shape = [*dense.shape[:2], -(-len(places) // size), dense.shape[3]]
        rows = dense.index_select(2, source).int()
        return rows.new_zeros(shape).index_add_(2, number, rows)

    in_any = counted(seen) > 0
    queries = torch.bincount(number).view(1, 1, -1, 1)
    dense = [in_any]
    if full:
        in_all = (counted(full[0]) == queries) & (queries == size)
        dense = [in_any & ~in_all, in_all]
    apart = [*dense, *(each.transpose(-1, -2) for each in dense)]
    return [tensor for each in apart for tensor in _sparse_blocks(each)]


def _dense_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which blocks of keys each block of queries sees."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    dense = torch.zeros(indices.shape, dtype=torch.int32, device=indices.device)
    return dense.scatter_add_(-1, indices.long(), listed.int()) > 0


def _sparse_blocks(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row sees, and their indices, before those of all others."""
    order = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.int().contiguous()


@own_blocks.register_fake
def _(blocks: Sequence[Tensor], places: Tensor, size: int) -> list[Tensor]:
    batch, columns = blocks[1].shape[:2], blocks[1].shape[3]
    rows = -(-places.shape[0] // size)
    by_queries = ((*batch, rows), (*batch, rows, columns))
    by_keys = ((*batch, columns), (*batch, columns, rows))
    shapes = [shape for each in (by_queries, by_keys) for _ in blocks[::2] for shape in each]
    return [blocks[0].new_empty(shape) for shape in shapes]
