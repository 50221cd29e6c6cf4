"""The table of rules: for every operation how it is sharded, and which collectives its operands need."""

from collections.abc import Mapping

import torch

from piper.capture.shard import (
    along_rules,
    attention_rules,
    compute_rules,
    draws,
    lookup_rules,
    loss_rules,
    routing,
    shape_rules,
)
from piper.capture.shard.sharder import Rule
from piper.errors import ConfigError

_RULES: dict[object, Rule] = {
    **shape_rules.RULES,
    **compute_rules.RULES,
    **along_rules.RULES,
    **lookup_rules.RULES,
    **loss_rules.RULES,
    **attention_rules.RULES,
    **draws.RULES,
    **routing.RULES,
}
# ^ grows by `sharding_rule` alone


def rules() -> Mapping[object, Rule]:
    """Return the rule of every operation that has one."""
    return _RULES


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
    _RULES[op] = fn
