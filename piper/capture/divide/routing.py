"""Rules for routers: the choice of experts is made row by row, their rows are gathered where they are sorted.

Under sequence parallelism a mixture of experts does what a dense feed-forward does: the rows of the group are
gathered before it, and each device keeps its own part of the result.
"""

from torch import fx

from piper.capture.divide.divider import Divider, Rule, aten
from piper.capture.divide.division import NoRuleError
from piper.capture.divide.layout import Divided
from piper.capture.divide.shape_rules import argument, number, operand


def topk(d: Divider, node: fx.Node) -> None:
    """Take the largest elements along a dimension that is whole."""
    x = operand(node)
    have = d.settle(x)
    if not isinstance(have, Divided):
        d.plain(node)
        return
    if number(argument(node, 2, "dim", -1)) % len(d.shape(x)) == have.dim:
        raise NoRuleError("it compares elements of the divided dimension")
    made = d.emit(node.target, (d.local[x], *node.args[1:]), node.kwargs)
    d.done(node, made, [have, have])


def over_rows(d: Divider, node: fx.Node) -> None:
    """Sort or pick rows of all devices of the group, which are gathered for it."""
    if d.division.between is None or d.division.batch:
        raise NoRuleError("it needs the rows of every device, as a mixture of experts does")
    for source in node.all_input_nodes:
        d.settle(source)
    d.plain(node)


RULES: dict[object, Rule] = {
    aten.topk.default: topk,
    aten.argsort.stable: over_rows,
    aten.index.Tensor: over_rows,
    aten.scatter_add.default: over_rows,
}
