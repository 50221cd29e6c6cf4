"""Rules for operations that compute: pointwise work, products, tables, norms, reductions."""

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg

from piper.capture.divide.divider import Divider, Rule, aten
from piper.capture.divide.division import NoRuleError
from piper.capture.divide.layout import WHOLE, Divided, Layout, Sum
from piper.capture.divide.reshapes import value_of
from piper.capture.divide.shape_rules import argument, getitem, number, operand, unchanged

ADDS = frozenset((aten.add.Tensor, aten.sub.Tensor))
SCALES = frozenset((aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar))
LINEAR = frozenset(
    (aten.neg.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)
)
CASTS = frozenset((aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.to.other))
POINTWISE = CASTS | frozenset(
    (
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.dropout.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.silu.default,
        aten.gelu.default,
        aten.__and__.Tensor,
        aten.__or__.Tensor,
    )
)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether an operation treats every element by itself."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target in POINTWISE
    )


def by_family(node: fx.Node) -> Rule | None:
    """Return the rule of an operation that has none of its own."""
    if node.target is operator.getitem:
        return getitem
    return pointwise if is_pointwise(node) else None


def aligned(d: Divider, source: fx.Node, layout: Divided, rank: int) -> Layout:
    """Return how an operand of broadcast work is held when the result of `rank` dimensions has `layout`."""
    shape = d.shape(source)
    dim = layout.dim - (rank - len(shape))
    return WHOLE if dim < 0 or shape[dim] == 1 else layout.at(dim)


def spread(d: Divider, sources: list[fx.Node], rank: int) -> Divided | None:
    """Return the division of broadcast work over operands: that of the largest divided one."""
    found = [(len(d.shape(s)), s) for s in sources if isinstance(d.layout(s), Divided)]
    if not found:
        return None
    source = max((s for _, s in found), key=lambda s: torch.Size(d.shape(s)).numel())
    have = d.layout(source)
    assert isinstance(have, Divided)
    return have.at(have.dim + rank - len(d.shape(source)))


def pointwise(d: Divider, node: fx.Node) -> None:
    """Divide work on single elements as its operands are; a sum passes through what is linear."""
    sources = node.all_input_nodes
    if _stays_sum(d, node, sources):
        return
    rank = len(d.shape(node))
    layout = spread(d, sources, rank)
    for source in sources:
        if isinstance(d.layout(source), Sum):
            like = aligned(d, source, layout, rank) if layout is not None else None
            d.settle(source, like if isinstance(like, Divided) else None)
    layout = spread(d, sources, rank)
    if layout is None:
        d.plain(node)
        return
    local = {s: d.to(s, aligned(d, s, layout, rank), varies=True) for s in sources}
    made = d.emit(node.target, map_arg(node.args, local.__getitem__), map_arg(node.kwargs, local.__getitem__))
    d.done(node, made, layout)


def _stays_sum(d: Divider, node: fx.Node, sources: list[fx.Node]) -> bool:
    """Write linear work on terms of a sum: the result is such a sum too."""
    if any(d.layout(source) != Sum() for source in sources) or not _is_linear(node):
        return False
    made = d.emit(
        node.target, map_arg(node.args, d.local.__getitem__), map_arg(node.kwargs, d.local.__getitem__)
    )
    d.done(node, made, Sum())
    return True


def _is_linear(node: fx.Node) -> bool:
    """Return whether an operation on sums is the sum of the operation on their terms.

    A number may scale a sum; added, every device would add it. A sum may not scale a sum, nor itself.
    """
    numbers = not isinstance(node.args[1], fx.Node) if len(node.args) > 1 else True
    if node.target in SCALES:
        return numbers
    if node.target in ADDS:
        return not numbers
    if node.target not in LINEAR:
        return False
    made, given = value_of(node), value_of(operand(node))
    assert isinstance(made, Tensor) and isinstance(given, Tensor)
    exact = not given.is_floating_point() and made.dtype is not torch.bool
    return made.is_floating_point() or exact  # a cast of terms to integers rounds each of them


