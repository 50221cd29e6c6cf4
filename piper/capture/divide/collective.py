"""Chooses the collective that brings a value from one layout to another."""

from piper.capture.divide.layout import WHOLE, Divided, Layout, Sum, Whole
from piper.ir.chunk import Collective, CollectiveOp


def change(axis: str, degree: int, have: Layout, want: Layout, varies: bool) -> Collective:
    """Return the collective that brings a value from one layout to another.

    varies: the reader's work is divided, so the gradient of a whole value comes back as a sum over the group.
    """

    def made(op: CollectiveOp, back: CollectiveOp, joined: Layout = WHOLE, cut: Layout = WHOLE) -> Collective:
        return Collective(
            axis=axis,
            degree=degree,
            op=op,
            back=back,
            joined=joined if isinstance(joined, Divided) else None,
            cut=cut if isinstance(cut, Divided) else None,
        )

    match have, want:
        case Divided(), Whole():
            return made("all_gather", "reduce_scatter" if varies else "slice", joined=have)
        case Divided(), Divided():
            return made("all_to_all", "all_to_all", joined=have, cut=want)
        case Sum(op="max"), Whole():
            return made("max", "none")
        case Sum(), Whole():
            return made("all_reduce", "none")
        case Sum(op="sum"), Divided():
            return made("reduce_scatter", "all_gather", cut=want)
        case Whole(), Divided():
            return made("slice", "all_gather", cut=want)
        case Whole(), Whole():
            return made("none", "all_reduce")
    raise AssertionError(f"no collective leads from {have} to {want}")
