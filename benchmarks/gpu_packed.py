"""Packed documents on one GPU: block masks, dense masks and offsets, in Piper and in plain PyTorch.

    python benchmarks/gpu_packed.py                    # an H200: about two minutes
    python benchmarks/gpu_packed.py --tiny             # a small form for a CPU: figures mean nothing

Every row trains the same layers, of the shape of an 8B decoder, on a row of documents with lognormal lengths.
No token sees another document. A block mask goes to `flex_attention`, a dense one of truth values to
`scaled_dot_product_attention`, offsets to `varlen_attn`. Plain PyTorch is the same module under
`torch.compile` with autocast. Parameters and AdamW are float32, products bf16. The sides take turns in one
process; figures are medians. The losses of all rows of a length are of the same mathematics.
"""

import argparse
import gc
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import piper

GIB = 2**30
VOCAB = 1024
MEDIAN, SIGMA = 1024, 1.0  # of the lengths of documents
Step = Callable[[], float]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of a layer."""

    dim: int = 4096
    hidden: int = 14_336
    heads: int = 32
    layers: int = 2
    median: int = MEDIAN
    device: str = "cuda"


class Layer(nn.Module):
    """Attention within documents, and a feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, size.hidden), nn.Linear(size.hidden, size.dim)
        self.before, self.between = nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Packed(nn.Module):
    """An embedding, layers and a head. All layers share one mask."""

    def __init__(self, size: Size, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.embedding = nn.Embedding(VOCAB, size.dim)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.dim, VOCAB)

    def forward(self, tokens: Tensor, documents: Tensor, starts: Tensor) -> Tensor:
        attend = ATTENTION[self.mask](documents, starts)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def by_blocks(documents: Tensor, starts: Tensor) -> Attend:
    """Attend with a block mask."""
    samples, length = documents.shape

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (documents[b, i] == documents[b, j]) & (i >= j)

    blocks = create_block_mask(seen, samples, None, length, length, device=documents.device)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=blocks)


def by_truth_values(documents: Tensor, starts: Tensor) -> Attend:
    """Attend with a dense mask."""
    places = torch.arange(documents.shape[1], device=documents.device)
    before = places[:, None] >= places[None, :]
    allowed = (documents[:, None, :, None] == documents[:, None, None, :]) & before
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def by_offsets(documents: Tensor, starts: Tensor) -> Attend:
    """Attend within the offsets of documents."""
    samples, length = documents.shape

    def attend(*heads: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in heads)
        out = varlen_attn(q, k, v, starts[0], starts[0], length, length, window_size=(-1, 0))
        return out.unflatten(0, (samples, length)).transpose(1, 2)

    return attend


ATTENTION = {"block": by_blocks, "dense": by_truth_values, "offsets": by_offsets}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(
        model(batch["tokens"], batch["documents"], batch["starts"]), batch["labels"]
    )


def batch_of(length: int, median: int) -> dict[str, Tensor]:
    """Return one row of documents, on the host."""
    drawn = torch.Generator().manual_seed(1)
    sizes = (median * torch.randn(length, generator=drawn).mul(SIGMA).exp()).long().clamp(min=1)
    ends = [0, *itertools.takewhile(lambda end: end < length, sizes.cumsum(0).tolist()), length]
    starts = torch.tensor(ends, dtype=torch.int32)
    tokens, labels = torch.randint(VOCAB, (2, 1, length), generator=drawn)
    documents = torch.arange(len(ends) - 1).repeat_interleave(starts.diff())
    return {"tokens": tokens, "labels": labels, "documents": documents[None], "starts": starts[None]}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


@contextmanager
def piper_side(size: Size, mask: str, batch: dict[str, Tensor]) -> Iterator[Step]:
    """Yield a step of Piper."""
    job = piper.Job(
        model=lambda: Packed(size, mask),
        loss=loss,
        data=lambda: [batch],
        strategy=[piper.place(piper.at(), [0])],
        optimizer=adamw,
        precision="bf16",
        seed=0,
    )
    program = piper.compile(job, device=size.device, compile=size.device == "cuda")
    with piper.launch(program, on="inline") as run:
        yield lambda: run.step(batch).loss


@contextmanager
def torch_side(size: Size, mask: str, batch: dict[str, Tensor]) -> Iterator[Step]:
    """Yield a step of plain PyTorch."""
    torch.manual_seed(0)
    model = Packed(size, mask).to(size.device)
    optimizer = adamw(model.parameters())
    compiled = torch.compile(model) if size.device == "cuda" else model
    on_device = {name: value.to(size.device) for name, value in batch.items()}

    def step() -> float:
        with torch.autocast(size.device, torch.bfloat16):
            total, weight = loss(compiled, on_device)
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return (total / weight).item()

    yield step
    torch.compiler.reset()


SIDES = {"piper": piper_side, "torch": torch_side}


def measure(size: Size, length: int, mask: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of one kind of mask: both sides twice, in turns, one alone on the device at a time."""
    batch, sides = batch_of(length, size.median), options.sides.split(",")
    times: dict[str, list[float]] = {name: [] for name in sides}
    said: dict[str, str] = {}
    for name in (*sides, *sides):
        gc.collect()
        if size.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with SIDES[name](size, mask, batch) as step:
            losses = [step() for _ in range(3)]
            for _ in range(options.steps):
                began = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / GIB if size.device == "cuda" else 0
        said[name] = f"{peak:7.2f} GiB  losses " + " ".join(f"{loss:.4f}" for loss in losses)
    medians = {name: statistics.median(times[name]) for name in sides}
    for name in sides:
        ratio = medians[name] / medians[sides[-1]]
        yield f"{length:>6} {mask:8} {name:6} {1e3 * medians[name]:9.2f} ms {said[name]}  {ratio:.3f}x"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lengths", default="8192,32768", help="tokens of a row, with commas between them")
    parser.add_argument("--masks", default=",".join(ATTENTION), help="with commas between them")
    parser.add_argument(
        "--sides", default="piper,torch", help="PyTorch has no backward of flex_attention on CPU"
    )
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(words)
    size = Size(dim=64, hidden=128, heads=4, median=16, device="cpu") if options.tiny else Size()
    where = platform.processor() if options.tiny else torch.cuda.get_device_name()
    print(
        f"{where}, torch {torch.__version__}, {size.layers} layers, documents of median {size.median} tokens"
    )
    for length in [256] if options.tiny else map(int, options.lengths.split(",")):
        for mask in options.masks.split(","):
            for line in measure(size, length, mask, options):
                print(line, flush=True)


if __name__ == "__main__":
    main()
