"""Rules for softmax and cross entropy: over a sharded vocabulary no device ever holds all logits."""

import math
import operator

import torch
from torch import fx
from torch.fx.node import Argument

import piper.capture.shard.head_operators  # noqa: F401  registers the operators
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.compute_rules import CASTS, from_own_first, masked, own_rows, together
from piper.capture.shard.layout import RESHAPES
from piper.capture.shard.shape_rules import along, named, number, of_sharded, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument
from piper.ir.sharding import REPLICATE, Partial, Shard


@of_sharded
def softmax(d: Sharder, node: fx.Node, x: fx.Node, have: Shard) -> None:
    """Normalise exponentials over a dimension that is whole; over a sharded one in two sums."""
    dim = number(node.args[1]) % len(d.shape(x))
    if dim != have.dim:
        d.done(node, d.replay(node), have)
        return
    if node.target is aten._safe_softmax.default:
        raise NoRuleError("it normalises over the sharded dimension")
    local, total, _ = _exponentials(d, x, dim, varies=True)
    logarithm = node.target in (aten.log_softmax.int, aten._log_softmax.default)
    if logarithm:
        result = d.emit(aten.sub.Tensor, (local, d.emit(aten.log.default, (total,))))
    else:
        result = d.emit(aten.div.Tensor, (d.emit(aten.exp.default, (local,)), total))
    if argument(node, "dtype") is not None:
        raise NoRuleError("it changes its type on the way")
    d.done(node, result, have)


@of_sharded
def logsumexp(d: Sharder, node: fx.Node, x: fx.Node, have: Shard) -> None:
    """Add up exponentials over a dimension that is whole, or over the sharded one alone."""
    if named(node, len(d.shape(x))) != {have.dim}:
        along(named)(d, node)
        return
    _, total, largest = _exponentials(d, x, have.dim, varies=False)
    result = d.emit(aten.add.Tensor, (d.emit(aten.log.default, (total,)), largest))
    if len(d.shape(node)) < len(d.shape(x)):
        result = d.emit(aten.squeeze.dim, (result, have.dim))
    d.done(node, result, REPLICATE)


def _exponentials(d: Sharder, x: fx.Node, dim: int, *, varies: bool) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return x less its maximum over a sharded dimension, the sum of exponentials of that, the maximum."""
    key = (x, dim, varies, d.region_of(d.node))  # readers in one region share the three
    if key not in d.exponentials:
        local = d.local[x]
        fixed = d.emit(aten.detach.default, (local,))
        largest = d.collect(d.emit(aten.amax.default, (fixed, [dim], True)), Partial("max"))
        # The negative comes first: it opens the piece after the collective, where the cast is made again.
        below = d.emit(aten.neg.default, (largest,))
        shifted = d.emit(aten.add.Tensor, (_widened_again(d, local), below))
        terms = d.emit(aten.sum.dim_IntList, (d.emit(aten.exp.default, (shifted,)), [dim], True))
        total = d.collect(terms, Partial(), varies=varies)
        d.exponentials[key] = shifted, total, largest
    return d.exponentials[key]


def _widened_again(d: Sharder, local: fx.Node) -> fx.Node:
    """Return a value made by a cast to a wider type, cast once more: so the narrow value crosses pieces."""
    chain: list[fx.Node] = []
    base = local
    while base.target in RESHAPES or base.target in CASTS:
        chain.append(base)
        base = base.all_input_nodes[0]
    if base.meta["example_value"].element_size() >= local.meta["example_value"].element_size():
        return local
    for node in reversed(chain):
        base = d.emit(node.target, (base, *node.args[1:]), node.kwargs)
    return base


def cross_entropy(d: Sharder, node: fx.Node) -> None:
    """Compare logits with labels: by rows where the samples are sharded, else over a sharded vocabulary."""
    logits, labels = operand(node), operand(node, 1)
    have = d.settle(logits)
    weight, smoothing = argument(node, "weight"), argument(node, "label_smoothing", 0.0)
    assert isinstance(smoothing, int | float)
    reduction = number(argument(node, "reduction"), 1)
    ignored = number(argument(node, "ignore_index"))
    if not isinstance(have, Shard):
        if isinstance(d.layout(labels), Shard):
            raise NoRuleError("its labels are sharded, its logits are not")
        d.plain(node)
        return
    classes = 1 if len(d.shape(logits)) > 1 else 0
    probable = len(d.shape(labels)) == len(d.shape(logits))
    if have.dim == classes:
        compare = _with_probabilities if probable else _with_labels
        losses, counts = compare(d, node, have, weight, smoothing, ignored)
        _reduced(d, node, losses, counts, reduction, None)
        return
    rows = have.at(have.dim - (have.dim > classes))
    mine = d.to(labels, have if probable else rows, varies=True)
    scales = d.to(weight, REPLICATE, varies=True) if isinstance(weight, fx.Node) else None
    rest = (smoothing,) if node.target is aten.cross_entropy_loss.default else ()
    losses = d.emit(node.target, (d.local[logits], mine, scales, 0, ignored, *rest))
    if probable:
        counts = d.emit(aten.ones_like.default, (losses,))
    else:
        counts = _counts(d, mine, ignored, losses, scales)
    _reduced(d, node, losses, counts, reduction, rows)


def _counts(
    d: Sharder, labels: fx.Node, ignored: int, losses: fx.Node, weight: fx.Node | None = None
) -> fx.Node:
    """Return how much each label counts in a mean: 0 where it is ignored, else 1 or its class's weight."""
    counted = d.emit(aten.ne.Scalar, (labels, ignored))
    if weight is None:
        return d.emit(aten.to.dtype, (counted, losses.meta["example_value"].dtype))
    safe = d.emit(aten.where.ScalarOther, (counted, labels, 0))
    scales = d.emit(aten.index.Tensor, (weight, [safe]))
    return d.emit(aten.where.ScalarOther, (counted, scales, 0.0))


