"""Rules for routers where rows are sharded: each device sorts its own rows by expert, and sends them itself.

On one device a router sorts the rows of all tokens by expert. Here each device sorts its own. Their order
differs from the one on one device, but what is done with a row does not depend on its place, and in the end
each row goes back to its place. The layouts `OwnOrder` and `RowNumbers` say which values are in such an
order. Whatever would look at places in it is refused.
"""

from dataclasses import replace

from torch import Tensor, fx

from piper.capture.shard import shape_rules as shapes
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.compute_rules import CASTS, LIKE, addmm, linear, pointwise, reduction
from piper.capture.shard.layout import RESHAPES, OwnOrder, RowNumbers, divides, tensor_of, value_of
from piper.capture.shard.loss_rules import softmax
from piper.capture.shard.shape_rules import ALONG, along, named, number, of_sharded, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument
from piper.capture.trace.recording import OWN_ROWS
from piper.ir.sharding import REPLICATE, Partial, Shard

MOVES = (shapes.same_shape, shapes.permute, shapes.getitem, shapes.select, shapes.runs)
ROW_BY_ROW: frozenset[Rule] = frozenset((*MOVES, pointwise, linear, addmm, reduction, softmax))
COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step)
KEPT = (*LIKE, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default)
OTHER_ORDER = "each device has its rows in an order of its own"
OTHER_NUMBERS = "it computes with numbers of rows, and each device numbers its own"


def in_own_order(rule: Rule | None) -> Rule:
    """Make the rule of an operation on rows in a device's own order, from its rule for other rows."""

    def apply(d: Sharder, node: fx.Node) -> None:
        numbered = NUMBERED.get(node.target)
        if numbered is not None:
            numbered(d, node)
        elif any(isinstance(d.layouts[source], RowNumbers) for source in node.all_input_nodes):
            _keep_numbers(d, node)
        elif node.target in RESHAPES and _keeps_rows(d, node):
            shapes.reshape(d, node)
        elif rule is not None and (rule in ROW_BY_ROW or node.target in ALONG):
            rule(d, node)
        else:
            raise NoRuleError(OTHER_ORDER)

    return apply


def _keeps_rows(d: Sharder, node: fx.Node) -> bool:
    """Return whether a reshape leaves the rows along the first dimension what they are."""
    have, new = d.layout(operand(node)), d.shape(node)
    return isinstance(have, Shard) and have.dim == 0 and new[:1] == d.shape(operand(node))[:1]


def _keep_numbers(d: Sharder, node: fx.Node) -> None:
    """Write an operation that leaves numbers of rows what they are, or takes their shape alone."""
    have, result = d.layout(operand(node)), value_of(node)
    casts = node.target in CASTS and isinstance(result, Tensor) and not result.is_floating_point()
    if not isinstance(have, RowNumbers) or not (casts or node.target in KEPT):
        raise NoRuleError(OTHER_NUMBERS)
    d.done(node, d.replay(node), have.places if node.target in LIKE else have)


@of_sharded
def sort(d: Sharder, node: fx.Node, x: fx.Node, have: Shard) -> None:
    """Sort the rows of each device by themselves. Numbers of rows are sorted to be inverted."""
    if len(d.shape(x)) != 1:
        along(named)(d, node)
        return
    several = isinstance(value_of(node), tuple | list)
    if isinstance(have, RowNumbers) and not several:
        numbers = _inverted(have)
    elif isinstance(have, OwnOrder):
        raise NoRuleError(OTHER_ORDER)
    else:
        numbers = RowNumbers(0, order=node.name, rows=have)
    d.done(node, d.replay(node), [numbers.places, numbers] if several else numbers)


def _inverted(numbers: RowNumbers) -> RowNumbers:
    """Return the layout of the numbers by which rows go back to their places."""
    if numbers.per != 1:
        raise NoRuleError("several rows have the same number")
    rows = numbers.rows
    order = rows.order if isinstance(rows, OwnOrder) else ""
    return RowNumbers(0, rows.blocks, rows.zigzag, order=order, rows=numbers.places)


def divide(d: Sharder, node: fx.Node) -> None:
    """Turn numbers of pairs into numbers of tokens, or into the place of each pair within its token."""
    x, by = operand(node), node.args[1]
    have = d.layout(x)
    if not isinstance(have, RowNumbers):
        in_own_order(pointwise)(d, node)
        return
    floors = node.target in FLOORS and argument(node, "rounding_mode", "floor") == "floor"
    if not isinstance(by, int) or by < 1 or not (floors or have.per == 1):
        raise NoRuleError(OTHER_NUMBERS)
    runs = replace(have.rows, blocks=have.rows.blocks * have.per * by)
    if isinstance(have.rows, OwnOrder) or not divides(d.shape(x)[0], runs, d.degree):
        raise NoRuleError(f"runs of {by} rows do not lie on one device each")
    d.done(node, d.replay(node), replace(have, per=have.per * by) if floors else have.places)


def look_up(d: Sharder, node: fx.Node) -> None:
    """Take rows by their numbers: each device has those that its numbers count."""
    index, numbers = _numbers(d, node)
    rows = _own_rows(d, operand(node), d.shape(index)[0], numbers)
    args = (rows, [d.local[index]]) if node.target is aten.index.Tensor else (rows, 0, d.local[index])
    d.done(node, d.emit(node.target, args), numbers.places)


