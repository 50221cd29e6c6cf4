"""The largest microbatch under PP x ZeRO, beside torch's PipelineStage and FSDP2.

The peer's code is torch's own and runs here, one rank at a time, on fake tensors: no data, no GPU, and every
storage that is alive is counted. Its group is torch's `fake` one. Both sides recompute: the peer each layer,
ours all layers of a stage from the stage's input. Where activations are most of it, memory grows
evenly with the samples of a microbatch, so two sizes say which one fills a device.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from gpu_peer import LARGE, Stage, cross_entropy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import piper
from piper.models import decoder
from piper.runtime.cuda.memory_release import predicted_peak

GIB = 2**30
SIZES = (24, 64)  # samples of a microbatch, from which the largest that fits is worked out
LIMITS = (40, 80)  # GiB of a device
MICROBATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The job: a decoder with a stage on each rank, `dp` replicas of each, and samples of one length."""

    config: decoder.Config = LARGE
    dp: int = 4
    length: int = 1024
    microbatches: int = MICROBATCHES

    @property
    def pp(self) -> int:
        return self.config.stages


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = op(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, Tensor):
                self.add(getattr(value, "_local_tensor", value))
        return made

    def add(self, value: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = value.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.gone, storage._cdata)

    def gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


@contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def peer_bytes(grid: Grid, stage: int, size: int, zero: int) -> int:
    """Return the peak of one rank of the peer in its second step, in which its optimizer has its state."""
    from torch.distributed.device_mesh import init_device_mesh

    live = LiveBytes()
    with alone(grid.dp * stage, grid.dp * grid.pp):
        mesh = init_device_mesh("cpu", (grid.pp, grid.dp), mesh_dim_names=("pp", "dp"))
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            step = peer_step(grid, mesh, stage, size, zero)
            step()
            live.peak = live.live
            step()
    return live.peak


def peer_step(grid: Grid, mesh: DeviceMesh, stage: int, size: int, zero: int) -> Callable[[], None]:
    """Build one rank of the peer. FSDP2 has two modes: parameters stay gathered (1 and 2), or do not (3)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining import stage as pipelining

    config, first, last = grid.config, stage == 0, stage == grid.pp - 1
    module = Stage(config, stage)
    module.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in module.blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=zero == 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    hidden = (size, grid.length, config.dim)
    came = torch.empty(
        (size, grid.length) if first else hidden,
        dtype=torch.long if first else torch.bfloat16,
        requires_grad=not first,
    )
    leaves = torch.empty(
        (*hidden[:2], config.vocab) if last else hidden, dtype=torch.bfloat16, requires_grad=True
    )
    pipe = PipelineStage(
        module,
        stage,
        grid.pp,
        torch.device("cpu"),
        group=mesh.get_group("pp"),
        input_args=(came,),
        output_args=(leaves,),
    )
    schedule = Schedule1F1B(pipe, grid.microbatches, loss_fn=cross_entropy)
    if hasattr(pipelining, "InferenceMode"):  # ranks vote on it with numbers, which fake tensors do not have

        def settled(stages: Sequence[PipelineStage], *_: object) -> None:
            for one in stages:
                one._inference_mode = pipelining.InferenceMode.STATIC

        schedule._warmup_p2p = settled  # type: ignore[method-assign, assignment]
    tokens = torch.randint(config.vocab, (grid.microbatches * size, grid.length))

    def step() -> None:
        if last:
            schedule.step(target=tokens, losses=[], return_outputs=False)
        else:
            schedule.step(*([tokens] if first else []), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_bytes(grid: Grid, size: int, zero: int) -> list[int]:
    """Return the planned peak of a device of each of our stages."""
    config, samples = grid.config, grid.dp * grid.microbatches * size
    tokens = torch.randint(config.vocab, (samples, grid.length))
    strategy: list[piper.Directive] = [
        piper.replicate(piper.at(PP=stage), range(grid.dp * stage, grid.dp * (stage + 1)), zero=zero)
        for stage in range(grid.pp)
    ]
    strategy += [
        piper.remat(piper.at(), 0.0, across="PP"),
        piper.split(piper.at(), parts=grid.microbatches),
        *piper.schedules.one_f_one_b(stages=grid.pp, microbatches=grid.microbatches),
    ]
    layered = replace(config, by_layer=True)
    job = piper.Job(
        model=lambda: decoder.Decoder(layered),
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=strategy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        precision="bf16",
    )
    program = piper.compile(job, device="cpu", compile=True)
    return [predicted_peak(program.plans.of(grid.dp * stage)) for stage in range(grid.pp)]


def largest(peaks: Sequence[int], sizes: Sequence[int], limit: float) -> int:
    """Return the largest microbatch that fits, from the peaks of two sizes."""
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    return int(sizes[0] + (limit - peaks[0]) / slope) if slope > 0 else 0


def peer(grid: Grid | None = None, size: int = 40, measured: str = "39.3") -> list[dict[str, str]]:
    """Compare what is counted for the peer with what an H200 measured (benchmarks/gpu.py at f05c260)."""
    found = peer_bytes(Grid() if grid is None else grid, 0, size, 3) / GIB
    return [
        {
            "stage": "first",
            "zero": "3",
            "samples": f"{size}",
            "counted GiB": f"{found:.1f}",
            "measured on an H200 GiB": measured,
        }
    ]


def batch(grid: Grid | None = None, sizes: Sequence[int] = SIZES) -> list[dict[str, str]]:
    """Compare the largest microbatches: of the first stage, of the last, and of the job."""
    grid = Grid() if grid is None else grid
    stages = {"first": 0, "last": grid.pp - 1}
    rows = []
    theirs: dict[bool, dict[str, list[int]]] = {}
    for zero in (1, 2, 3):
        mine = [our_bytes(grid, size, zero) for size in sizes]
        ours = {name: [peaks[stage] for peaks in mine] for name, stage in stages.items()}
        if (zero == 3) not in theirs:
            theirs[zero == 3] = {
                name: [peer_bytes(grid, stage, size, zero) for size in sizes]
                for name, stage in stages.items()
            }
        for limit in LIMITS:
            fits = {
                side: {name: largest(found[name], sizes, limit * GIB) for name in stages}
                for side, found in (("piper", ours), ("peer", theirs[zero == 3]))
            }
            for where in (*stages, "job"):
                us, them = (min(f.values()) if where == "job" else f[where] for f in fits.values())
                rows.append(
                    {
                        "zero": f"{zero}",
                        "memory GiB": f"{limit}",
                        "stage": where,
                        "Piper": f"{us}",
                        "PipelineStage + FSDP2": f"{them}",
                        "ratio": f"{us / them:.2f}x" if them > 0 else "-",
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return rows
