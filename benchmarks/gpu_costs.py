"""The costs of kernels on one GPU, as figures for a cluster's file.

python benchmarks/gpu_costs.py [--out FILE]

Products by size, attention, memory traffic by size, the cost of launching a kernel, and how much slower
products and memory traffic are while a copy runs on another stream: a copy engine's, one that uses every
processor, and one on a few processors at the speed of a network, which is how collectives run.
Values are random: products of zeros run a fifth faster.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
# rows, columns, depth: tokens x features of decoders of several widths, whole and divided
PRODUCTS = [
    (1024, 4096, 4096),
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (1024, 12288, 4096),
    (1024, 4096, 12288),
    (2048, 4096, 12288),
    (8192, 12288, 4096),
    (8192, 4096, 12288),
    (4096, 4096, 1024),
    (12288, 4096, 1024),
    (4096, 12288, 8192),
    (1024, 1024, 4096),
    (8192, 1024, 4096),
    (512, 2048, 2048),
    (2048, 2048, 2048),
    (4096, 2048, 2048),
    (2048, 6144, 2048),
    (256, 4096, 4096),
    (128, 4096, 4096),
    (64, 4096, 4096),
    (2048, 2304, 16384),
    (8192, 2048, 16384),
    (8192, 13312, 16384),
    (8192, 16384, 6656),
    (16384, 16384, 16384),
    (2048, 3072, 12288),
    (2048, 12288, 1536),
    (1024, 151936, 4096),
    (320, 320, 320),
]
# batch, heads, tokens, width of a head
ATTENTIONS = [
    (1, 32, 1024, 128),
    (4, 32, 1024, 128),
    (8, 32, 1024, 128),
    (1, 16, 8192, 128),
    (2, 16, 4096, 64),
]
SIZES = [2**power for power in (12, 16, 18, 20, 22, 24, 26, 28)]  # elements of a value
BLOCKS = (8, 16, 24, 32)  # processors that a collective takes
WARM, TIMED = 0.03, 0.12  # seconds


@triton.jit
def copy_on_few(source, target, count, rounds, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy `count` elements `rounds` times with as many processors as there are programs."""
    step = tl.num_programs(0) * block
    for _ in range(rounds):
        for start in range(tl.program_id(0) * block, count, step):
            at = start + tl.arange(0, block)
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def seconds(run: Callable[[], object], *, timed: float = TIMED) -> float:
    """Return the time of one call among many in a row, by the device's clock: the median of five groups."""
    run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        run()
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end) / 3e3, 1e-6)
    for _ in range(int(WARM / once)):
        run()
    count = max(3, int(timed / 5 / once))
    found = []
    for _ in range(5):
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(found)


