"""How DTensor's rules shard an operation, and how Piper's do, where neither communicates.

DTensor's sharding propagator needs no process group: it maps the placements of operands to those of results.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.shard.rules import rule_of
from piper.capture.shard.sharder import Sharder
from piper.capture.trace.recording import Recording, how_of, is_collective
from piper.errors import CaptureError
from piper.ir import sharding as placements
from tests.capture.shard.verdict import Sample, layouts_of, recorded, sharding_of

DEGREE = 2


class CommunicatesError(Exception):
    """An operand must be redistributed before the operation, or the operation has no rule."""


def ours(recording: Recording, layouts: Sequence[placements.Placement]) -> list[str]:
    """Return the placements of results under Piper's rules."""
    sharding = sharding_of(recording, layouts, DEGREE)
    bare = replace(recording, results=())  # results stay as their operations leave them
    sharder = Sharder(bare, sharding, rule_of, lambda node: None)
    try:
        sharder.run()
    except CaptureError as error:
        raise CommunicatesError from error
    if any(is_collective(node) and how_of(node).op != "none" for node in sharder.graph.nodes):
        raise CommunicatesError
    return [_in_words(sharder.layout(result)) for result in recording.results]


def _in_words(layout: placements.Placement) -> str:
    match layout:
        case placements.Shard(dim=dim, blocks=blocks):
            return f"shard {dim}" if blocks == 1 else f"shard {dim} in blocks"
        case placements.Partial(op=op):
            return f"partial {op}"
    return "replicate"


def _placement(layout: placements.Placement) -> Placement:
    match layout:
        case placements.Shard(dim=dim):
            return Shard(dim)
        case placements.Partial(op=op):
            return Partial(op)
    return Replicate()


def _of_dtensor(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f"partial {placement.reduce_op}"
    if isinstance(placement, Replicate):
        return "replicate"
    dim = placement.dim  # type: ignore[attr-defined]
    return f"shard {dim}" if type(placement) is Shard else f"shard {dim} in blocks"


def traced(sample: Sample) -> fx.GraphModule:
    """Return an operation in the ATen operations that DTensor's rules are for."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in sample.tensors]
    return make_fx(lambda *given: tuple(sample.call(*given)), tracing_mode="fake")(*fakes)


def theirs(module: fx.GraphModule, layouts: Sequence[placements.Placement]) -> list[str]:
    """Return the placements of results under DTensor's rules."""
    mesh = DeviceMesh("cpu", list(range(DEGREE)), _init_backend=False, _rank=0)
    operands = iter(layouts)
    specs: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            specs[node] = _spec(mesh, node.meta["val"], _placement(next(operands)))
        elif node.op == "get_attr":
            specs[node] = _spec(mesh, getattr(module, node.target), Replicate())
        elif node.op == "output":
            return [_of_dtensor(specs[result].placements[0]) for result in node.args[0]]
        elif node.target is operator.getitem:
            specs[node] = specs[node.args[0]][node.args[1]]
        elif not any(isinstance(specs[used], DTensorSpec) for used in node.all_input_nodes):
            value = node.meta["val"]
            specs[node] = _spec(mesh, value, Replicate()) if isinstance(value, Tensor) else value
        else:
            specs[node] = _propagated(node, specs)
    raise AssertionError("a graph without an output")


def _spec(mesh: DeviceMesh, value: Tensor, placement: Placement) -> DTensorSpec:
    return DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype))


def _propagated(node: fx.Node, specs: dict[fx.Node, Any]) -> Any:  # noqa: ANN401  one spec, or several
    propagator = DTensor._op_dispatcher.sharding_propagator
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), specs.__getitem__)
    schema = OpSchema(node.target, args, kwargs)  # type: ignore[arg-type]
    newer = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {})  # torch 2.13 has both
    schema.schema_info = (newer | propagator.op_to_schema_info).get(node.target)
    try:
        sharding = propagator.propagate_op_sharding_non_cached(schema)
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:  # DTensor refuses so
        raise CommunicatesError from error
    except ZeroDivisionError as error:  # its rule for views divides by a size of nothing
        assert any(0 in spec.shape for spec in schema.args_spec)
        raise CommunicatesError from error
    if sharding.needs_redistribute:  # a view says so too, where only its sizes become those of a shard
        wanted = sharding.redistribute_schema
        if wanted is None or [spec.placements for spec in wanted.args_spec] != [
            spec.placements for spec in schema.args_spec
        ]:
            raise CommunicatesError
    return sharding.output_spec


def differences(sample: Sample, limit: int) -> tuple[int, list[tuple[str, str]]]:
    """Return in how many layouts neither communicates, and the results, ours and DTensor's, that differ."""
    try:
        recording, module = recorded(sample), traced(sample)
    except (CaptureError, RuntimeError, DynamicOutputShapeException, DataDependentOutputException):
        return 0, []  # not an operation of fixed shapes
    compared, differing = 0, []
    for layouts in plain_layouts(sample.tensors, limit):
        try:
            pairs = zip(ours(recording, layouts), theirs(module, layouts), strict=True)
        except CommunicatesError:
            continue
        compared += 1
        differing += [pair for pair in pairs if pair[0] != pair[1]]
    return compared, differing


def plain_layouts(tensors: Sequence[Tensor], limit: int) -> list[tuple[placements.Placement, ...]]:
    """Return combinations of plain layouts, but not all whole: those that leave most tensors whole first.

    An even stride through all would give the last tensor the same layout wherever it fits their number.
    """
    every = list(itertools.product(*(layouts_of(tensor, DEGREE, short=True) for tensor in tensors)))[1:]
    return sorted(every, key=lambda layouts: sum(layout != placements.Replicate() for layout in layouts))[
        :limit
    ]
