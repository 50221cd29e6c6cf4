"""Rules for softmax and cross entropy: over a divided vocabulary no device ever holds all logits."""

from torch import fx

from piper.capture.divide.compute_rules import CASTS, masked, own_rows
from piper.capture.divide.divider import Divider, Rule, aten
from piper.capture.divide.division import NoRuleError
from piper.capture.divide.layout import WHOLE, Divided, Sum
from piper.capture.divide.reshapes import RESHAPES
from piper.capture.divide.shape_rules import argument, number, operand


def softmax(d: Divider, node: fx.Node) -> None:
    """Normalise exponentials over a dimension that is whole; over a divided one in two sums."""
    x = operand(node)
    have = d.settle(x)
    dim = number(node.args[1]) % len(d.shape(x))
    if not isinstance(have, Divided) or dim != have.dim:
        made = d.emit(node.target, (d.local[x], *node.args[1:]), node.kwargs)
        d.done(node, made, have)
        return
    local, total = _exponentials(d, x, dim, varies=True)
    logarithm = node.target in (aten.log_softmax.int, aten._log_softmax.default)
    if logarithm:
        made = d.emit(aten.sub.Tensor, (local, d.emit(aten.log.default, (total,))))
    else:
        made = d.emit(aten.div.Tensor, (d.emit(aten.exp.default, (local,)), total))
    dtype = argument(node, 2, "dtype")
    if dtype is not None and not isinstance(dtype, bool):
        raise NoRuleError("it changes its type on the way")
    d.done(node, made, have)


def _exponentials(d: Divider, x: fx.Node, dim: int, *, varies: bool) -> tuple[fx.Node, fx.Node]:
    """Return x less its maximum over a divided dimension, and the sum of the exponentials of that.

    varies: divided work reads the sum.
    """
    local = d.local[x]
    fixed = d.emit(aten.detach.default, (local,))
    largest = d.collect(d.emit(aten.amax.default, (fixed, [dim], True)), Sum("max"))
    # The negative comes first: it opens the piece after the collective, in which the cast is then made again.
    below = d.emit(aten.neg.default, (largest,))
    shifted = d.emit(aten.add.Tensor, (_widened_again(d, local), below))
    terms = d.emit(aten.sum.dim_IntList, (d.emit(aten.exp.default, (shifted,)), [dim], True))
    return shifted, d.collect(terms, Sum(), varies=varies)


def _widened_again(d: Divider, local: fx.Node) -> fx.Node:
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


def cross_entropy(d: Divider, node: fx.Node) -> None:
    """Compare logits with labels: by rows where the samples are divided, else over a divided vocabulary."""
    logits, labels = node.args[0], node.args[1]
    assert isinstance(logits, fx.Node) and isinstance(labels, fx.Node)
    have = d.settle(logits)
    if argument(node, 2, "weight") is not None or float(argument(node, 5, "label_smoothing", 0.0)):  # type: ignore[arg-type]
        raise NoRuleError("class weights and label smoothing are not divided")
    if len(d.shape(labels)) == len(d.shape(logits)):
        raise NoRuleError("labels that are probabilities are not divided")
    reduction = number(argument(node, 3, "reduction", 1), 1)
    ignored = number(argument(node, 4, "ignore_index", -100), -100)
    if not isinstance(have, Divided):
        if isinstance(d.layout(labels), Divided):
            raise NoRuleError("its labels are divided, its logits are not")
        d.plain(node)
        return
    classes = 1 if len(d.shape(logits)) > 1 else 0
    if have.dim == classes:
        losses = _over_vocabulary(d, logits, labels, have, ignored)
        _reduced(d, node, losses, d.to(labels, WHOLE, varies=False), reduction, ignored, divided=False)
        return
    rows = have.at(have.dim - (have.dim > classes))
    mine = d.to(labels, rows, varies=True)
    losses = d.emit(node.target, (d.local[logits], mine, None, 0, ignored))
    _reduced(d, node, losses, mine, reduction, ignored, divided=True, rows=rows)


def _over_vocabulary(d: Divider, logits: fx.Node, labels: fx.Node, have: Divided, ignored: int) -> fx.Node:
    """Return the loss of every label: log of the sum of exponentials, less the label's own logit."""
    shifted, total = _exponentials(d, logits, have.dim, varies=False)
    whole = d.to(labels, WHOLE, varies=True)
    counts = d.emit(aten.ne.Scalar, (whole, ignored))
    safe = d.emit(aten.where.ScalarOther, (counts, whole, 0))
    rows, outside = own_rows(d, safe, have, d.shape(logits)[have.dim])
    found = d.emit(aten.gather.default, (shifted, have.dim, d.emit(aten.unsqueeze.default, (rows, have.dim))))
    own = masked(d, d.emit(aten.squeeze.dim, (found, have.dim)), outside)
    picked = d.collect(own, Sum())
    logs = d.emit(aten.squeeze.dim, (d.emit(aten.log.default, (total,)), have.dim))
    losses = d.emit(aten.sub.Tensor, (logs, picked))
    return d.emit(aten.masked_fill.Scalar, (losses, d.emit(aten.logical_not.default, (counts,)), 0.0))


def _reduced(
    d: Divider,
    node: fx.Node,
    losses: fx.Node,
    labels: fx.Node,
    reduction: int,
    ignored: int,
    *,
    divided: bool,
    rows: Divided | None = None,
) -> None:
    """Write the reduction over labels: 0 none, 1 the mean of those that count, 2 the sum."""
    if reduction == 0:
        d.done(node, losses, rows if rows is not None else WHOLE)
        return
    total = d.emit(aten.sum.default, (losses,))
    if reduction == 2:
        d.done(node, total, Sum() if divided else WHOLE)
        return
    dtype = losses.meta["example_value"].dtype
    counts = d.emit(aten.to.dtype, (d.emit(aten.ne.Scalar, (labels, ignored)), dtype))
    count = d.emit(aten.sum.default, (counts,))
    if divided:
        count = d.collect(count, Sum())
    mean = d.emit(aten.div.Tensor, (total, count))
    d.done(node, mean, Sum() if divided else WHOLE)


RULES: dict[object, Rule] = {
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten.log_softmax.int: softmax,
    aten._log_softmax.default: softmax,
    aten.cross_entropy_loss.default: cross_entropy,
}
