"""One rank of TP8 with sequence parallelism, in Piper and in torch, on one GPU: step time and peak memory.

Both sides train the same decoder in bf16 with float32 masters and fused AdamW. Piper's side is `rank:0` with
compiled pieces. Torch's is `parallelize_module` with ColwiseParallel, RowwiseParallel, SequenceParallel and
loss parallelism, blocks and loss compiled, on a `fake` group of eight. Neither side waits for a network.
What arrives is made of a rank's own values on both sides, by one copy: a gathered value repeats the own part,
a sum is the own term. So both compute on numbers like those of a real run, and not on zeros, which a GPU
multiplies faster. The sides take turns in one process; figures are medians. Both compute the norm of the
gradient.

python benchmarks/gpu_tensor.py [--small] [--layers N] [--shapes 2x2048,1x8192]
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import gpu_peer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import piper
from piper.models import decoder
from piper.run.launch import launch_single_rank
from piper.selftest.peers import layer_plan

WAYS = 8
GIB = 2**30
LARGE = replace(gpu_peer.LARGE, layers=12, stages=1)
SMALL = decoder.Config(vocab=512, dim=64, layers=2, heads=8, kv_heads=8, head_dim=8, hidden=128, qk_norm=True)
FREE = """
memory = 141e9
memory_bandwidth = 4.8e12

[flops]
bfloat16 = 989e12

[[link]]
name = "takes no time"
bandwidth = 1e30
latency = 0.0
"""
Step = Callable[[], object]
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one shape."""

    samples: int
    length: int
    layers: int
    piper_ms: float
    torch_ms: float
    piper_gib: float
    torch_gib: float
    piper_first_s: float
    torch_first_s: float
    planned_gib: float
    instructions: int

    @property
    def time(self) -> float:
        return self.piper_ms / self.torch_ms

    @property
    def memory(self) -> float:
        return self.piper_gib / self.torch_gib if self.torch_gib else float("nan")

    def __str__(self) -> str:
        return (
            f"{self.samples} x {self.length:<6} {self.layers:>3} layers  "
            f"{self.piper_ms:8.2f} ms  torch {self.torch_ms:8.2f} ms  {self.time:.3f}x "
            f"{'holds' if self.time <= 1 else 'short'}   "
            f"{self.piper_gib:7.2f} GiB  torch {self.torch_gib:7.2f} GiB  {self.memory:.3f}x "
            f"{'holds' if self.memory <= 1 else 'short'}   "
            f"first step {self.piper_first_s:.1f} s, torch {self.torch_first_s:.1f} s; "
            f"planned {self.planned_gib:.2f} GiB, {self.instructions} instructions"
        )


@dataclass(slots=True, kw_only=True)
class Side:
    """One side: its step, what it took to build, and what it measured."""

    step: Step
    others: int  # bytes that were there before it
    apart: int  # bytes of its own that measuring needs and training does not
    first_s: float
    times: list[float] = field(default_factory=list)
    peak: int = 0

    def run(self, count: int) -> None:
        """Run some steps one after another and time each."""
        before = allocated()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        for _ in range(count):
            synchronize()
            begin = time.perf_counter()
            self.step()
            synchronize()
            self.times.append(time.perf_counter() - begin)
        highest = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        self.peak = max(self.peak, highest - before)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def built(make: Callable[[], tuple[Step, int]]) -> Side:
    """Build a side and run its first step, in which compilers work."""
    gc.collect()
    others, begin = allocated(), time.perf_counter()
    step, apart = make()
    step()
    synchronize()
    return Side(step=step, others=others, apart=apart, first_s=time.perf_counter() - begin)


def take_turns(sides: Sequence[Side], rounds: int, steps: int) -> list[int]:
    """Run the sides alternately and return the peak bytes of each, with what it keeps between steps."""
    gc.collect()
    ends = [*(side.others for side in sides[1:]), allocated()]
    for side in sides:
        side.run(2)
        side.times.clear()
    for _ in range(rounds):
        for side in sides:
            side.run(steps)
    return [side.peak + end - side.others - side.apart for side, end in zip(sides, ends, strict=True)]


