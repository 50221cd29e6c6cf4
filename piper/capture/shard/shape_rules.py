"""Rules for operations that move elements, or that do the same for every index of some dimensions.

A dimension that an operation does not work along may be sharded: each device does its own part. Along the
dimension that is sharded it is refused, because no device holds all that is compared, shifted or summed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from itertools import accumulate, pairwise

import torch
from torch import fx
from torch.fx.node import Argument

from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.layout import RESHAPES, OwnOrder, local_shape, reshaped, slices_of, value_of
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument
from piper.capture.trace.recording import collective, how_of
from piper.ir.chunk import Collective
from piper.ir.sharding import REPLICATE, Partial, Shard

# Of an operation on a value of some rank, the dimensions it works along
Worked = Callable[[fx.Node, int], set[int]]
ShardedRule = Callable[[Sharder, fx.Node, fx.Node, Shard], None]


def operand(node: fx.Node, position: int = 0) -> fx.Node:
    """Return a tensor that an operation reads: by position, the first where it reads one."""
    source = node.args[position]
    assert isinstance(source, fx.Node)
    return source


def number(value: Argument, default: int = 0) -> int:
    """Return an argument that is a whole number."""
    if value is None:
        return default
    assert isinstance(value, int)
    return value


def of_sharded(rule: ShardedRule, *, moves: bool = False) -> Rule:
    """Make a rule from one for a sharded operand, which gets that operand and its layout. A sum is taken.

    moves: the operation only moves elements, so a pending sum passes through it as it is.
    """

    @wraps(rule)
    def apply(d: Sharder, node: fx.Node) -> None:
        source = operand(node)
        have = d.layout(source) if moves else d.settle(source)
        if isinstance(have, Shard):
            rule(d, node, source, have)
        elif isinstance(have, Partial):
            d.done(node, d.replay(node), have)
        else:
            d.plain(node)

    return apply


moves = partial(of_sharded, moves=True)


def heads_of(old: tuple[int, ...], new: tuple[int, ...], have: Shard) -> int:
    """Return into how many heads a reshape takes the last dimension, which is sharded; 0: into none."""
    apart = len(new) == len(old) + 1 and have.dim == len(old) - 1 and old[-1] == new[-2] * new[-1]
    return new[-2] if apart and new[:-2] == old[:-1] else 0


@moves
def reshape(d: Sharder, node: fx.Node, source: fx.Node, have: Shard) -> None:
    """Shard the dimension of the result that holds the sharded one."""
    new = d.shape(node)
    layout = reshaped(d.shape(source), new, have, d.degree)
    if layout is None:
        if uneven := heads_of(d.shape(source), new, have):
            raise d.uneven_heads(uneven)
        raise NoRuleError(
            f"{list(d.shape(source))} sharded along {have.dim} has no even sharding as {list(new)}"
        )
    local = d.emit(aten.reshape.default, (d.local[source], list(local_shape(new, layout, d.degree))))
    d.done(node, local, layout)


@moves
def permute(d: Sharder, node: fx.Node, source: fx.Node, have: Shard) -> None:
    """Put dimensions into another order, or swap two of them: the last two where none are named."""
    order = list(range(len(d.shape(source))))  # the old dimension of each new one
    dims = node.args[1] if node.target is aten.permute.default else None
    if isinstance(dims, list | tuple):
        order = [order[number(dim)] for dim in dims]
    elif len(order) > 1:
        a, b = map(number, node.args[1:] or (-2, -1))
        order[a], order[b] = order[b], order[a]
    d.done(node, d.replay(node), have.at(order.index(have.dim)))


@moves
def same_shape(d: Sharder, node: fx.Node, _: fx.Node, have: Shard) -> None:
    """Copy or view a value: its layout stays."""
    d.done(node, d.replay(node), have)


@of_sharded
def expand(d: Sharder, node: fx.Node, source: fx.Node, have: Shard) -> None:
    """Repeat along dimensions of size one; the sharded one is not among them."""
    out = d.shape(node)
    layout = have.at(have.dim + len(out) - len(d.shape(source)))
    local = d.emit(node.target, (d.local[source], list(local_shape(out, layout, d.degree))), node.kwargs)
    d.done(node, local, layout)


def piece(d: Sharder, size: int, have: Shard, start: int, stop: int) -> tuple[Shard, int, int]:
    """Return the layout of some whole blocks of a sharded dimension, and their local start and length."""
    block, length = size // have.blocks, stop - start
    if start == 0 and length == size:
        return have, 0, size // slices_of(have, d.degree)
    if have.zigzag or start % block or length % block or not length:
        raise NoRuleError(f"elements {start} to {stop} of a sharded dimension of {size} are not one slice")
    slices = slices_of(have, d.degree)
    return replace(have, blocks=length // block), start // slices, length // slices


@moves
def runs(d: Sharder, node: fx.Node, source: fx.Node, have: Shard) -> None:
    """Take runs of elements of one dimension, one or several: of the sharded one whole blocks."""
    shape, parts = d.shape(source), value_of(node)
    dim = number(argument(node, "dim")) % len(shape)
    if dim != have.dim:
        d.done(node, d.replay(node), have)
        return
    if isinstance(parts, tuple | list):
        ends = [0, *accumulate(int(part.shape[dim]) for part in parts)]
        layouts, _, sizes = zip(*(piece(d, shape[dim], have, *span) for span in pairwise(ends)), strict=True)
        local = d.emit(aten.split_with_sizes.default, (d.local[source], [*sizes], dim))
        d.done(node, local, [*layouts])
        return
    if number(argument(node, "step")) != 1:
        raise NoRuleError("it takes every few elements of a sharded dimension")
    start, *_ = slice(number(argument(node, "start")), None).indices(shape[dim])
    layout, first, length = piece(d, shape[dim], have, start, start + d.shape(node)[dim])
    d.done(node, d.emit(aten.slice.Tensor, (d.local[source], dim, first, first + length)), layout)


@moves
def select(d: Sharder, node: fx.Node, source: fx.Node, have: Shard) -> None:
    """Take one index of a dimension that is not sharded, or each of them."""
    dim = number(argument(node, "dim")) % len(d.shape(source))
    if dim == have.dim:
        apart = node.target is aten.unbind.int
        what = "a sharded dimension apart" if apart else "one element of a sharded dimension"
        raise NoRuleError(f"it takes {what}")
    d.done(node, d.replay(node), have.at(have.dim - (dim < have.dim)))


def getitem(d: Sharder, node: fx.Node) -> None:
    """Take one of several values."""
    source, index = operand(node), number(node.args[1])
    layouts, local = d.layouts[source], d.local[source]
    if isinstance(layouts, list):
        d.done(node, d.emit(node.target, (local, index)), layouts[index])
    elif index == 0:  # of an operation whose other results are not computed
        d.done(node, local, layouts)
    else:
        what = "of attention whose keys travel only the output is computed, not its log-sum-exp"
        raise NoRuleError(what, 'use attention="gather" there')


def cat(d: Sharder, node: fx.Node) -> None:
    """Join along a dimension that is not sharded, or blocks of the sharded one."""
    sources = node.args[0]
    assert isinstance(sources, list | tuple)
    # torch lets an empty vector stand beside values of any shape: a cache that is still empty
    parts = [s for s in sources if isinstance(s, fx.Node) and (d.shape(s) != (0,) or len(d.shape(node)) == 1)]
    layouts = [layout for part in parts if isinstance(layout := d.settle(part), Shard)]
    rank, stacked = len(d.shape(parts[0])), node.target is aten.stack.default
    dim = number(argument(node, "dim")) % (rank + stacked)
    if not layouts:
        d.plain(node)
        return
    have = next((layout for layout in layouts if layout.dim != dim), layouts[0])  # better than to join slices
    if stacked:
        out = have.at(have.dim + (dim <= have.dim))
    elif dim != have.dim:
        out = have
    else:
        blocks = {d.shape(part)[dim] // layout.blocks for part, layout in zip(parts, layouts, strict=False)}
        if len(layouts) < len(parts) or len(blocks) > 1 or any(layout.zigzag for layout in layouts):
            raise NoRuleError("it joins values along their sharded dimension")
        out = Shard(dim, sum(layout.blocks for layout in layouts))
    local = [
        d.local[part] if out.dim == dim and not stacked else d.to(part, have, varies=True) for part in parts
    ]
    d.done(node, d.emit(node.target, (local, dim)), out)


def inner_collective(d: Sharder, node: fx.Node) -> None:
    """Let a collective along another axis, whose groups stride over these, work on each device's slice."""
    source, how = operand(node), how_of(node)
    have = d.layout(source)
    if isinstance(have, Partial) and how.op == "max":
        have = d.settle(source)
    if isinstance(have, Shard):
        how, have = _within_slices(how, have, d.degree)
    d.done(node, d.exchange(d.local[source], how), have)