def put_back(d: Sharder, node: fx.Node) -> None:
    """Put rows where their numbers say, or add them there. Rows that count themselves invert the numbers."""
    (index, numbers), x = _numbers(d, node), operand(node)
    values = node.args[2 if node.target in PUTS else 3]
    if not isinstance(values, fx.Node):
        raise NoRuleError(OTHER_ORDER)
    count, own = d.shape(index)[0], d.local[index]
    upwards = {(count,), (0, count), (0, count, 1)}  # 0, 1, 2, ... up to the number of rows
    if values.target in COUNTING and values.args in upwards:
        options = {"dtype": tensor_of(node).dtype, "device": own.meta["example_value"].device}
        upward = d.emit(aten.arange.default, (count // d.degree,), options)
        empty = d.emit(aten.empty_like.default, (upward,))
        d.done(node, d.emit(aten.scatter.src, (empty, 0, own, upward)), _inverted(numbers))
        return
    into = d.local[x] if x.target in LIKE else _own_rows(d, x, count, numbers)
    rows = d.to(values, numbers.places, varies=True)
    picked = [own] if node.target in PUTS else own
    args = (into, picked, rows) if node.target in PUTS else (into, 0, picked, rows)
    more = node.args[len(args) :]
    d.done(node, d.emit(node.target, (*args, *more), node.kwargs), numbers.rows)


def _picks(node: fx.Node) -> fx.Node | None:
    """Return the only tensor by which an operation picks rows, along the first dimension. None: another."""
    given = node.args[1]
    if isinstance(given, list | tuple):
        first, *others = given
        return first if isinstance(first, fx.Node) and not any(others) else None
    index = node.args[2] if given == 0 else None
    return index if isinstance(index, fx.Node) else None


def _numbers(d: Sharder, node: fx.Node) -> tuple[fx.Node, RowNumbers]:
    """Return the numbers by which an operation picks rows, and their layout."""
    index = _picks(node)
    numbers = None if index is None else d.layout(index)
    if index is None or not isinstance(numbers, RowNumbers):
        raise NoRuleError(OTHER_ORDER)
    return index, numbers


def _own_rows(d: Sharder, x: fx.Node, count: int, numbers: RowNumbers) -> fx.Node:
    """Return a device's own rows of a value, in the order in which numbers count them."""
    have = d.settle(x)
    if isinstance(have, RowNumbers) or d.shape(x)[:1] != (count // numbers.per,):
        raise NoRuleError("its rows are not those that are numbered")
    return d.to(x, numbers.rows, varies=True)


def add_up(d: Sharder, node: fx.Node) -> None:
    """Add what each row gives to entries of a whole value: every device has a term. Or add rows to others."""
    x, index, values = operand(node), _picks(node), node.args[3]
    rows = None if index is None else d.layout(index)
    if isinstance(rows, RowNumbers):
        put_back(d, node)
        return
    ranks = index is not None and isinstance(rows, Shard) and len(d.shape(index)) == 1
    if index is None or not ranks or d.settle(x) != REPLICATE or not isinstance(values, fx.Node):
        raise NoRuleError("it adds along the sharded dimension")
    first = d.emit(aten.eq.Scalar, (d.place(), 0))  # one device of the group adds what was there before
    before = d.emit(aten.mul.Tensor, (d.to(x, REPLICATE, varies=True), first))
    added = d.to(values, rows, varies=True)  # type: ignore[arg-type]  # it is a shard
    d.done(node, d.emit(node.target, (before, 0, d.local[index], added), node.kwargs), Partial())


def route(d: Sharder, node: fx.Node) -> None:
    """Send a device's own rows to experts, by how many it has for each.

    The rows that arrive are as good as whole: all that the experts do with them is work on single rows, and
    the gradients of their weights are summed over the group.
    """
    x, counts = operand(node), operand(node, 1)
    have = d.layout(x)
    if not isinstance(have, OwnOrder) or have.dim != 0 or d.layout(counts) != Partial():
        raise NoRuleError("its rows are not sorted by expert on each device, or counted there")
    rows = d.emit(node.target, (d.local[x], d.local[counts]))
    rows.meta[OWN_ROWS] = (d.request.axis, *node.meta.get(OWN_ROWS, ()))
    d.varying.add(rows)
    d.routed[node] = have
    d.done(node, rows, [REPLICATE, REPLICATE])


def unroute(d: Sharder, node: fx.Node) -> None:
    """Take back the rows that a device has sent to experts."""
    y, counts, total = operand(node), operand(node, 1), number(node.args[2])
    have = d.routed[counts.all_input_nodes[0]]
    rows = d.emit(node.target, (d.local[y], d.local[counts], total // d.degree))
    d.varying.discard(rows)
    d.done(node, rows, have)


FLOORS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
PUTS = (aten.index_put.default, aten.index_put_.default)
SORTS = (aten.argsort.stable, aten.sort.stable, aten.argsort.default, aten.sort.default)
NUMBERED: dict[object, Rule] = {
    **dict.fromkeys(SORTS, sort),
    **dict.fromkeys((*FLOORS, aten.remainder.Scalar), divide),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), look_up),
    **dict.fromkeys((aten.scatter.src, aten.index_copy.default, *PUTS), put_back),
    **dict.fromkeys((aten.scatter_add.default, aten.index_add.default), add_up),
}