def linear(d: Divider, node: fx.Node) -> None:
    """Multiply by a weight of [out, in]: divided outputs need whole inputs, divided inputs give a sum."""
    x, weight = node.args[0], node.args[1]
    bias = argument(node, 2, "bias")
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    _product(d, node, x, weight, bias if isinstance(bias, fx.Node) else None, out_dim=0)


def addmm(d: Divider, node: fx.Node) -> None:
    """Multiply by a weight of [in, out] and add a bias."""
    bias, x, weight = node.args[:3]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(bias, fx.Node)
    if node.kwargs or len(d.shape(bias)) != 1:
        raise NoRuleError("only a bias of one dimension is added, unscaled")
    _product(d, node, x, weight, bias, out_dim=1)


def _product(
    d: Divider, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, out_dim: int
) -> None:
    d.settle(x)
    held, given = d.layout(weight), d.layout(x)
    last = len(d.shape(x)) - 1
    if isinstance(held, Sum):
        held = d.settle(weight)
    if held == WHOLE:
        out: Layout = given if isinstance(given, Divided) and given.dim != last else WHOLE
        divided = isinstance(out, Divided)
        varies = divided or d.varies([x, weight])
        args = [d.to(x, out, varies=varies), d.to(weight, WHOLE, varies=varies)]
        args += [d.to(bias, WHOLE, varies=varies)] if bias is not None else []
        d.done(node, _multiply(d, node, args), out)
    elif isinstance(held, Divided) and held.dim == out_dim:
        args = [d.to(x, WHOLE, varies=True), d.local[weight]]
        args += [d.to(bias, held.at(0), varies=True)] if bias is not None else []
        d.done(node, _multiply(d, node, args), held.at(last))
    else:
        assert isinstance(held, Divided)
        want = held.at(last)
        if isinstance(given, Divided) and given != want:
            raise NoRuleError(
                f"its input is divided along dimension {given.dim}, its weight along the inputs"
            )
        args = [d.to(x, want, varies=True), d.local[weight]]
        if bias is not None:  # one device of the group adds it, so that the sum has it once
            first = d.emit(aten.eq.Scalar, (d.place(), 0))
            args.append(d.emit(aten.mul.Tensor, (d.to(bias, WHOLE, varies=True), first)))
        d.done(node, _multiply(d, node, args), Sum())


def _multiply(d: Divider, node: fx.Node, args: list[fx.Node]) -> fx.Node:
    """Write a product with its bias, if there is one."""
    if node.target is aten.linear.default:
        return d.emit(aten.linear.default, tuple(args))
    if len(args) == 3:
        return d.emit(aten.addmm.default, (args[2], args[0], args[1]))
    return d.emit(aten.mm.default, tuple(args))


def matmul(d: Divider, node: fx.Node) -> None:
    """Multiply two values: divided along a batch dimension, a free dimension of one, or the summed one."""
    a, b = node.args[0], node.args[1]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    d.settle(a)
    d.settle(b)
    sa, sb = d.shape(a), d.shape(b)
    if len(sa) < 2 or len(sb) < 2:
        raise NoRuleError("it multiplies a vector")
    la, lb, rank = d.layout(a), d.layout(b), len(d.shape(node))
    wa: Layout = WHOLE
    wb: Layout = WHOLE
    out: Layout = WHOLE
    if (isinstance(la, Divided) and la.dim == len(sa) - 1) or (
        isinstance(lb, Divided) and lb.dim == len(sb) - 2
    ):
        have = la if isinstance(la, Divided) and la.dim == len(sa) - 1 else lb
        assert isinstance(have, Divided)
        wa, wb, out = have.at(len(sa) - 1), have.at(len(sb) - 2), Sum()
    elif isinstance(la, Divided) and la.dim == len(sa) - 2:
        wa, out = la, la.at(rank - 2)
    elif isinstance(lb, Divided) and lb.dim == len(sb) - 1:
        wb, out = lb, lb.at(rank - 1)
    else:
        out = spread(d, [a, b], rank) or WHOLE
        assert isinstance(out, Divided)
        wa, wb = aligned(d, a, out, rank), aligned(d, b, out, rank)
    made = d.emit(node.target, (d.to(a, wa, varies=True), d.to(b, wb, varies=True)))
    d.done(node, made, out)


