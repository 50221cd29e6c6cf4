"""The operations of which DTensor's rule gives the numbers of one device, forward and backward.

Each has been compared with eager on samples in every layout (`tests/capture/shard/dtensor_verified.txt`). Not
among them are `index_put`, whose rule gives devices parts that do not fit where values broadcast, and norms
over a batch, which would write running statistics into slices of a whole tensor.
"""

import torch

_NAMES = """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool3d.default aten._conj.default
    aten._fft_c2c.default aten._fft_c2r.default aten._fft_r2c.default aten._linalg_det.default
    aten._linalg_slogdet.default aten._linalg_solve_ex.default aten._prelu_kernel.default
    aten._upsample_bicubic2d_aa.default aten._upsample_bilinear2d_aa.default
    aten._weight_norm_interface.default aten.adaptive_max_pool2d.default
    aten.adaptive_max_pool3d.default aten.addmv.default aten.addr.default aten.alias_copy.default
    aten.avg_pool2d.default aten.avg_pool3d.default aten.baddbmm.default aten.bucketize.Tensor
    aten.channel_shuffle.default aten.cholesky.default aten.cholesky_inverse.default
    aten.cholesky_solve.default aten.convolution.default aten.cummax.default aten.cummin.default
    aten.diagonal_scatter.default aten.expand_copy.default aten.fill.Scalar aten.fill_.Scalar
    aten.floor_divide.default aten.fractional_max_pool2d.default aten.fractional_max_pool3d.default
    aten.geqrf.default aten.grid_sampler_2d.default aten.grid_sampler_3d.default aten.hardswish.default
    aten.histc.default aten.index_copy.default aten.index_fill.int_Scalar aten.index_reduce.default
    aten.isin.Tensor_Tensor aten.linalg_cholesky_ex.default aten.linalg_cross.default
    aten.linalg_inv_ex.default aten.linalg_lu.default aten.linalg_lu_factor_ex.default
    aten.linalg_matrix_exp.default aten.linalg_pinv.atol_rtol_tensor
    aten.linalg_solve_triangular.default aten.log_sigmoid_forward.default
    aten.max_pool2d_with_indices.default aten.max_pool3d_with_indices.default aten.max_unpool2d.default
    aten.max_unpool3d.default aten.mode.default aten.nanmedian.dim aten.nansum.default
    aten.narrow_copy.default aten.native_group_norm.default aten.native_layer_norm.default
    aten.new_empty.default aten.new_empty_strided.default aten.new_full.default aten.new_ones.default
    aten.new_zeros.default aten.norm.ScalarOpt_dim aten.ormqr.default aten.permute_copy.default
    aten.pixel_shuffle.default aten.pixel_unshuffle.default aten.rot90.default aten.rsub.Tensor
    aten.scatter.src aten.scatter.value aten.select_scatter.default
    aten.split_with_sizes_copy.default aten.squeeze_copy.default aten.squeeze_copy.dim
    aten.std_mean.correction aten.t_copy.default aten.transpose_copy.int aten.unbind_copy.int
    aten.unsafe_split.Tensor aten.unsqueeze_copy.default aten.var_mean.correction aten.vdot.default
    aten.view_copy.default aten.zero_.default
"""
# In torch 2.11 it takes slices of an image, whose edges DTensor then exchanges outside of the rule.
_SINCE = {"aten.convolution.default": "2.13"}
VERIFIED = frozenset(
    name for name in _NAMES.split() if name not in _SINCE or torch.__version__ >= _SINCE[name]
)