def graphed(run: Callable[[], object], times: int) -> float:
    """Return the time of one call as part of a CUDA graph, which the host does not slow down."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return seconds(graph.replay) / times


def products() -> Iterator[dict[str, object]]:
    """Yield the time of products: in bf16 as a forward, as input and as weight gradients; in fp32."""
    for m, n, k in PRODUCTS:
        a, b = random(m, k), random(n, k)
        got = seconds(lambda: a @ b.t())  # noqa: B023
        yield {"product": [m, n, k], "form": "nt", "s": got, "tflops": 2 * m * n * k / got / 1e12}
    for m, n, k in [(1024, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 12288)]:
        a, b = random(m, k), random(k, n)
        got = seconds(lambda: a @ b)  # noqa: B023
        yield {"product": [m, n, k], "form": "nn", "s": got, "tflops": 2 * m * n * k / got / 1e12}
        c, d = random(k, m), random(k, n)
        got = seconds(lambda: c.t() @ d)  # noqa: B023
        yield {"product": [m, n, k], "form": "tn", "s": got, "tflops": 2 * m * n * k / got / 1e12}
    for side in (1024, 4096):
        a, b = random(side, side, dtype=FP32), random(side, side, dtype=FP32)
        got = seconds(lambda: a @ b)  # noqa: B023
        yield {"product": [side] * 3, "form": "fp32", "s": got, "tflops": 2 * side**3 / got / 1e12}
    a, b = random(16384, 16384), random(16384, 16384)
    got = seconds(lambda: a @ b, timed=3.0)  # long enough for the power limit to show
    yield {"product": [16384] * 3, "form": "sustained", "s": got, "tflops": 2 * 16384**3 / got / 1e12}


def attentions() -> Iterator[dict[str, object]]:
    """Yield the time of attention, causal and whole, forward and backward."""
    for batch, heads, length, width in ATTENTIONS:
        q, k, v = (random(batch, heads, length, width).requires_grad_() for _ in range(3))
        for causal in (True, False):
            made = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            grad = torch.randn_like(made)
            with torch.no_grad():
                forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))  # noqa: B023
            backward = seconds(
                lambda: torch.autograd.grad(made, (q, k, v), grad, retain_graph=True)  # noqa: B023
            )
            whole = 4 * batch * heads * length**2 * width
            yield {
                "attention": [batch, heads, length, width],
                "causal": causal,
                "forward_s": forward,
                "backward_s": backward,
                "forward_tflops_of_whole": whole / forward / 1e12,
                "backward_tflops_of_whole": 2.5 * whole / backward / 1e12,
            }


def traffic() -> Iterator[dict[str, object]]:
    """Yield the bytes per second of compiled pointwise kernels and norms, by size, without the host."""
    add = torch.compile(lambda x, y: x * y + x, dynamic=False)
    norm = torch.compile(lambda x, w: F.rms_norm(x.float(), (x.shape[-1],)).to(BF16) * w, dynamic=False)
    torch._dynamo.config.recompile_limit = 64
    for size in SIZES:
        x, y = random(size), random(size)
        took = graphed(lambda: add(x, y), 20)  # noqa: B023
        yield {"pointwise_elements": size, "s": took, "bytes_per_s": 6 * size / took}
    for rows in (128, 1024, 8192, 65536):
        x, w = random(rows, 4096), random(4096)
        took = graphed(lambda: norm(x, w), 10)  # noqa: B023
        yield {"norm_rows_of_4096": rows, "s": took, "bytes_per_s": 4 * x.numel() / took}
    x, y = random(2**28), random(2**28)
    took = seconds(lambda: x.copy_(y))
    yield {"copy_bytes": 2 * x.nbytes, "s": took, "bytes_per_s": 2 * x.nbytes / took}
    x = random(8192, 8192)
    took = seconds(lambda: x.t().contiguous())
    yield {"transpose_bytes": 2 * x.nbytes, "s": took, "bytes_per_s": 2 * x.nbytes / took}


def launches() -> Iterator[dict[str, object]]:
    """Yield the cost of a tiny kernel, launched by the host and in a graph, and of a fused AdamW."""
    x = random(16)
    yield {"tiny_kernel": "host", "s": seconds(lambda: x.add_(1))}
    yield {"tiny_kernel": "graph", "s": graphed(lambda: x.add_(1), 200)}
    tiny = torch.compile(lambda t: t * 2 + 1, dynamic=False)
    yield {"tiny_kernel": "compiled, host", "s": seconds(lambda: tiny(x))}
    a, b = random(64, 64), random(64, 64)
    yield {"tiny_kernel": "product in a graph", "s": graphed(lambda: a @ b, 200)}
    params = [torch.randn(4096, 4096, device="cuda") for _ in range(8)]
    for param in params:
        param.grad = torch.randn_like(param)
    adam = torch.optim.AdamW(params, fused=True)
    took = seconds(adam.step)
    yield {"adamw_elements": 8 * 4096**2, "s": took, "bytes_per_s": 28 * 8 * 4096**2 / took}


def together(run: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Return the time of one call alone, and while `other` keeps another stream busy."""
    alone = seconds(run)
    side = torch.cuda.Stream()
    count = max(3, int(TIMED / alone))
    with torch.cuda.stream(side):
        other()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        other()
        end.record()
        end.synchronize()
        each = max(start.elapsed_time(end) / 1e3, 1e-5)
        for _ in range(int(4 * count * alone / each) + 2):  # longer than the measurement, even slowed down
            other()
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    beside = start.elapsed_time(end) / 1e3 / count
    torch.cuda.synchronize()
    return alone, beside


def slowdowns() -> Iterator[dict[str, object]]:
    """Yield how much slower products, attention and memory traffic are while something copies."""
    a, b, x, y = random(8192, 4096), random(4096, 4096), random(2**26), random(2**26)
    q, k, v = (random(8, 32, 1024, 128) for _ in range(3))
    source, target = random(2**27), random(2**27)
    pinned = torch.empty(2**26, dtype=BF16, pin_memory=True)
    others: dict[str, tuple[Callable[[], object], int]] = {
        "copy engine, host to device": (lambda: x.copy_(pinned, non_blocking=True), pinned.nbytes),
        "every processor": (lambda: target.copy_(source), 2 * source.nbytes),
    }
    count = 2**25
    for blocks in BLOCKS:

        def few(blocks: int = blocks) -> None:
            copy_on_few[(blocks,)](source, target, count, 2, block=8192, num_warps=16)

        others[f"{blocks} processors"] = (few, 2 * 2 * 2 * count)
    for name, (other, moved) in others.items():
        rate = moved / seconds(other)
        works: dict[str, Callable[[], object]] = {
            "product": lambda: a @ b,
            "small product": lambda: a[:1024] @ b,
            "attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "traffic": lambda: torch.add(y, 1, out=y),
        }
        for kind, work in works.items():
            alone, beside = together(work, other)
            yield {
                "beside": name,
                "its_bytes_per_s": rate,
                "work": kind,
                "alone_s": alone,
                "slower": beside / alone,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"processors": str(torch.cuda.get_device_properties(0).multi_processor_count)}
    lines: list[dict[str, object]] = [dict(about)]
    print(json.dumps(about), flush=True)
    for part in (products, attentions, traffic, launches, slowdowns):
        for line in part():
            lines.append(line)
            print(json.dumps(line), flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


if __name__ == "__main__":
    main()
