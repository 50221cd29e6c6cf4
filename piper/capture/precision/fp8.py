"""Products of linear layers in fp8, with the rounding that the docs define (docs/directives/precision.md).

    y  = x w^T      x and w rounded to e4m3, each row by a scale of its own
    gx = g w        the same rounded w; its scales are multiplied into g, which is rounded row by row to e4m3
    gw = g^T x      g rounded to e5m2 and x to e4m3, each by one scale for all rows of the slice

A scale is the largest magnitude divided by the largest number of the type. Values are multiplied by the
inverse before they are rounded. The first two depend on single rows, so they are the same however samples
are sliced; the third is a sum over rows, and sees the slice that it is given. Sums are wide, and the result
has the type of x. Of grouped products the first two are the same, expert by expert; the third is not rounded:
which rows meet in it depends on where experts are.
"""

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.trace.assemble import Body, CapturedChunk
from piper.capture.trace.linear_layers import WEIGHT, factors_of, is_grouped
from piper.errors import ScheduleError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
LEAST = 1e-30  # a scale: rows of zeros have one too
ALIGNED = 16  # elements: what tensor cores ask of the sides of a product
CAPABLE = (8, 9)  # the first compute capability with fp8
Scaled = tuple[Tensor, Tensor]  # values in an fp8 type, and the scales by which they were divided


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a weight [out, in] in fp8, and add a bias."""
    rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, None)  # type: ignore[no-untyped-call]
    y = rows.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def fp8_grouped(rows: Tensor, weight: Tensor, counts: Tensor, transpose: bool = False) -> Tensor:
    """Multiply each expert's rows by that expert's weight in fp8. transpose: it is [experts, out, in]."""
    stored = weight if transpose else weight.transpose(1, 2)
    return _Product.apply(rows, stored, counts)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    """The products of a linear layer, or with `counts` those of experts with weights [experts, out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:  # noqa: ANN401
        peaks, weight_peaks = peaks_of(x), peaks_of(weight)
        ctx.save_for_backward(x, weight, counts, peaks, weight_peaks)
        return product(rounded(x, peaks, E4M3), rounded(weight, weight_peaks, E4M3), x.dtype, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401
        x, weight, counts, peaks, weight_peaks = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            narrow, rows = rounded(weight, weight_peaks, E4M3)
            if counts is None:
                each = rows.t()
            else:
                each = rows.squeeze(2)[torch.repeat_interleave(counts, output_size=grad.shape[0])]
            folded = grad.to(rows.dtype) * each
            turned = narrow.transpose(-2, -1), rows.new_ones((*weight.shape[:-2], weight.shape[-1], 1))
            of_x = product(rounded(folded, peaks_of(folded), E4M3), turned, x.dtype, counts)
        if ctx.needs_input_grad[1] and counts is not None:
            of_weight = torch.ops.piper.grouped_mm_weight(grad.contiguous(), x, counts, weight.shape[0])
        elif ctx.needs_input_grad[1]:
            left, left_scale = rounded(grad, peaks_of(grad).amax(), E5M2)
            right, right_scale = rounded(x, peaks.amax(), E4M3)
            of_weight = product((left.t(), left_scale), (right.t(), right_scale), x.dtype)
        return of_x, of_weight, None


def peaks_of(values: Tensor) -> Tensor:
    """Return the largest magnitude of each row.

    Magnitudes are in the order of their bits, and of those a GPU finds the larger in one instruction. Of
    numbers it takes four, because NaN has to win; as bits it does.
    """
    magnitudes = values.to(torch.promote_types(values.dtype, torch.float32)).abs()
    return magnitudes.view(BITS[magnitudes.dtype]).amax(-1, keepdim=True).view(magnitudes.dtype)


def rounded(values: Tensor, peaks: Tensor, kind: torch.dtype) -> Scaled:
    """Divide values by the scales of their largest magnitudes and round them to an fp8 type.

    The kernels that do this are bound by their arithmetic, so they multiply, and clamp nothing: the largest
    value becomes the type's largest number, to a rounding that the fp8 type does not see.
    Products in float64 are rounded to float32 before, as torch does by itself and Triton does not.
    """
    largest = LARGEST[kind]
    inverse = largest / peaks.clamp(min=largest * LEAST)
    return (values.to(inverse.dtype) * inverse).float().to(kind), (peaks / largest).clamp(min=LEAST)


def product(left: Scaled, right: Scaled, dtype: torch.dtype, counts: Tensor | None = None) -> Tensor:
    """Multiply rows by rows, [m, k] and [n, k] to [m, n]. Scales are one number each, or one for each row.

    counts: of the rows of each expert, whose matrix `right` holds.
    """
    (a, scale_a), (b, scale_b) = left, right
    if counts is not None:
        return fp8_grouped_mm(a, b, scale_a, scale_b, counts, dtype)  # type: ignore[no-any-return]
    a, b = a.contiguous(), b.contiguous()
    by_row = scale_b.dim() > 0
    across = scale_b.t() if by_row else scale_b
    aligned = not any(side % ALIGNED for side in (*a.shape[1:], *b.shape))
    if a.is_cuda and aligned and dtype is not torch.float64:
        across, kind = across.contiguous(), torch.bfloat16
        # Kernels with scales of rows are slow without fast accumulation.
        rows = torch._scaled_mm(a, b.t(), scale_a, across, out_dtype=kind, use_fast_accum=by_row)
        return rows.to(dtype)
    return fp8_mm(a, b.t(), scale_a, across, dtype)  # type: ignore[no-any-return]


@torch.library.custom_op("piper::fp8_mm", mutates_args=())
def fp8_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply fp8 matrices where there are no tensor cores for them: in the type of their scales."""
    sums = a.to(scale_a.dtype) @ b.to(scale_b.dtype)
    return (sums * scale_a * scale_b).to(dtype)


@fp8_mm.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


@torch.library.custom_op("piper::fp8_grouped_mm", mutates_args=())
def fp8_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply each expert's rows of `a` by the rows of its matrix: [n, k] and [experts, m, k] to [n, m]."""
    a, b = a.contiguous(), b.contiguous()
    aligned = not any(side % ALIGNED for side in b.shape[1:])
    if a.is_cuda and aligned and dtype is not torch.float64 and a.shape[0]:
        rows = torch._scaled_grouped_mm(
            a,
            b.transpose(1, 2),
            scale_a.squeeze(1),
            scale_b.squeeze(2).contiguous(),
            offs=counts.cumsum(0).to(torch.int32),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return rows.to(dtype)
    ends = counts.cumsum(0).tolist()
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        sums = a[start:end].to(scale_a.dtype) @ b[expert].to(scale_b.dtype).t()
        out[start:end] = (sums * scale_a[start:end] * scale_b[expert].t()).to(dtype)
    return out


@fp8_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def check_machine(device: str, by: str) -> None:
    """Refuse products in fp8 on a GPU that has none."""
    if device == "cuda" and torch.cuda.get_device_capability() < CAPABLE:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ScheduleError(
            "this GPU has no products in fp8",
            by=by,
            facts={"here": f"{torch.cuda.get_device_name()}, compute capability {capability}"},
            hint="fp8 needs compute capability 8.9 (Ada, Hopper or later): leave precision out, "
            "or use --device cpu, where fp8 is emulated",
        )


def in_fp8(piece: CapturedChunk) -> CapturedChunk:
    """Return a chunk whose marked products run in fp8."""
    assert piece.body is not None, "a marker has no code"
    products = piece.chunk.products
    segments = tuple(replace(segment, body=_rewritten(segment.body, products)) for segment in piece.segments)
    return replace(piece, body=_rewritten(piece.body, products), segments=segments)


def _rewritten(body: Body, products: Collection[str]) -> Body:
    """Replace the products of a body with some weights.

    linear(x, w, b), grouped_mm(x, w, counts)
    -->
    fp8_linear(x, w, b), fp8_grouped(x, w, counts)
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        chosen = node.meta.get(WEIGHT) in products
        factors = factors_of(node) if chosen else None
        if chosen and is_grouped(node):
            args = fx.node.map_arg(node.args, copies.__getitem__)
            copies[node] = graph.call_function(fp8_grouped, args)
        elif factors is not None:
            weight = copies[factors.weight]
            weight = graph.call_method("t", (weight,)) if factors.transposed else weight
            bias = copies[factors.bias] if isinstance(factors.bias, fx.Node) else None
            copies[node] = graph.call_function(fp8_linear, (copies[factors.x], weight, bias))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return replace(body, graph=graph)


REWRITTEN = (fp8_linear, fp8_grouped)


def merge_rounding(graph: fx.Graph) -> None:
    """Round a value once that several products read, once in the forward and once in the backward.

    If the backward used what the forward had rounded, each microbatch would hold that in between.
    """
    known: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(value, Tensor):
            continue
        copies = node.target is torch.ops.aten.clone.default and value.dtype not in LARGEST
        if copies or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue  # a copy is there because its memory is its own
        side = node.meta.get("partitioner_tag")
        first = known.setdefault(f"{side} {node.target} {node.args} {node.kwargs}", node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
