"""Shards an operation that has no rule here as DTensor's rule for it says: one adapter for all of them.

DTensor maps the placements of operands to those of results, for the same operation on each device's part.
That is what a rule here says. Autograd differentiates the local operation, so the backward follows. Not every
rule of DTensor is right: only those are asked that tests have compared with eager, forward and backward, on
samples in every layout (`tests/capture/shard/dtensor_verified.txt`). Not among them are `index_put`, whose
rule gives devices parts that do not fit where values broadcast, and norms over a batch, which would write
running statistics into slices of a whole tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.layout import CopiedShard, local_shape, value_of
from piper.capture.shard.sharder import Sharder
from piper.capture.trace.effects import writes
from piper.capture.trace_errors import reason
from piper.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard

REFUSES = (RuntimeError, ValueError, TypeError, AssertionError, IndexError)  # how DTensor refuses
_NAMES = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _conj _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_slogdet
    _linalg_solve_ex _prelu_kernel _upsample_bicubic2d_aa _upsample_bilinear2d_aa _weight_norm_interface
    adaptive_max_pool2d adaptive_max_pool3d addmv addr alias_copy avg_pool2d avg_pool3d baddbmm
    bucketize.Tensor channel_shuffle cholesky cholesky_inverse cholesky_solve convolution cummax cummin
    diagonal_scatter expand_copy fill.Scalar fill_.Scalar floor_divide fractional_max_pool2d
    fractional_max_pool3d geqrf grid_sampler_2d grid_sampler_3d hardswish histc index_copy
    index_fill.int_Scalar index_reduce isin.Tensor_Tensor linalg_cholesky_ex linalg_cross linalg_inv_ex
    linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_solve_triangular
    log_sigmoid_forward max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d mode
    nanmedian.dim nansum narrow_copy native_group_norm native_layer_norm new_empty new_empty_strided
    new_full new_ones new_zeros norm.ScalarOpt_dim ormqr permute_copy pixel_shuffle pixel_unshuffle rot90
    rsub.Tensor scatter.src scatter.value select_scatter split_with_sizes_copy squeeze_copy
    squeeze_copy.dim std_mean.correction t_copy transpose_copy.int unbind_copy.int unsafe_split.Tensor
    unsqueeze_copy var_mean.correction vdot view_copy zero_
"""
# In torch 2.11 it takes slices of an image, whose edges DTensor then exchanges outside of the rule.
_SINCE = {"convolution": "2.13"}
VERIFIED = frozenset(
    f"aten.{name}" if "." in name else f"aten.{name}.default"
    for name in _NAMES.split()
    if name not in _SINCE or torch.__version__ >= _SINCE[name]
)


def shard_as_dtensor(d: Sharder, node: fx.Node) -> None:
    """Write an operation on each device's part, with its results where DTensor places them.

    Whole operands are sliced where it asks for that. Where it would gather, the operation is refused.
    """
    if d.whole(node):
        return
    if any(isinstance(leaf, fx.Node) for leaf in tree_leaves(node.kwargs)):
        raise NoRuleError("a tensor is given to it by name")
    operands = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node)]
    order = _order(d, operands)
    sharding = ask(d, node)
    wanted = sharding.redistribute_schema or OpSchema(node.target, _specs(d, node), {})  # type: ignore[arg-type]
    specs = [spec for spec in tree_leaves(wanted.args_schema) if isinstance(spec, DTensorSpec)]
    local = iter([order.bring(d, node, *pair) for pair in zip(operands, specs, strict=True)])
    args = tree_map(lambda leaf: next(local) if isinstance(leaf, DTensorSpec) else leaf, wanted.args_schema)
    try:
        result = d.emit(node.target, args, node.kwargs)
    except RuntimeError as error:  # each fake kernel raises a kind of its own
        raise NoRuleError(f"one device's part of it cannot be computed: {reason(error)}") from error
    _finish(d, node, result, sharding, order)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """How all sharded operands order the dimension that is sharded: in blocks, in a zigzag, or neither.

    DTensor knows no order. Its rules hold for any degree, so for slices of one element too: the operation
    does the same for every element of the dimension, in any order, as long as the dimension keeps its size.
    """

    shard: Shard
    size: int

    def placed(self, placement: dtensor.Placement, shape: Sequence[int]) -> Placement:
        """Translate a placement of DTensor for a value of some shape."""
        match placement:
            case dtensor.Shard(dim=dim) if type(placement) is dtensor.Shard:
                if self.shard != Shard(0) and shape[dim] != self.size:
                    raise NoRuleError("it changes the order of a sharded dimension")
                return self.shard.at(dim)
            case dtensor.Replicate():
                return REPLICATE
            case dtensor.Partial(reduce_op="sum" | "max" as op) if type(placement) is dtensor.Partial:
                return Partial(op)
        raise NoRuleError(f"DTensor leaves its result as {placement}")

    def bring(self, d: Sharder, node: fx.Node, operand: fx.Node, spec: DTensorSpec) -> fx.Node:
        """Return an operand as DTensor wants it, if it lies so or every device can take its slice."""
        have, want = d.layout(operand), self.placed(spec.placements[0], d.shape(operand))
        if have != want and not (isinstance(have, Replicate) and isinstance(want, Shard)):
            raise NoRuleError("it works along the sharded dimension")
        if have != want and operand in writes(node):
            raise NoRuleError("it writes into what every device holds whole")
        return d.to(operand, want, varies=True)


