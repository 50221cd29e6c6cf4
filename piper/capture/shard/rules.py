"""The table of rules: for every operation how it is sharded, and which collectives its operands need."""

import torch
from torch import fx

from piper.capture.shard import attention_rules, compute_rules, loss_rules, own_order_rules, shape_rules
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.layout import OwnOrder
from piper.capture.shard.shape_rules import along, named
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import draws
from piper.capture.trace.recording import marker
from piper.errors import ConfigError


def scatter_add(d: Sharder, node: fx.Node) -> None:
    """Add up along a dimension: along the sharded one every device has a term."""
    try:
        along(named)(d, node)
    except NoRuleError:
        own_order_rules.add_up(d, node)


ROUTERS: dict[object, Rule] = {  # these gather the rows of the group where that is asked
    aten.argsort.stable: own_order_rules.sort,
    aten.index.Tensor: compute_rules.indexed,
    aten.scatter_add.default: scatter_add,
}
RULES: dict[object, Rule] = {  # grows by `sharding_rule` alone
    **shape_rules.RULES,
    **compute_rules.RULES,
    **loss_rules.RULES,
    **attention_rules.RULES,
    **dict.fromkeys(own_order_rules.SORTS, own_order_rules.sort),
    **ROUTERS,
}


def rule_of(d: Sharder, node: fx.Node) -> Rule | None:
    """Return the rule by which an operation is sharded, if it has one."""
    kind = marker(node)
    if kind in ("route", "unroute"):
        return own_order_rules.route if kind == "route" else own_order_rules.unroute
    if draws(node) and node.target not in RULES:  # by its rule a device draws what one device would
        raise d.refused(
            f"{node.target} draws random numbers for a sharded value",
            "leave it out of sharded regions; dropout, rand_like and randn_like have rules",
        )
    rule = RULES.get(node.target) or compute_rules.by_family(node)
    if any(isinstance(d.layouts[source], OwnOrder) for source in node.all_input_nodes):
        return own_order_rules.in_own_order(rule)
    gathers = d.sharding.gathers_rows and rule is not None and rule is ROUTERS.get(node.target)
    return Sharder.gathered if gathers else rule


def sharding_rule(op: torch._ops.OpOverload, fn: Rule) -> None:
    """Register how an operation is sharded: `fn(sharder, node)` writes one device's part of it.

    A rule asks `sharder.layout(source)` how the group holds an operand, brings it into another layout with
    `sharder.to(source, layout, varies=True)`, writes operations with `sharder.emit(op, args)`, and ends with
    `sharder.done(node, result, layout)`. It replaces the rule that the operation had.
    """
    if not isinstance(op, torch._ops.OpOverload) or not callable(fn):
        raise ConfigError(
            f"{op!r} is not an operation with a rule",
            by="sharding_rule",
            facts={"rule": repr(fn)},
            hint="name one overload and a function: piper.sharding_rule(torch.ops.aten.erf.default, rule)",
        )
    RULES[op] = fn