def _within_slices(how: Collective, have: Shard, degree: int) -> tuple[Collective, Shard]:
    """Return what a collective does on slices of the dimension that it joins or cuts, and their layout then.

    Either each of its blocks lies within one slice, so that a device has its share of the blocks, or each of
    its pieces holds whole blocks of the slices, so that their number grows or shrinks with the pieces.
    """
    for grows, slicing in ((True, how.joined), (False, how.cut)):
        if slicing is None or slicing.dim != have.dim:
            continue
        pieces = 2 if slicing.zigzag else 1  # in a device's own part of a block
        if slicing.blocks % (have.blocks * degree) == 0 and not have.zigzag:
            own = replace(slicing, blocks=slicing.blocks // degree)
            how = replace(how, joined=own) if grows else replace(how, cut=own)
            continue
        if have.zigzag or have.blocks % (slicing.blocks * pieces * (1 if grows else how.degree)):
            raise NoRuleError(f"the axis {how.axis} shards the same dimension in another order")
        have = replace(have, blocks=have.blocks * how.degree if grows else have.blocks // how.degree)
    return how, have


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
    collective: inner_collective,
    **dict.fromkeys((*RESHAPES, aten.squeeze.default, aten.squeeze.dims), reshape),
    **dict.fromkeys((aten.transpose.int, aten.t.default, aten.mT.default, aten.permute.default), permute),
    aten.expand.default: expand,
    aten.slice.Tensor: runs,
    **dict.fromkeys((aten.select.int, aten.unbind.int), select),
    **dict.fromkeys((aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default), runs),
    **dict.fromkeys((aten.cat.default, aten.stack.default), cat),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default), same_shape),
    **dict.fromkeys((aten.clone.default, aten.contiguous.default), same_shape),
    **{target: along(worked) for target, worked in ALONG.items()},
    aten.glu.default: glu,
    **dict.fromkeys((aten.repeat.default, aten.repeat_interleave.self_int), repeated),
}
