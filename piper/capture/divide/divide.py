"""Turns a recorded forward into that of one device of a group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from piper.capture.divide.compute_rules import by_family
from piper.capture.divide.divider import Divider, aten
from piper.capture.divide.division import Division
from piper.capture.divide.layout import Divided
from piper.capture.divide.reshapes import RESHAPES, value_of
from piper.capture.divide.rules import rules
from piper.capture.divide.shape_rules import argument, number
from piper.capture.trace.functionalize import simplify
from piper.capture.trace.recording import FromParameter, Origin, Recording
from piper.capture.trace.regions import find_regions
from piper.ir.chunk import Tags


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedForward:
    """The forward of one device of a group, and what became of the parameters."""

    recording: Recording
    division: Division
    summed: frozenset[str]  # whole parameters whose gradient is a sum over the group


def divide(
    recording: Recording,
    division: Division,
    inside: Callable[[Tags], bool],
    peers: Callable[[Tags, Tags], bool],
) -> DividedForward:
    """Divide a forward in ATen operations over the devices of a group.

    inside: whether a region is divided. peers: whether two regions' devices hold the same slices.
    """
    division = replace(division, weights=_with_biases(recording, division.weights))
    regions = find_regions(recording, simplify(recording))
    region_of: Mapping[fx.Node, Tags] = regions.region_of
    marked: frozenset[str] = frozenset()
    while True:
        divider = Divider(recording, division, rules(), by_family, region_of.get, inside, peers, marked)
        divider.run()
        mixed = (divider.summed & divider.same) - marked
        if not mixed:
            break
        marked |= mixed  # used both ways: its divided uses go through a collective
    origins: dict[fx.Node, Origin] = {
        divider.local[node]: origin for node, origin in recording.origins.items()
    }
    for kind, node in divider.ranks.items():
        origins[node] = kind(axis=division.axis)
    made = replace(
        recording,
        graph=divider.graph,
        origins=origins,
        results=tuple(divider.local[result] for result in recording.results),
        tags={node: divider.tags.get(node, ()) for node in divider.graph.nodes},
        modes=divider.modes,
        bundles=divider.bundles,
    )
    return DividedForward(recording=made, division=division, summed=frozenset(divider.summed))


PRODUCTS = {
    aten.linear.default: (1, 0, 2),
    aten.addmm.default: (2, 1, 0),
}  # weight, its dimension of outputs, bias
SPLITS = frozenset((aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default))


def _with_biases(recording: Recording, weights: Mapping[str, Divided]) -> dict[str, Divided]:
    """Divide a bias as the outputs of its weight.

    A weight whose outputs are split right away is divided by blocks: query, key and value each by itself.
    """
    names = {
        node: origin.name for node, origin in recording.origins.items() if isinstance(origin, FromParameter)
    }
    found = dict(weights)
    for node in recording.graph.nodes:
        if node.target not in PRODUCTS:
            continue
        weight, outputs, bias = PRODUCTS[node.target]
        given = names.get(node.args[weight])
        held = weights.get(given) if given is not None else None
        if given is None or held is None or held.dim != outputs:
            continue
        found[given] = Divided(outputs, _blocks(node))
        added = names.get(node.args[bias]) if len(node.args) > bias else None
        if added is not None:
            found[added] = Divided(0, _blocks(node))
    return found


def _blocks(node: fx.Node) -> int:
    """Return into how many equal parts the last dimension of a product is split."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        made, given = value_of(user), value_of(node)
        if user.target in SPLITS:
            assert isinstance(made, tuple | list)
            last = made[0].dim() - 1
            dim = number(argument(user, 2, "dim", 0))
            sizes = {int(part.shape[last]) for part in made}
            return len(made) if dim % (last + 1) == last and len(sizes) == 1 else 1
        if user.target is aten.glu.default and isinstance(given, Tensor):
            return 2 if number(argument(user, 1, "dim", -1)) in (-1, given.dim() - 1) else 1
        if user.target not in RESHAPES or not isinstance(made, Tensor) or not isinstance(given, Tensor):
            return 1
        if not made.dim() or made.shape[-1] != given.shape[-1]:
            return 1
        node = user
    return 1
