"""The collectives of a divided forward, as nodes of the captured graph.

Each stands in the graph as a call of one function here and is cut out as a chunk of its own, so the function
runs on fakes alone: it gives the shape, and whether autograd needs a gradient. A `Collective` says what the
group does, forward and backward.
"""

from torch import Tensor, fx

from piper.capture.divide.layout import WHOLE, Divided, Layout, Sum, Whole
from piper.ir.chunk import Collective, CollectiveOp, Slicing


def collective(value: Tensor, how: Collective) -> Tensor:
    """Stand for a collective: return a new value of the shape that it gives."""
    shape = list(value.shape)
    for slicing, op in ((how.joined, "join"), (how.cut, "cut")):
        if slicing is not None:
            size = shape[slicing.dim]
            shape[slicing.dim] = size * how.degree if op == "join" else size // how.degree
    made = value.new_empty(shape)
    return made.requires_grad_(value.requires_grad and how.op != "max")


def is_collective(node: fx.Node) -> bool:
    """Return whether a node of the captured graph is a collective."""
    return node.op == "call_function" and node.target is collective


def how_of(node: fx.Node) -> Collective:
    """Return what a collective does."""
    how = node.args[1]
    assert isinstance(how, Collective)
    return how


def slicing_of(layout: Divided) -> Slicing:
    """Return a division as plans write it."""
    return Slicing(dim=layout.dim, blocks=layout.blocks, zigzag=layout.zigzag)


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
            joined=slicing_of(joined) if isinstance(joined, Divided) else None,
            cut=slicing_of(cut) if isinstance(cut, Divided) else None,
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