def batch_of(config: decoder.Config, samples: int, length: int) -> Batch:
    tokens = torch.randint(config.vocab, (samples, length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def piper_side(
    stack: ExitStack, config: decoder.Config, batch: Batch, device: str, cache: str, seen: dict[str, float]
) -> tuple[Step, int]:
    """Compile the job and launch its device 0 on a network that takes no time."""
    job = piper.Job(
        model=lambda: decoder.Decoder(config),
        loss=decoder.token_loss,
        data=lambda: [batch],
        strategy=[
            piper.shard(piper.at(), range(WAYS), axis="TP", weights=decoder.SHARDED_WEIGHTS, between=1)
        ],
        optimizer=adamw,
        precision="bf16",
    )
    program = piper.compile(job, device=device, compile=True, cache=cache)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    network = Path(folder) / "free.toml"
    network.write_text(FREE)
    run = stack.enter_context(launch_single_rank(program, "rank:0", cluster=str(network)))
    seen["planned"] = run.peak().predicted
    seen["instructions"] = len(program.plans.of(0).instrs)
    return lambda: run.step(batch), 0 if run.engine is None else run.engine.nbytes


@contextmanager
def own_values() -> Iterator[None]:
    """Let the functional collectives return what a rank's own values make, by one copy each."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    key = "CUDA" if torch.cuda.is_available() else "CPU"

    def all_gather(value: Tensor, size: int, group: str) -> Tensor:
        out = value.new_empty((size, *value.shape))
        out.copy_(value)
        return out.flatten(0, 1)

    def reduce_scatter(value: Tensor, op: str, size: int, group: str) -> Tensor:
        own: Tensor = value.unflatten(0, (size, -1))[0]
        return own.clone()

    def all_reduce(value: Tensor, op: str, group: str) -> Tensor:
        return value.clone()

    def all_reduce_(value: Tensor, op: str, group: str) -> Tensor:
        return value

    library.impl("all_gather_into_tensor", all_gather, key)
    library.impl("reduce_scatter_tensor", reduce_scatter, key)
    library.impl("all_reduce", all_reduce, key)
    library.impl("all_reduce_", all_reduce_, key)
    try:
        yield
    finally:
        library._destroy()


def parallel(model: decoder.Decoder, mesh: DeviceMesh) -> None:
    """Divide the peer's model over the mesh, as TorchTitan does."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers:
        parallelize_module(block, mesh, layer_plan())


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def torch_side(stack: ExitStack, config: decoder.Config, batch: Batch, device: str) -> tuple[Step, int]:
    """Build the same rank in torch."""
    stack.enter_context(own_values())
    dist.init_process_group("fake", rank=0, world_size=WAYS, store=FakeStore())
    stack.callback(dist.destroy_process_group)
    mesh = init_device_mesh(device, (WAYS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = decoder.Decoder(config).bfloat16()
    parallel(model, mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            own = local(parameter)
            own.fill_(1.0) if own.dim() < 2 else own.normal_(std=0.02)
    # A block that is compiled cannot take a value that has not arrived: its gradient would lose its layout.
    model.embedding.register_forward_hook(lambda module, given, out: out.clone())
    for block in model.layers:
        block.compile(fullgraph=True)
    chosen = {"loss": torch.compile(loss_of)}
    params = list(model.parameters())
    values = [local(parameter.detach()) for parameter in params]
    masters = [value.float() for value in values]
    optimizer = adamw(masters)
    given = {key: value.to(device) for key, value in batch.items()}

    def step() -> float:
        with loss_parallel():
            logits = model(given["tokens"])
            loss = chosen["loss"](logits, given["labels"])
            del logits  # its memory is the backward's
            loss.backward()
        grads: list[Tensor] = []
        for parameter in params:
            grad = parameter.grad
            assert grad is not None
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
                grad = grad.redistribute(placements=parameter.placements)
            grads.append(local(grad))
            parameter.grad = None
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        wide = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(wide, grads)
        grads.clear()
        for master, grad in zip(masters, wide, strict=True):
            master.grad = grad
        wide.clear()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(values, masters)
        return float(squares) + float(local(loss.detach()))

    try:
        step()
    except Exception as error:  # noqa: BLE001  whatever the compiler does not know
        print(f"torch compiles no parallel loss: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        chosen["loss"] = loss_of
        for parameter in params:
            parameter.grad = None
    return step, 0


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy; the logits are divided along the vocabulary."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def measure(config: decoder.Config, samples: int, length: int, device: str, cache: str, rounds: int) -> Row:
    """Measure both sides at one shape."""
    batch = batch_of(config, samples, length)
    seen: dict[str, float] = {}
    with ExitStack() as stack:
        sides = [
            built(lambda: piper_side(stack, config, batch, device, cache, seen)),
            built(lambda: torch_side(stack, config, batch, device)),
        ]
        peaks = take_turns(sides, rounds, 4)
    ours, theirs = sides
    row = Row(
        samples=samples,
        length=length,
        layers=config.layers,
        piper_ms=statistics.median(ours.times) * 1e3,
        torch_ms=statistics.median(theirs.times) * 1e3,
        piper_gib=peaks[0] / GIB,
        torch_gib=peaks[1] / GIB,
        piper_first_s=ours.first_s,
        torch_first_s=theirs.first_s,
        planned_gib=seen["planned"] / GIB,
        instructions=int(seen["instructions"]),
    )
    del sides, ours, theirs
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def heading(commit: str) -> str:
    """Return what was run, of which commit, on which machine."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return (
        f"command: python benchmarks/gpu_tensor.py\ncommit:  {commit or found.stdout.strip() or 'unknown'}\n"
        f"machine: {gpu}; {versions}\n\n"
        f"rank 0 of TP{WAYS} with sequence parallelism; at most 1.00x time and 1.0x memory are asked\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    parser.add_argument("--layers", type=int, default=LARGE.layers)
    parser.add_argument("--shapes", default="2x2048,1x8192", help="samples x tokens of each shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "piper-bench-cache"))
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "gpu_tensor"))
    parser.add_argument("--commit", default="")
    asked = parser.parse_args()
    if asked.small:
        config, shapes, device, rounds = SMALL, [(2, 32), (1, 64)], "cpu", 1
    else:
        config, device, rounds = replace(LARGE, layers=asked.layers), "cuda", asked.rounds
        texts = [shape.split("x") for shape in asked.shapes.split(",")]
        shapes = [(int(samples), int(length)) for samples, length in texts]
    text = heading(asked.commit)
    print(text, end="", flush=True)
    rows = []
    for samples, length in shapes:
        rows.append(measure(config, samples, length, device, asked.cache, rounds))
        print(rows[-1], flush=True)
        if not asked.small:
            Path(f"{asked.out}.txt").write_text(text + "\n".join(map(str, rows)) + "\n")
            figures = [{**asdict(row), "time": row.time, "memory": row.memory} for row in rows]
            Path(f"{asked.out}.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
