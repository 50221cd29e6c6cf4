"""What is asked of the regions that one directive shards, and the ways in which a rule can refuse."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from piper.ir.sharding import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSharding:
    """What one `shard` directive over an axis asks of the regions it selects."""

    by: str  # the directive, as messages name it
    axis: str
    degree: int
    weights: Mapping[str, Shard] = field(default_factory=dict)  # by parameter name
    shared: Mapping[str, Shard] = field(default_factory=dict)  # weights that other regions read whole
    batch: Mapping[str, Shard] = field(default_factory=dict)  # by field
    between: int | None = None  # the dimension along which activations between sharded work are sharded
    attention: str = "gather"
    zigzag: bool = False
    gathers_rows: bool = False  # routers sort the rows of the group, where each device cannot sort its own
    inner: int = 1  # over how many devices axes that are sharded later shard what this one leaves


class UnevenError(Exception):
    """A size that does not divide by the devices of a group."""

    def __init__(self, what: str, size: int, degree: int) -> None:
        super().__init__(f"{what} do not divide by {degree}")
        self.size = size


class NoRuleError(Exception):
    """A rule that does not cover the layouts it is given; the text says what it cannot do."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint  # where another argument of the directive is a way out