def embedding(d: Divider, node: fx.Node) -> None:
    """Look up rows of a table: a whole one, or one divided by columns or by rows."""
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    held, given = d.layout(table), d.layout(index)
    rest = node.args[2:]
    if argument(node, 3, "scale_grad_by_freq", False) and (given != WHOLE or held not in (WHOLE, Divided(1))):
        raise NoRuleError("how often an index occurs, by which it scales gradients, is not counted")
    if held == WHOLE:
        made = d.emit(node.target, (d.to(table, WHOLE, varies=True), d.local[index], *rest))
        d.done(node, made, given)
    elif isinstance(held, Divided) and held.dim == 1:
        made = d.emit(node.target, (d.local[table], d.to(index, WHOLE, varies=True), *rest))
        d.done(node, made, held.at(len(d.shape(node)) - 1))
    else:
        assert isinstance(held, Divided)
        whole = d.to(index, WHOLE, varies=True)
        rows, outside = own_rows(d, whole, held, d.shape(table)[0])
        found = d.emit(aten.embedding.default, (d.local[table], rows))
        padding = number(argument(node, 2, "padding_idx", -1))
        if padding >= 0:  # the padding row has no gradient
            fixed = d.emit(aten.detach.default, (found,))
            pad = d.emit(aten.unsqueeze.default, (d.emit(aten.eq.Scalar, (whole, padding)), -1))
            found = d.emit(aten.where.self, (pad, fixed, found))
        d.done(node, masked(d, found, outside), Sum())


def own_rows(d: Divider, index: fx.Node, held: Divided, size: int) -> tuple[fx.Node, fx.Node]:
    """Return indices within a device's own rows of a divided table, and which of them lie outside."""
    if held.blocks > 1 or held.zigzag:
        raise NoRuleError("the rows of a table are divided in one run")
    rows = size // d.degree
    shifted = d.emit(aten.sub.Tensor, (index, d.emit(aten.mul.Tensor, (d.place(), rows))))
    low, high = d.emit(aten.lt.Scalar, (shifted, 0)), d.emit(aten.ge.Scalar, (shifted, rows))
    return d.emit(aten.clamp.default, (shifted, 0, rows - 1)), d.emit(aten.logical_or.default, (low, high))


def masked(d: Divider, found: fx.Node, outside: fx.Node) -> fx.Node:
    """Return values with zeros in place of those from outside a device's own rows."""
    more = found.meta["example_value"].dim() - outside.meta["example_value"].dim()
    for _ in range(more):
        outside = d.emit(aten.unsqueeze.default, (outside, -1))
    return d.emit(aten.masked_fill.Scalar, (found, outside, 0.0))


