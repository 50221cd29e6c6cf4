"""Samples that torch's database does not have: repeated operands, views, numbers on either side, odd sizes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from piper.losses import fused_cross_entropy
from tests.capture.shard.verdict import Sample

aten = torch.ops.aten
UNARY: dict[str, Callable[[Tensor], Tensor]] = {  # of a value of [4, 12, 6]
    "square": lambda y: y * y,
    "ratio": lambda y: y / y,
    "root mean square": lambda y: y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6),
    "from a number": lambda y: 1 - y,
    "a number by it": lambda y: 2 / y,
    "floor of a quotient": lambda y: torch.div(y, 2, rounding_mode="floor"),
    "to integers": lambda y: y.to(torch.int64),
    "to integers and back": lambda y: y.to(torch.int32).to(torch.float64),
    "to truth": lambda y: y.bool(),
    "to another's type": lambda y: aten.to.other(y, torch.zeros(1, dtype=torch.int64)),
    "integers scaled": lambda y: y.argsort(-1) * 2 + y.argsort(-1),
    "sum in integers": lambda y: y.detach().sum(-1, dtype=torch.int64),
    "sum of truths": lambda y: (y > 0).sum((-1, 1)),
    "mean of a negative dimension": lambda y: y.mean(-2, keepdim=True),
    "mean of two": lambda y: y.mean((0, -1)),
    "mean of all": lambda y: y.mean(),
    "largest of two": lambda y: y.amax((0, -2), keepdim=True),
    "largest of all": lambda y: y.amax(),
    "largest among equals": lambda y: (y - (y - 0.2).detach().relu()).amax(1),
    "softmax in another type": lambda y: y.float().softmax(1, dtype=torch.float64),
    "log softmax of the middle": lambda y: y.log_softmax(-2),
    "slice with a step": lambda y: y[:, ::2],
    "slice to the end": lambda y: y[:, 3:],
    "slice from the end": lambda y: y[:, -4:],
    "halves": lambda y: y[:, :6] * y[:, 6:],
    "thirds": lambda y: torch.cat(y.chunk(3, 1)[::-1], 1),
    "uneven split": lambda y: y.split([5, 7], 1)[1],
    "one index": lambda y: y[:, -1],
    "flattened": lambda y: y.flatten(0, 1).view(2, 2, 12, 6),
    "merged and apart": lambda y: y.reshape(4, 72).reshape(4, 6, 12),
    "unflattened": lambda y: y.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2),
    "squeezed": lambda y: y[:, :, None].squeeze(2).unsqueeze(-1).squeeze(-1),
    "expanded": lambda y: y.sum(1, keepdim=True).expand(-1, 12, -1) * y,
    "expanded in front": lambda y: y.expand(3, 4, 12, 6),
    "joined with itself": lambda y: torch.cat([y, y, 2 * y], 1),
    "joined with zeros": lambda y: torch.cat([y, torch.zeros(4, 3, 6, dtype=y.dtype)], 1),
    "joined with an empty vector": lambda y: torch.cat([torch.zeros(0, dtype=y.dtype), y], 1),
    "stacked": lambda y: torch.stack([y, y.sin()], -1),
    "in place": lambda y: y.sin().add_(y).mul_(2),
    "in place at once": lambda y: (y * 2).relu_(),
    "in place below a view": lambda y: _below(y),
    "in place through a view": lambda y: _through(y),
    "in place into a whole value below a view": lambda y: _into(y),
    "in place by a row": lambda y: torch.zeros(4, 12, 6, dtype=y.dtype).add_(y),
    "written slice": lambda y: _written(y),
    "filled by parts": lambda y: _filled(y),
    "filled by parts that leave some out": lambda y: _filled(y, 1),
    "filled with a step and over": lambda y: _filled_again(y),
    "written through views of one another": lambda y: _written_through(y),
    "written and read under another name": lambda y: _read_elsewhere(y),
    "scattered in place": lambda y: torch.zeros_like(y).scatter_(-1, y.topk(2).indices, y.topk(2).values),
    "masked": lambda y: y.masked_fill(y > 0, -1.0),
    "chosen": lambda y: torch.where(y > 0, y, 0.0),
    "chosen from numbers": lambda y: torch.where(y > 0, 1.0, y),
    "clamped by itself": lambda y: y.clamp(min=y.detach().mean()),
    "products with itself": lambda y: y @ y.transpose(1, 2),
    "products with itself by columns": lambda y: y.transpose(1, 2) @ y,
    "detached": lambda y: y.detach() * y,
    "like it": lambda y: torch.zeros_like(y) + torch.ones_like(y) + torch.full_like(y, 2.0),
    "gated": lambda y: F.glu(y, 1),
    "gated last": lambda y: F.glu(y),
    "variance": lambda y: y.var(-1, correction=0) + y.std(-1, unbiased=True),
    "truths": lambda y: (y > 0) & (y < 1) | (y > 2),
    "of a matrix": lambda y: y[0].t() @ y[1].mT.t(),
    "normed over all of the rest": lambda y: F.layer_norm(y, (12, 6)),
    "dropped": lambda y: F.dropout(y, 0.5, training=False),
    "sums of sums": lambda y: y.sum(0).sum(0).sum(0),
    "table of the largest": lambda y: F.one_hot(y.argmax(-1), 6) * y,
    "padded": lambda y: F.pad(y, (1, 1, 0, 0)),
    "padded along the middle": lambda y: F.pad(y, (0, 0, 2, 1)),
    "rotated halves": lambda y: torch.cat([-y[..., 3:], y[..., :3]], -1) * 2 + y,
    "sums of everything": lambda y: y.sum() + y.exp().sum(-1).log().sum(),
    "stable order": lambda y: torch.argsort(y, dim=-1, stable=True),
    "stable order of rows": lambda y: y.sort(dim=-1, stable=True, descending=True).values,
    "order": lambda y: y.sort(-1).values + y.argsort(-1),
    "largest few": lambda y: y.topk(2).values + y.kthvalue(2, -1, True).values,
    "extremes": lambda y: y.max(-1).values - y.min(-1).values + y.amin(-1) + y.median(-1).values,
    "places of extremes": lambda y: y.argmax(-1) + y.argmin(-1),
    "running": lambda y: y.cumsum(-1) + y.cumprod(-1) + y.logcumsumexp(-1),
    "product of a row": lambda y: y.prod(-1) + y.var(-1) + y.var((0, -1)).sum() + y.std((-1,), correction=2),
    "length": lambda y: y.norm(dim=-1) + torch.linalg.vector_norm(y, 1, -1),
    "unit length": lambda y: F.normalize(y, dim=-1),
    "likeness": lambda y: F.cosine_similarity(y, y.sin(), dim=-1),
    "truth of a row": lambda y: (y > 0).any(-1) & (y > -1).all(-1),
    "moved along": lambda y: y.flip(-1) + y.roll(2, -1) + y.roll((1, 1), (0, 2)),
    "triangles": lambda y: y.tril() + y.triu(1),
    "triangles of the batch": lambda y: y.transpose(0, 1).tril(),
    "rotated as complex numbers": lambda y: _rotated(y),
    "windows": lambda y: y.unfold(-1, 2, 2),
    "picked": lambda y: y.index_select(-1, torch.tensor([0, 2, 2])),
    "repeated": lambda y: y.repeat(2, 1, 1, 3) + y.repeat_interleave(3, -1),
    "repeated rows": lambda y: y.repeat(1, 2, 1) * y.repeat(2, 1, 2, 1).sum(0),
    "each row repeated": lambda y: y.repeat_interleave(2, 1) * y.repeat_interleave(2, 1, output_size=24),
    "every number repeated": lambda y: y.repeat_interleave(2),
    "padded by numbers": lambda y: torch.constant_pad_nd(y, (1, 1), 2.0),
    "activations": lambda y: F.silu(y) + F.gelu(y),
    "filled by a tensor": lambda y: y.masked_fill(y > 0, torch.tensor(2.0, dtype=y.dtype)),
    "of any values": lambda y: torch.where(y < 99, y, torch.empty_like(y)),
    "apart": lambda y: y.unbind(-1)[1] + y.split(3, -1)[1].sum(-1),
    "without ones": lambda y: y[:, None].squeeze() + y[:, None, :, None].squeeze((1, 3)),
    "in memory order": lambda y: y.transpose(0, 1).contiguous(),
    "softmax as autograd has it": lambda y: aten._softmax.default(y, -1, False),
    "log softmax as autograd has it": lambda y: aten._log_softmax.default(y, 1, False),
    "copies as autograd has them": lambda y: aten._to_copy.default(
        aten.alias.default(y), dtype=torch.float32
    ),
    "views as autograd has them": lambda y: aten._unsafe_view.default(y, (4, 72)),
    "to a type": lambda y: aten.to.dtype_layout(y, dtype=torch.float32).to(y),
    "apart at places in a tensor": lambda y: y.tensor_split(torch.tensor([2, 3]), 1)[0],
    "softmax of one number": lambda y: y.sum().softmax(0) + y.sum().log_softmax(-1),
    "gathered from one number": lambda y: y.sum().gather(0, torch.tensor([0])),
    "nothing unflattened": lambda y: y[:, :0].unflatten(1, (2, 0)),
    "logarithm of sums": lambda y: y.logsumexp(-1) - y.logsumexp(1, keepdim=True).sum(-1),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2.0),
    "orthogonal": lambda x: torch.linalg.qr(x).R,
    "singular values": lambda x: torch.linalg.svdvals(x),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x.mT @ x),
}


def _rotated(y: Tensor) -> Tensor:
    angles = torch.linspace(0, 1, 36, dtype=y.dtype).view(12, 3)
    turned = torch.view_as_complex(y.unflatten(-1, (3, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def _written(y: Tensor) -> Tensor:
    made = y * 2
    made[:, 0] = 0.0
    return made


def _filled(y: Tensor, left: int = 0) -> Tensor:
    made = torch.full((4, 12, 7), 3.0, dtype=y.dtype) if left else y.new_empty(4, 12, 7)
    made[..., 5:] = y[..., 1:3]  # the last part first
    made[..., left:5] = y[..., :1]
    return made


def _filled_again(y: Tensor) -> Tensor:
    made = torch.empty(4, 4, 6, dtype=y.dtype)
    made[:, 0::2] = y[:, :2]
    made[:, 1::2] = y[:, 2:4]
    over = torch.empty(4, 4, 6, dtype=y.dtype)
    over[:, 0:3:2], over[:, 2:], over[:, :2] = y[:, 4:6], y[:, 6:8], y[:, 8:10]
    twice = torch.empty(4, 4, 6, dtype=y.dtype)
    twice[:, :2], twice[:, :2], twice[:, 2:] = y[:, :2], y[:, 2:4], y[:, 6:8]
    return made + over + twice


def _written_through(y: Tensor) -> Tensor:
    made = y * 2
    part = made[..., 2:]
    part.copy_(y[:, :, :1])
    part.mul_(y[..., 2:])
    made.view(4, 72).select(1, 3).add_(1)
    flat = torch.empty(288, dtype=y.dtype)
    flat.view(4, 12, 6).copy_(y)
    flat.add_(1)  # leaves y as it was
    made.transpose(0, 1)[..., 1:].add_(1)
    made[..., :2].reshape(-1).add_(9)  # a copy: made stays as it was
    made[..., :1] *= y[..., :1].float()
    return made + made[..., 2:].sum() + flat.view(4, 12, 6) * y


def _read_elsewhere(y: Tensor) -> Tensor:
    made = y * 2
    other, part = made[..., 1:], made[..., :3]
    part.copy_(y[..., 3:])
    return other + part.sum()


def _below(y: Tensor) -> Tensor:
    made = y * 2
    view = made.view(-1)
    made.relu_()
    return view


def _through(y: Tensor) -> Tensor:
    made = y * 2
    made.view(-1).relu_()
    return made


def _into(y: Tensor) -> Tensor:
    made = torch.zeros(4, 12, 6, dtype=y.dtype)
    view = made.view(-1)
    made.add_(y)
    return view


BINARY: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "scaled sum": (lambda a, b: torch.add(a, b, alpha=2), ((4, 12), (4, 12))),
    "row": (lambda a, b: a * b, ((4, 12, 6), (6,))),
    "column": (lambda a, b: a - b, ((4, 12), (4, 1))),
    "outer": (lambda a, b: a / b, ((4, 1), (1, 12))),
    "product": (lambda a, b: F.linear(a, b), ((2, 12, 4), (6, 4))),
    "product with a bias": (lambda a, b, c: F.linear(a, b, c), ((2, 12, 4), (6, 4), (6,))),
    "product of a vector": (lambda a, b: a @ b, ((2, 12, 4), (4,))),
    "vector of a product": (lambda a, b: a @ b, ((12,), (12, 4))),
    "matrices": (lambda a, b: torch.mm(a, b) + aten.mv.default(a, b[:, 0])[:, None], ((4, 12), (12, 6))),
    "vectors by name": (lambda a, b: torch.dot(a, b), ((12,), (12,))),
    "squares": (lambda a, b: F.mse_loss(a, b), ((4, 12), (4, 12))),
    "differences": (lambda a, b: F.l1_loss(a, b, reduction="sum"), ((4, 12), (4, 12))),
    "smooth differences": (lambda a, b: F.smooth_l1_loss(a, b, beta=0.3), ((4, 12), (4, 12))),
    "each difference": (lambda a, b: F.huber_loss(a, b, reduction="none", delta=0.3), ((4, 12), (4, 12))),
    "margins": (lambda a, b: F.soft_margin_loss(a, b.detach().sign()), ((4, 12), (4, 12))),
    "divergence": (lambda a, b: F.kl_div(a, b.softmax(-1), reduction="batchmean"), ((4, 12), (4, 12))),
    "vectors": (lambda a, b: a @ b, ((12,), (12,))),
    "scaled product": (lambda a, b, c: torch.addmm(c, a, b, alpha=2), ((4, 12), (12, 6), (6,))),
    "added product": (lambda a, b, c: torch.addmm(c, a, b), ((4, 12), (12, 6), (6,))),
    "broadcast product": (lambda a, b: a @ b, ((4, 12, 6), (6, 8))),
    "root mean square norm": (lambda a, b: F.rms_norm(a, (6,), b), ((4, 12, 6), (6,))),
    "norm": (lambda a, b, c: F.layer_norm(a, (6,), b, c), ((4, 12, 6), (6,), (6,))),
    "concatenated": (lambda a, b: torch.cat([a, b], 1), ((4, 12), (4, 6))),
    "attention by hand": (
        lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
        ((2, 4, 12, 4), (2, 4, 12, 4), (2, 4, 12, 4)),
    ),
    "sums by letters": (lambda a, b: torch.einsum("bsd,btd->bst", a, b), ((2, 12, 4), (2, 12, 4))),
    "weights by letters": (lambda a, b: torch.einsum("bsd,ed->bse", a, b), ((2, 12, 4), (6, 4))),
    "binary targets": (lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), ((4, 12), (4, 12))),
    "weighted binary targets": (
        lambda a, b, w: F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=w.detach().exp()),
        ((4, 12), (4, 12), (12,)),
    ),
}


def _labels(*shape: int) -> Tensor:
    made = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(2))
    made.view(-1)[:3] = -100
    return made


def _indices(*shape: int) -> Tensor:
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(2))


LOOKUPS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], Tensor]] = {
    "table": (lambda w, i: F.embedding(i, w), ((12, 4),), _indices(4, 12)),
    "table with padding": (lambda w, i: F.embedding(i, w, padding_idx=3), ((12, 4),), _indices(4, 12)),
    "table scaled": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), ((12, 4),), _indices(4, 12)),
    "sparse table": (lambda w, i: F.embedding(i, w, sparse=True), ((12, 4),), _indices(4, 12)),
    "bounded table": (lambda w, i: F.embedding(i, w, max_norm=1.0), ((12, 4),), _indices(4, 12)),
    "indexed rows": (lambda w, i: w[i], ((12, 4),), _indices(4, 12)),
    "indexed columns": (lambda w, i: w[:, i], ((4, 12, 6),), _indices(12)),
    "indexed apart": (lambda w, i: w[i, :, i], ((12, 4, 12),), _indices(12)),
    "gathered": (lambda w, i: w.gather(1, i), ((4, 12),), _indices(4, 12)),
    "scattered": (lambda w, i: w.scatter_add(1, i, w), ((4, 12),), _indices(4, 12)),
    "labels": (lambda x, i: F.cross_entropy(x, i), ((12, 6),), _labels(12)),
    "summed labels": (lambda x, i: F.cross_entropy(x, i, reduction="sum"), ((12, 6),), _labels(12)),
    "each label": (lambda x, i: F.cross_entropy(x, i, reduction="none"), ((4, 6, 12),), _labels(4, 12)),
    "smoothed labels": (
        lambda x, i: F.cross_entropy(x, i, label_smoothing=0.2),
        ((4, 6, 12),),
        _labels(4, 12),
    ),
    "weighted labels": (
        lambda x, w, i: F.cross_entropy(x, i, w.detach().exp()),
        ((12, 6), (6,)),
        _labels(12),
    ),
    "weighted and smoothed": (
        lambda x, w, i: F.cross_entropy(x, i, w.detach().exp(), label_smoothing=0.1),
        ((12, 6), (6,)),
        _labels(12),
    ),
    "likelihoods": (lambda x, i: F.nll_loss(x, i), ((12, 6),), _labels(12)),
    "fused labels": (lambda x, w, i: fused_cross_entropy(x, w, i, 2)[0], ((12, 4), (6, 4)), _labels(12)),
    "fused, smoothed and biased": (
        lambda x, w, b, i: fused_cross_entropy(x, w, i, 4, bias=b, label_smoothing=0.2, z_loss=0.1)[0],
        ((12, 4), (6, 4), (6,)),
        _labels(12),
    ),
}


def hand_samples() -> list[Sample]:
    """Return all samples written here."""
    generator = torch.Generator().manual_seed(1)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    made = []
    for name, one in UNARY.items():
        made.append(Sample(name=name, call=lambda y, f=one: [f(y)], tensors=(numbers((4, 12, 6)),)))
    for name, (several, shapes) in BINARY.items():
        tensors = tuple(map(numbers, shapes))
        made.append(Sample(name=name, call=lambda *given, f=several: [f(*given)], tensors=tensors))
    for name, (look, shapes, index) in LOOKUPS.items():
        tensors = (*map(numbers, shapes), index)
        made.append(Sample(name=name, call=lambda *given, f=look: [f(*given)], tensors=tensors))
    parameters = [s for s in made if s.name in BINARY or s.name in LOOKUPS]
    made += [
        Sample(name=f"{s.name} of parameters", call=s.call, tensors=s.tensors, direct=True)
        for s in parameters
    ]
    return made