def _with_labels(
    d: Sharder, node: fx.Node, have: Shard, weight: Argument, smoothing: float, ignored: int
) -> tuple[fx.Node, fx.Node]:
    """Return the loss of every label over a sharded vocabulary, and how much each label counts.

    The loss is a sum over classes of a coefficient times the negative logarithm of the class's share. Label y
    gives its own class (1 - smoothing) * weight[y], and every class smoothing / classes * weight[class].
    """
    logits, labels = operand(node), operand(node, 1)
    classes = d.shape(logits)[have.dim]
    shifted, exponentials = _logarithms(d, node, logits, have.dim)
    whole = d.to(labels, REPLICATE, varies=False)  # labels have no gradient
    scales = d.to(weight, REPLICATE, varies=False) if isinstance(weight, fx.Node) else None
    counted = d.emit(aten.ne.Scalar, (whole, ignored))
    safe = d.emit(aten.where.ScalarOther, (counted, whole, 0))
    rows, outside = own_rows(d, safe, have, classes)
    index = d.emit(aten.unsqueeze.default, (rows, have.dim))
    logit = d.emit(aten.gather.default, (shifted, have.dim, index))
    own = masked(d, d.emit(aten.squeeze.dim, (logit, have.dim)), outside)
    total: fx.Node | None = None  # of the coefficients; without weights it is 1
    if scales is not None:
        total = _counts(d, whole, ignored, own, scales)
        own = d.emit(aten.mul.Tensor, (own, total))
    if smoothing:
        share = smoothing / classes
        each = d.emit(aten.sum.dim_IntList, (_scaled(d, shifted, have, weight), [have.dim]))
        kept, spread = d.emit(aten.mul.Scalar, (own, 1 - smoothing)), d.emit(aten.mul.Scalar, (each, share))
        own = d.emit(aten.add.Tensor, (kept, spread))
    if smoothing and total is not None and scales is not None:
        rest = d.emit(aten.mul.Scalar, (d.emit(aten.sum.default, (scales,)), share))
        total = d.emit(aten.add.Tensor, (d.emit(aten.mul.Scalar, (total, 1 - smoothing)), rest))
    losses = _compared(d, exponentials, have.dim, total, d.collect(own, Partial()))
    # A label that is no class is on no device: without this its loss would be a number, and a wrong one.
    known = d.emit(aten.clamp.default, (safe, 0, classes - 1))
    losses = d.emit(aten.masked_fill.Scalar, (losses, d.emit(aten.ne.Tensor, (known, safe)), math.nan))
    ignore = d.emit(aten.logical_not.default, (counted,))
    losses = d.emit(aten.masked_fill.Scalar, (losses, ignore, 0.0))
    return losses, _counts(d, whole, ignored, losses, scales)


def _with_probabilities(
    d: Sharder, node: fx.Node, have: Shard, weight: Argument, smoothing: float, _: int
) -> tuple[fx.Node, fx.Node]:
    """Return the loss of every row of probabilities over a sharded vocabulary; each row counts once."""
    logits, labels = operand(node), operand(node, 1)
    shifted, exponentials = _logarithms(d, node, logits, have.dim)
    shares = d.to(labels, have, varies=True)
    if smoothing:
        shares = d.emit(aten.mul.Scalar, (shares, 1 - smoothing))
        shares = d.emit(aten.add.Scalar, (shares, smoothing / d.shape(logits)[have.dim]))
    shares = _scaled(d, shares, have, weight)
    own = d.emit(aten.sum.dim_IntList, (d.emit(aten.mul.Tensor, (shares, shifted)), [have.dim]))
    total = d.collect(d.emit(aten.sum.dim_IntList, (shares, [have.dim])), Partial())
    losses = _compared(d, exponentials, have.dim, total, d.collect(own, Partial()))
    return losses, d.emit(aten.ones_like.default, (losses,))


def _logarithms(d: Sharder, node: fx.Node, logits: fx.Node, dim: int) -> tuple[fx.Node, fx.Node | None]:
    """Return logits less their maximum, and the sum of the exponentials of that.

    The input of `nll_loss` is a logarithm already, so there is no sum.
    """
    if node.target is aten.nll_loss_nd.default:
        return d.local[logits], None
    return _exponentials(d, logits, dim, varies=False)[:2]


