"""Rules for softmax and cross entropy: over a sharded vocabulary no device ever holds all logits."""

from torch import fx
from torch.fx.node import map_arg

from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.compute_rules import CASTS, together
from piper.capture.shard.lookup_rules import masked, own_rows
from piper.capture.shard.reshapes import RESHAPES
from piper.capture.shard.shape_rules import argument, number, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.ir.sharding import REPLICATE, Partial, Shard


def softmax(d: Sharder, node: fx.Node) -> None:
    """Normalise exponentials over a dimension that is whole; over a sharded one in two sums."""
    x = operand(node)
    have = d.settle(x)
    dim = number(node.args[1]) % max(1, len(d.shape(x)))
    if not isinstance(have, Shard) or dim != have.dim:
        d.done(node, d.replay(node), have)
        return
    if node.target is aten._safe_softmax.default:
        raise NoRuleError("it normalises over the sharded dimension")
    local, total = _exponentials(d, x, dim, varies=True)
    logarithm = node.target in (aten.log_softmax.int, aten._log_softmax.default)
    if logarithm:
        result = d.emit(aten.sub.Tensor, (local, d.emit(aten.log.default, (total,))))
    else:
        result = d.emit(aten.div.Tensor, (d.emit(aten.exp.default, (local,)), total))
    dtype = argument(node, 2, "dtype")
    if dtype is not None and not isinstance(dtype, bool):
        raise NoRuleError("it changes its type on the way")
    d.done(node, result, have)


def _exponentials(d: Sharder, x: fx.Node, dim: int, *, varies: bool) -> tuple[fx.Node, fx.Node]:
    """Return x less its maximum over a sharded dimension, and the sum of the exponentials of that.

    varies: sharded work reads the sum.
    """
    local = d.local[x]
    fixed = d.emit(aten.detach.default, (local,))
    largest = d.collect(d.emit(aten.amax.default, (fixed, [dim], True)), Partial("max"))
    # The negative comes first: it opens the piece after the collective, in which the cast is then made again.
    below = d.emit(aten.neg.default, (largest,))
    shifted = d.emit(aten.add.Tensor, (_widened_again(d, local), below))
    terms = d.emit(aten.sum.dim_IntList, (d.emit(aten.exp.default, (shifted,)), [dim], True))
    return shifted, d.collect(terms, Partial(), varies=varies)


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
    logits, labels = node.args[0], node.args[1]
    assert isinstance(logits, fx.Node) and isinstance(labels, fx.Node)
    have = d.settle(logits)
    weight, smoothing = argument(node, 2, "weight"), argument(node, 5, "label_smoothing", 0.0)
    reduction = number(argument(node, 3, "reduction", 1), 1)
    ignored = number(argument(node, 4, "ignore_index", -100), -100)
    if not isinstance(have, Shard):
        if isinstance(d.layout(labels), Shard):
            raise NoRuleError("its labels are sharded, its logits are not")
        d.plain(node)
        return
    classes = 1 if len(d.shape(logits)) > 1 else 0
    probable = len(d.shape(labels)) == len(d.shape(logits))
    if have.dim == classes:
        if weight is not None or smoothing or probable or node.target is not aten.cross_entropy_loss.default:
            raise NoRuleError("over a sharded vocabulary only labels without weights and smoothing compare")
        losses = _over_vocabulary(d, logits, labels, have, ignored)
        whole = d.to(labels, REPLICATE, varies=False)
        _reduced(d, node, losses, _counts(d, whole, ignored, losses), reduction, None)
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


def _over_vocabulary(d: Sharder, logits: fx.Node, labels: fx.Node, have: Shard, ignored: int) -> fx.Node:
    """Return the loss of every label: log of the sum of exponentials, less the label's own logit."""
    shifted, total = _exponentials(d, logits, have.dim, varies=False)
    whole = d.to(labels, REPLICATE, varies=False)  # labels have no gradient
    counts = d.emit(aten.ne.Scalar, (whole, ignored))
    safe = d.emit(aten.where.ScalarOther, (counts, whole, 0))
    rows, outside = own_rows(d, safe, have, d.shape(logits)[have.dim])
    index = d.emit(aten.unsqueeze.default, (rows, have.dim))
    logit = d.emit(aten.gather.default, (shifted, have.dim, index))
    own = masked(d, d.emit(aten.squeeze.dim, (logit, have.dim)), outside)
    picked = d.collect(own, Partial())
    logs = d.emit(aten.squeeze.dim, (d.emit(aten.log.default, (total,)), have.dim))
    losses = d.emit(aten.sub.Tensor, (logs, picked))
    return d.emit(aten.masked_fill.Scalar, (losses, d.emit(aten.logical_not.default, (counts,)), 0.0))


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


def compared(position: int) -> Rule:
    """Make the rule of a loss that compares element by element; `position` is that of its reduction."""

    def apply(d: Sharder, node: fx.Node) -> None:
        sources = node.all_input_nodes
        rank = max(len(d.shape(source)) for source in sources)
        layout, local = together(d, sources, rank)
        if layout is None:
            d.plain(node)
            return
        reduction = number(argument(node, position, "reduction", 1), 1)
        args, kwargs = list(map_arg(node.args, local.__getitem__)), dict(node.kwargs)
        if len(args) > position:
            args[position] = 0
        else:
            kwargs["reduction"] = 0
        losses = d.emit(node.target, tuple(args), map_arg(kwargs, local.__getitem__))
        if reduction == 0:
            d.done(node, losses, layout)
            return
        total = d.emit(aten.mean.default if reduction == 1 else aten.sum.default, (losses,))
        d.done(node, d.emit(aten.div.Scalar, (total, d.degree)) if reduction == 1 else total, Partial())

    return apply


RULES: dict[object, Rule] = {
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten.log_softmax.int: softmax,
    aten._log_softmax.default: softmax,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.nll_loss_nd.default: cross_entropy,
    **dict.fromkeys((aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default), compared(2)),
    **dict.fromkeys((aten.huber_loss.default, aten.soft_margin_loss.default), compared(2)),
    aten.kl_div.default: compared(2),
    aten.binary_cross_entropy.default: compared(3),
    aten.binary_cross_entropy_with_logits.default: compared(4),
}