def glu(d: Divider, node: fx.Node) -> None:
    """Multiply half of a dimension by gates in its other half: a sharded one is sharded half by half."""
    x = operand(node)
    have = d.settle(x)
    if not isinstance(have, Divided):
        d.plain(node)
        return
    dim = number(argument(node, 1, "dim", -1)) % len(d.shape(x))
    if have.dim == dim and (have.blocks % 2 or have.zigzag):
        raise NoRuleError("its two halves lie on different devices")
    layout = replace(have, blocks=have.blocks // 2) if have.dim == dim else have
    d.done(node, unchanged(d, node), layout)


def gather(d: Divider, node: fx.Node) -> None:
    """Pick elements along a dimension: each device in its own rows, or in its part of that dimension."""
    x, index = node.args[0], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(index, fx.Node)
    dim = number(node.args[1]) % len(d.shape(x))
    have = d.settle(x)
    if isinstance(have, Divided) and have.dim == dim:
        rows, outside = own_rows(d, d.to(index, WHOLE, varies=True), have, d.shape(x)[dim])
        d.done(node, masked(d, d.emit(node.target, (d.local[x], dim, rows)), outside), Sum())
        return
    layout = have if isinstance(have, Divided) else d.layout(index)
    if (
        not isinstance(layout, Divided)
        or layout.dim == dim
        or d.shape(x)[layout.dim] != d.shape(index)[layout.dim]
    ):
        raise NoRuleError("its index is divided in another way than its values")
    made = d.emit(node.target, (d.to(x, layout, varies=True), dim, d.to(index, layout, varies=True)))
    d.done(node, made, layout)


def norm(d: Divider, node: fx.Node) -> None:
    """Normalise over the last dimensions, which must be whole."""
    x = operand(node)
    layout = d.settle(x)
    sizes = node.args[1]
    assert isinstance(sizes, list | tuple)
    if isinstance(layout, Divided) and layout.dim >= len(d.shape(x)) - len(sizes):
        raise NoRuleError("it normalises over the divided dimension")
    varies = isinstance(layout, Divided) or d.varies(node.all_input_nodes)
    local = {s: d.local[s] if s is x else d.to(s, WHOLE, varies=varies) for s in node.all_input_nodes}
    made = d.emit(node.target, map_arg(node.args, local.__getitem__), map_arg(node.kwargs, local.__getitem__))
    d.done(node, made, layout)


def dims_of(d: Divider, node: fx.Node) -> tuple[int, ...]:
    """Return the dimensions that a reduction goes over."""
    rank = len(d.shape(operand(node)))
    dims: Argument = argument(node, 1, "dim")
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims:
        return tuple(range(rank))
    return tuple(number(dim) % rank for dim in dims)


def reduction(d: Divider, node: fx.Node) -> None:
    """Reduce other dimensions locally; over the divided one every device has a term."""
    x = operand(node)
    if isinstance(d.layout(x), Sum):
        if (
            node.target in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
            and d.layout(x) == Sum()
        ):
            made = d.emit(node.target, (d.local[x], *node.args[1:]), node.kwargs)
            d.done(node, made, Sum())
            return
        d.settle(x)
    have = d.layout(x)
    if not isinstance(have, Divided):
        d.plain(node)
        return
    dims = () if node.target in NO_DIMS else dims_of(d, node)
    dims = dims or tuple(range(len(d.shape(x))))
    keep = len(d.shape(node)) == len(d.shape(x))
    made = d.emit(node.target, (d.local[x], *node.args[1:]), node.kwargs)
    if have.dim not in dims:
        lost = 0 if keep else sum(dim < have.dim for dim in dims)
        d.done(node, made, have.at(have.dim - lost))
    elif node.target in MEANS:
        d.done(node, d.emit(aten.div.Scalar, (made, d.degree)), Sum())
    elif node.target in MAXIMA:
        _maximum(d, node, x, made, dims)
    else:
        d.done(node, made, Sum())


def _maximum(d: Divider, node: fx.Node, x: fx.Node, made: fx.Node, dims: tuple[int, ...]) -> None:
    """Take a maximum over the sharded dimension; all elements that are equal to it share its gradient."""
    fixed = d.emit(aten.detach.default, (made,))
    if not d.trains(made):
        d.done(node, fixed, Sum("max"))
        return
    shape = [1 if dim in dims else size for dim, size in enumerate(d.shape(x))]
    largest = d.emit(aten.reshape.default, (d.collect(fixed, Sum("max")), shape))
    equal = d.emit(aten.eq.Tensor, (d.local[x], largest))
    counts = d.emit(aten.to.dtype, (equal, made.meta["example_value"].dtype))
    count = d.collect(d.emit(aten.sum.dim_IntList, (counts, list(dims), True)), Sum())
    shares = d.emit(aten.div.Tensor, (d.emit(aten.where.ScalarOther, (equal, d.local[x], 0.0)), count))
    keep = len(d.shape(node)) == len(d.shape(x))
    d.done(node, d.emit(aten.sum.dim_IntList, (shares, list(dims), keep)), Sum())


MEANS = frozenset((aten.mean.default, aten.mean.dim))
MAXIMA = frozenset((aten.amax.default,))
NO_DIMS = frozenset((aten.sum.default, aten.mean.default))

RULES: dict[object, Rule] = {
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.matmul.default: matmul,
    aten.mm.default: matmul,
    aten.bmm.default: matmul,
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.glu.default: glu,
    aten.layer_norm.default: norm,
    aten.rms_norm.default: norm,
    aten.sum.default: reduction,
    aten.sum.dim_IntList: reduction,
    aten.mean.default: reduction,
    aten.mean.dim: reduction,
    aten.amax.default: reduction,
}