def _order(d: Sharder, operands: Sequence[fx.Node]) -> _Order:
    sharded = [(x, have) for x in operands if isinstance(have := d.layout(x), Shard)]
    orders = {_Order(shard=have.at(0), size=d.shape(x)[have.dim]) for x, have in sharded}
    first = next(iter(orders))
    if isinstance(first.shard, CopiedShard) or (len(orders) > 1 and any(o.shard != Shard(0) for o in orders)):
        raise NoRuleError("its operands are sharded in different orders")
    return first


def ask(d: Sharder, node: fx.Node) -> OutputSharding:
    """Return what DTensor says of an operation with its operands as they lie."""
    schema = OpSchema(node.target, _specs(d, node), dict(node.kwargs))  # type: ignore[arg-type]
    propagator = dtensor.DTensor._op_dispatcher.sharding_propagator
    newer = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {})  # since torch 2.12
    schema.schema_info = (newer | propagator.op_to_schema_info).get(node.target)
    try:
        sharding = propagator.propagate_op_sharding_non_cached(schema)
    except REFUSES as error:
        raise NoRuleError("it has no sharding of its own and none in DTensor") from error
    wanted = sharding.redistribute_schema
    if wanted is not None and wanted.op is not node.target:
        raise NoRuleError("DTensor computes it by another operation")
    return sharding


def _specs(d: Sharder, node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of an operation, with a placement for each tensor."""

    def spec(source: fx.Node) -> Any:  # noqa: ANN401  an argument of a graph
        value = value_of(source)
        if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise NoRuleError("its operands are not all tensors of fixed sizes")
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        have = d.layout(source)
        placement = dtensor.Shard(have.dim) if isinstance(have, Shard) else dtensor.Replicate()
        return DTensorSpec(_mesh(d.degree), (placement,), tensor_meta=meta)

    return tuple(map_arg(node.args, spec))


@cache
def _mesh(degree: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(degree)), _init_backend=False, _rank=0)


def _finish(d: Sharder, node: fx.Node, result: fx.Node, sharding: OutputSharding, order: _Order) -> None:
    """Say where the results lie, and refuse those whose shape or gradient is not what that promises."""
    several = isinstance(sharding.output_spec, tuple | list)
    every = [sharding.output_spec, value_of(node), result.meta["example_value"]]
    layouts: list[Placement] = []
    for spec, whole, own in zip(*every, strict=True) if several else [every]:
        if not isinstance(whole, Tensor) or not isinstance(spec, DTensorSpec):
            raise NoRuleError("its results are not all tensors")
        layout = order.placed(spec.placements[0], whole.shape)
        if tuple(own.shape) != local_shape(tuple(whole.shape), layout, d.degree):
            raise NoRuleError("one device's part of it has another shape than DTensor says")
        if own.requires_grad and not (isinstance(layout, Shard) or layout == Partial()):
            raise NoRuleError("its gradient on one device is not a part of the whole one")
        layouts.append(layout)
    d.done(node, result, layouts if several else layouts[0])
