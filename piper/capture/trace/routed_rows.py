"""Refuses experts whose results depend on which rows and which experts a device has.

The forward of the region runs once on fakes, with a prime number of rows and another of experts, so that the
size of each dimension shows what lies along it. Operations must work on single rows, and may look up what
belongs to the expert of a row. They may combine the rows of an expert where a device has all of these.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper.capture.trace.assemble import Body
from piper.capture.trace_errors import node_line, quiet, reason
from piper.errors import CaptureError

ROWS, EXPERTS = 1013, 1009  # primes that divide no other size
BY_EXPERT = ("grouped_mm", "_grouped_mm", "_scaled_grouped_mm")
# Of an argument of these only the shape counts.
SHAPED = ("new_", "empty", "zeros", "ones", "full", "rand", "bernoulli")
LOOKUPS = ("index", "index_select", "gather", "embedding")
WRITES = ("index_add", "index_put", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
# Operations that combine dimensions which no argument names: the first, the last two, all after the first.
FIRST = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
LAST_TWO = ("linalg_", "_linalg_", "tril", "triu", "_scaled_dot_product_", "_flash_", "_efficient_")
LATER = ("convolution", "native_group_norm", "avg_pool", "max_pool", "_adaptive_")
ROWS_COMBINED = "it combines rows of several experts, which lie on several devices"
ROWS_PICKED = "it picks rows by their places, at which each device has other rows"
EXPERTS_COMBINED = "it combines or picks experts, and each device has others"
NUMBERS_USED = "it computes with numbers of rows or experts, and each device has its own"
OF_ONE_EXPERT = "it combines the rows of an expert, or their number, and no device has just these rows"
UNSHARDED = "it looks up a number of an expert, of which each device has its own, in what is not sharded"


def check_rows(body: Body, region: str, *, sharded: bool, apart: bool) -> None:
    """Refuse an operation of an expert region that depends on which rows and experts a device has."""
    # sharded: it has some of the experts. apart: it has some of an expert's rows only, or others beside them.
    experts = body.experts
    assert experts is not None, "only expert regions have routed rows"

    def fake(tensor: Tensor, *first: int) -> Tensor:
        shape = [*first, *tensor.shape[len(first) :]]
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    watch = _Watch(body, region, sharded=sharded, apart=apart)
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.no_grad():
        local = EXPERTS if sharded else experts.total
        inputs = []
        for tensor, counts in zip(body.inputs, experts.counts, strict=True):
            inputs.append(fake(tensor, local if counts else ROWS))
            watch.hold(inputs[-1], {"counts"} if counts else set())
        state = [fake(tensor, local) if sharded else fake(tensor) for tensor in (*body.params, *body.buffers)]
        try:
            with watch:
                _Runner(_make_graph_module(body.root, body.graph), watch).run(*inputs, *state)
        except CaptureError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # each fake kernel raises a kind of its own
            watch.name = watch.node.name
            raise watch.refused(
                f"it works for one number of rows or experts only: {reason(error)}"
            ) from error


class _Runner(fx.Interpreter):
    """Runs the nodes of a region, and remembers which are numbers that come from sizes."""

    def __init__(self, module: fx.GraphModule, watch: "_Watch") -> None:
        super().__init__(module)
        self.extra_traceback = False  # it would add to the text of errors
        self.watch = watch
        self.sizes: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401  the interpreter's protocol
        self.watch.node = n
        self.watch.reads_size = not self.sizes.isdisjoint(n.all_input_nodes)
        result = super().run_node(n)
        if isinstance(result, int | float | torch.SymInt | torch.SymFloat):
            self.sizes.add(n)
        return result


class _Watch(TorchDispatchMode):
    """Looks at every operation while it runs."""

    def __init__(self, body: Body, region: str, *, sharded: bool, apart: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region, self.sharded, self.apart = region, sharded, apart
        self.node = next(iter(body.graph.nodes))
        self.reads_size = False  # the running node reads a number that comes from sizes
        self.name = ""
        self.numbers: dict[int, tuple[Tensor, set[str]]] = {}  # by identity; a tensor is kept to be unique

    def refused(self, why: str) -> CaptureError:
        return CaptureError(
            "what is computed here depends on which rows and experts a device has",
            by=f"{self.name}{node_line(self.node)}",
            facts={"region": self.region, "why": why},
            hint="between route and unroute compute with single rows and the weights of their experts; do "
            "this before route or after unroute, or do not shard this region",
        )

    def hold(self, tensor: Tensor, kinds: set[str]) -> None:
        """Remember what a tensor has: "counts" of an expert's rows, or "places" of rows and experts."""
        self.numbers[id(tensor)] = tensor, kinds

    def held(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return what the elements of tensors are made from."""
        return set().union(*(self.numbers.get(id(tensor), (tensor, set()))[1] for tensor in tensors))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
        given |= kwargs or {}
        self.name = op._schema.name.partition("::")[2]
        if self.name == "repeat_interleave" and "repeats" in given:
            numbers = op(given["repeats"], output_size=ROWS)  # of each row's expert, made from the counts
            self.hold(numbers, {"places"})
            return numbers
        out = op(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if made:
            kinds = self.kinds_made(op, given, made)
            self.check_numbers(op, kinds, made)
            for tensor in made:
                self.hold(tensor, kinds)
        return out

    def kinds_made(self, op: Any, given: Mapping[str, Any], made: list[Tensor]) -> set[str]:  # noqa: ANN401
        """Refuse an operation that combines rows or experts. Return which numbers its results hold."""
        name = self.name.removesuffix("_")
        read = [leaf for leaf in tree_leaves([*given.values()]) if isinstance(leaf, Tensor)]
        if name in ("arange", "randperm"):
            return {"places"} if _along(made[0], ROWS) or _along(made[0], EXPERTS) else set()
        # of `full`, and of a tensor that is made of a number
        filled = given.get("fill_value", given.get("s"))
        if isinstance(filled, int | float) and filled and (filled % ROWS == 0 or filled % EXPERTS == 0):
            return {"places"}
        if name in BY_EXPERT or name.startswith(SHAPED):
            return set()
        if name in LOOKUPS:
            table = given["weight" if name == "embedding" else "self"]
            self.pick(name, table, given)
            return self.held([table])
        if name in WRITES:
            return self.write(name, given, read)
        self.combine(name, given, read, made, views=op.is_view)
        kinds = self.held(read)
        return {"places"} if name == "cumsum" and kinds else kinds

    def check_numbers(self, op: Any, kinds: set[str], made: list[Tensor]) -> None:  # noqa: ANN401
        """Refuse to compare rows with one another, and to compute with numbers of rows and experts."""
        if any(len(_along(tensor, ROWS)) > 1 for tensor in made):
            raise self.refused(ROWS_COMBINED)
        if any(tensor.is_floating_point() for tensor in made):
            if "places" in kinds or (self.reads_size and torch.Tag.pointwise in op.tags):
                raise self.refused(NUMBERS_USED)
            if "counts" in kinds and self.apart:
                raise self.refused(OF_ONE_EXPERT)

    def pick(self, name: str, table: Tensor, given: Mapping[str, Any]) -> list[Tensor]:
        """Refuse to pick entries by anything but the number of a row's expert. Return the numbers used."""
        numbers = []
        for dim, index in _picked(name, table, given):
            by_expert = "places" in self.held([index])
            if dim in _along(table, ROWS):
                raise self.refused(ROWS_PICKED)
            if dim in _along(table, EXPERTS) and not by_expert:
                raise self.refused(EXPERTS_COMBINED)
            if self.sharded and name in LOOKUPS and by_expert and dim not in _along(table, EXPERTS):
                raise self.refused(UNSHARDED)
            numbers.append(index)
        return numbers

    def write(self, name: str, given: Mapping[str, Any], read: list[Tensor]) -> set[str]:
        """Allow to write or to add rows to entries of their experts, where a device has just those rows."""
        table: Tensor = given["self"]
        numbers = self.pick(name, table, given)
        if any(_along(tensor, ROWS) for tensor in read) and not _along(table, ROWS):
            if self.apart or not self.sharded:
                raise self.refused(OF_ONE_EXPERT)
            if not _along(table, EXPERTS):
                raise self.refused(ROWS_COMBINED)
        return self.held(tensor for tensor in read if not any(tensor is index for index in numbers))

    def combine(
        self, name: str, given: Mapping[str, Any], read: list[Tensor], made: list[Tensor], *, views: bool
    ) -> None:
        """Refuse an operation along rows or experts: one that leaves no such dimension, or names it."""
        for prime, why in ((ROWS, ROWS_COMBINED), (EXPERTS, EXPERTS_COMBINED)):
            there = any(_along(tensor, prime) for tensor in read)
            if there and not any(_along(tensor, prime) for tensor in made):
                raise self.refused(why)
            numbers = prime == EXPERTS and not made[0].is_floating_point()  # such as a sum of counts so far
            named = set() if views or numbers or not there else {*_dims(name, given, read[0])}
            if not named.isdisjoint(_along(read[0], prime) if named else ()):
                raise self.refused(why)


def _along(tensor: Tensor, prime: int) -> list[int]:
    """Return the dimensions of a tensor that lie along rows or along experts."""
    return [
        dim for dim, size in enumerate(tensor.shape) if isinstance(size, int) and size and size % prime == 0
    ]


def _picked(name: str, table: Tensor, given: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield the dimensions of a table along which an operation picks entries, and by which numbers."""
    if "dim" in given:
        yield given["dim"] % table.dim(), given["index"]
    elif isinstance(given["indices"], Tensor):
        yield 0, given["indices"]
    else:
        yield from ((dim, index) for dim, index in enumerate(given["indices"]) if index is not None)


def _dims(name: str, given: Mapping[str, Any], tensor: Tensor) -> Iterator[int]:
    """Yield the dimensions along which an operation combines elements."""
    rank = tensor.dim()
    for key in ("dim", "dims"):
        given_dims = given.get(key)
        for dim in given_dims if isinstance(given_dims, list | tuple) else [given_dims]:
            if isinstance(dim, int) and rank:
                yield dim % rank
    if name in FIRST:
        yield 0
    if name.startswith(LAST_TWO) and name != "linalg_vector_norm":
        yield from range(max(rank - 2, 0), rank)
    if name.startswith(LATER):
        yield from range(1, rank)
    if "normalized_shape" in given:
        yield from range(rank - len(given["normalized_shape"]), rank)