def _scaled(d: Sharder, values: fx.Node, have: Shard, weight: Argument) -> fx.Node:
    """Return a device's part of values for each class, times its part of the weights of classes."""
    if not isinstance(weight, fx.Node):
        return values
    after = values.meta["example_value"].dim() - 1 - have.dim
    own = d.to(weight, have.at(0), varies=True)
    return d.emit(aten.mul.Tensor, (values, d.emit(aten.reshape.default, (own, [-1, *[1] * after]))))


def _compared(
    d: Sharder, exponentials: fx.Node | None, dim: int, total: fx.Node | None, picked: fx.Node
) -> fx.Node:
    """Return losses from the sum of logits times coefficients. total: that of coefficients, if not 1."""
    if exponentials is None:
        return d.emit(aten.neg.default, (picked,))
    logs = d.emit(aten.squeeze.dim, (d.emit(aten.log.default, (exponentials,)), dim))
    if total is not None:
        logs = d.emit(aten.mul.Tensor, (logs, total))
    return d.emit(aten.sub.Tensor, (logs, picked))


def head_sums(d: Sharder, node: fx.Node) -> None:
    """Compute sums over the logits of a head: by rows, or over a sharded vocabulary each device its part."""
    hidden, weight, labels = operand(node), operand(node, 1), operand(node, 3)
    rows, have = d.settle(hidden), d.settle(weight)
    if isinstance(have, Shard) and have.dim == 0:
        _over_classes(d, node, have)
    elif isinstance(have, Shard):
        what = "the weight of its head is sharded along the inputs"
        raise NoRuleError(what, "shard that weight along dimension 0, its outputs, or leave it whole")
    elif isinstance(rows, Shard) and rows.dim == 0:
        by_row = (hidden, labels)
        local = {x: d.to(x, rows if x in by_row else REPLICATE, varies=True) for x in node.all_input_nodes}
        d.done(node, d.replay(node, local), rows)
    else:
        d.plain(node)


def _over_classes(d: Sharder, node: fx.Node, have: Shard) -> None:
    """Compute the sums over a device's own classes, and add them up: exponentials less the maximum of all."""
    hidden, weight, labels = operand(node), operand(node, 1), operand(node, 3)
    by_row = (hidden, labels)
    local = {x: d.to(x, REPLICATE if x in by_row else have, varies=True) for x in node.all_input_nodes}
    # A label of another device's part is no class here.
    local[labels] = from_own_first(d, local[labels], have, d.shape(weight)[0])
    sums = d.replay(node, local)
    logs, *others = (d.emit(operator.getitem, (sums, index)) for index in range(3))
    largest = d.collect(d.emit(aten.detach.default, (logs,)), Partial("max"))
    terms = d.emit(aten.exp.default, (d.emit(aten.sub.Tensor, (logs, largest)),))
    totals = d.collect(d.emit(aten.stack.default, ([terms, *others],)), Partial())
    total, rest = (d.emit(aten.slice.Tensor, (totals, 0, *span)) for span in ((0, 1), (1, 3)))
    total = d.emit(aten.add.Tensor, (d.emit(aten.log.default, (total,)), largest))
    d.done(node, d.emit(aten.unbind.int, (d.emit(aten.cat.default, ([total, rest],)),)), REPLICATE)


def _reduced(
    d: Sharder, node: fx.Node, losses: fx.Node, counts: fx.Node, reduction: int, rows: Shard | None
) -> None:
    """Write the reduction over labels: 0 none, 1 the mean of those that count, 2 the sum."""
    if reduction == 0:
        d.done(node, losses, rows if rows is not None else REPLICATE)
        return
    total = d.emit(aten.sum.default, (losses,))
    if reduction == 1:
        count = d.emit(aten.sum.default, (counts,))
        if rows is not None:
            count = d.collect(count, Partial(), varies=True)
        total = d.emit(aten.div.Tensor, (total, count))
    d.done(node, total, REPLICATE if rows is None else Partial())


def compared(d: Sharder, node: fx.Node) -> None:
    """Compare element by element, and reduce what each device has: as many elements on all of them."""
    sources = node.all_input_nodes
    layout, local = together(d, sources, max(len(d.shape(source)) for source in sources))
    if layout is None:
        d.plain(node)
        return
    reduction = number(argument(node, "reduction"), 1)
    result = d.replay(node, local)
    if reduction == 1:
        result = d.emit(aten.div.Scalar, (result, d.degree))
    d.done(node, result, Partial() if reduction else layout)


RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.softmax.int, aten._softmax.default), softmax),
    **dict.fromkeys((aten.log_softmax.int, aten._log_softmax.default), softmax),
    aten.logsumexp.default: logsumexp,
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss_nd.default), cross_entropy),
    torch.ops.piper.head_sums.default: head_sums,
    **dict.fromkeys((aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default), compared),
    **dict.fromkeys((aten.huber_loss.default, aten.soft_margin_loss.default, aten.kl_div.default), compared),
    **dict.fromkeys(
        (aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default), compared
    ),
}
