"""Rules for operations that work along some dimensions and do the same for every index of the others.

A dimension that such an operation does not work along may be sharded: each device does its own part. Along
the dimension that is sharded it is refused, because no device holds all that is compared, shifted or summed.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.layout import OwnOrder
from piper.capture.shard.shape_rules import number, of_sharded, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument
from piper.ir.sharding import REPLICATE, Shard

# Of an operation on a value of some rank, the dimensions it works along
Worked = Callable[[fx.Node, int], set[int]]


def along(worked: Worked) -> Rule:
    """Make the rule of an operation from the dimensions that it works along.

    Operands of the rank of the first are sharded as it is, others are whole: indices, weights of a norm.
    """

    def apply(d: Sharder, node: fx.Node) -> None:
        if d.whole(node):
            return
        x, sources = operand(node), node.all_input_nodes
        rank = len(d.shape(x))
        layout = next(have for s in sources if isinstance(have := d.layout(s), Shard))
        peers = [s for s in sources if len(d.shape(s)) == rank]
        if layout.dim in worked(node, rank):
            raise NoRuleError("it works along the sharded dimension")
        if any(len(d.shape(s)) != rank for s in sources if isinstance(d.layout(s), Shard)):
            raise NoRuleError("an index or a weight of it is sharded")
        if len({d.shape(s)[layout.dim] for s in peers}) > 1:
            raise NoRuleError("its operands have different sizes along the sharded dimension")
        local = {s: d.to(s, layout if s in peers else REPLICATE, varies=True) for s in sources}
        result = d.replay(node, local)
        values = result.meta["example_value"]
        reduced = (values if isinstance(values, torch.Tensor) else values[0]).dim() < rank
        lost = sum(dim < layout.dim for dim in worked(node, rank)) if reduced else 0
        d.done(node, result, layout.at(layout.dim - lost))

    return apply


def named(node: fx.Node, rank: int) -> set[int]:
    """Return the dimensions that an argument names; none or an empty list are all of them."""
    values = (argument(node, name) for name in ("dim", "dims", "dimension"))
    dims = next((given for given in values if given is not None), None)
    if dims is None or dims == []:
        return set(range(rank))
    each = dims if isinstance(dims, list | tuple) else [dims]
    return {number(dim) % max(rank, 1) for dim in each}  # a number has no dimension, and takes 0 and -1


def last(count: int) -> Worked:
    """Make a function that returns the last dimensions, so many."""
    return lambda node, rank: set(range(rank - count, rank))


def trailing(node: fx.Node, rank: int) -> set[int]:
    """Return the last dimensions, as many as sizes are given."""
    sizes = node.args[1]
    assert isinstance(sizes, list | tuple)
    return last(len(sizes))(node, rank)


def padded(node: fx.Node, rank: int) -> set[int]:
    """Return the dimensions to which a padding adds or from which it takes: it lists the last one first."""
    widths = node.args[1]
    assert isinstance(widths, list | tuple)
    return {rank - 1 - i // 2 for i, width in enumerate(widths) if width != 0}


@of_sharded
def repeated(d: Sharder, node: fx.Node, x: fx.Node, have: Shard) -> None:
    """Repeat a value along dimensions, new ones of which come first, or each of its elements along one."""
    rank, times, dim = len(d.shape(x)), node.args[1], argument(node, "dim")
    layout = have
    if isinstance(times, list | tuple):
        at = have.dim + len(times) - rank
        layout = replace(have, dim=at, blocks=have.blocks * number(times[at]))
    elif dim is None and rank > 1:
        raise NoRuleError("it works along the sharded dimension")
    if isinstance(have, OwnOrder) and d.shape(node)[layout.dim] != d.shape(x)[have.dim]:
        raise NoRuleError("each device has its rows in an order of its own")
    more = () if isinstance(times, list | tuple) else (dim,)
    d.done(node, d.emit(node.target, (d.local[x], times, *more)), layout)


@of_sharded
def glu(d: Sharder, node: fx.Node, x: fx.Node, have: Shard) -> None:
    """Multiply half of a dimension by gates in its other half: a sharded one is sharded half by half."""
    dim = number(argument(node, "dim")) % len(d.shape(x))
    if have.dim == dim and (have.blocks % 2 or have.zigzag):
        raise NoRuleError("its two halves lie on different devices")
    layout = replace(have, blocks=have.blocks // 2) if have.dim == dim else have
    d.done(node, d.replay(node), layout)


ALONG: dict[object, Worked] = {
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.amin.default), named),
    **dict.fromkeys((aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction), named),
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.median.dim, aten.prod.dim_int), named),
    **dict.fromkeys((aten.any.dim, aten.all.dim, aten.logsumexp.default), named),
    **dict.fromkeys((aten.kthvalue.default, aten.topk.default, aten.cosine_similarity.default), named),
    **dict.fromkeys((aten.linalg_vector_norm.default, aten.index_select.default), named),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default), named),
    **dict.fromkeys((aten.flip.default, aten.roll.default, aten.unfold.default), named),
    **dict.fromkeys((aten.repeat_interleave.self_int, aten.slice_scatter.default), named),
    **dict.fromkeys((aten.tril.default, aten.triu.default, aten.linalg_qr.default), last(2)),
    **dict.fromkeys((aten._linalg_eigh.default, aten._linalg_svd.default), last(2)),
    aten.view_as_complex.default: last(1),
    aten.view_as_real.default: last(0),  # a dimension is added behind the others
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), trailing),
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), padded),
}
RULES: dict[object, Rule] = {
    **{target: along(worked) for target, worked in ALONG.items()},
    aten.glu.default: glu,
    **dict.fromkeys((aten.repeat.default, aten.repeat_interleave.self_int), repeated),
}
