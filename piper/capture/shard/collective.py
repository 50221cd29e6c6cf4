"""Chooses the collective that brings a value from one layout to another."""

from piper.ir.chunk import Collective, CollectiveOp
from piper.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard


def change(axis: str, degree: int, have: Placement, want: Placement, varies: bool) -> Collective:
    """Return the collective that brings a value from one layout to another.

    varies: the reader's work is sharded, so the gradient of a whole value comes back as a sum over the group.
    """

    def made(
        op: CollectiveOp, back: CollectiveOp, joined: Placement = REPLICATE, cut: Placement = REPLICATE
    ) -> Collective:
        return Collective(
            axis=axis,
            degree=degree,
            op=op,
            back=back,
            joined=joined if isinstance(joined, Shard) else None,
            cut=cut if isinstance(cut, Shard) else None,
        )

    match have, want:
        case Shard(), Replicate():
            return made("all_gather", "reduce_scatter" if varies else "slice", joined=have)
        case Shard(), Shard():
            return made("all_to_all", "all_to_all", joined=have, cut=want)
        case Partial(op="max"), Replicate():
            return made("max", "none")
        case Partial(), Replicate():
            return made("all_reduce", "none")
        case Partial(op="sum"), Shard():
            return made("reduce_scatter", "all_gather", cut=want)
        case Replicate(), Shard():
            return made("slice", "all_gather", cut=want)
        case Replicate(), Replicate():
            return made("none", "all_reduce")
    raise AssertionError(f"no collective leads from {have} to {want}")
