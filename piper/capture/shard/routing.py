"""Rules for routers: the choice of experts is made row by row, their rows are gathered where they are sorted.

Under sequence parallelism a mixture of experts does what a dense feed-forward does: the rows of the group are
gathered before it, and each device keeps its own part of the result.
"""

from torch import fx

from piper.capture.shard.along_rules import KEYWORD, along, named
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.lookup_rules import indexed
from piper.capture.shard.sharder import Rule, Sharder, aten


def or_all_rows(rule: Rule) -> Rule:
    """Make a rule that gathers the rows of the group under sequence parallelism, and else is `rule`."""

    def apply(d: Sharder, node: fx.Node) -> None:
        if d.sharding.between is None or d.sharding.batch:
            try:
                rule(d, node)
            except NoRuleError:
                what = "it needs the rows of every device, as a mixture of experts does"
                raise NoRuleError(what) from None
        else:
            d.gathered(node)

    return apply


RULES: dict[object, Rule] = {
    aten.argsort.stable: or_all_rows(along(named(KEYWORD, default=-1))),
    aten.index.Tensor: or_all_rows(indexed),
    aten.scatter_add.default: or_all_rows(along(named(1))),
}
