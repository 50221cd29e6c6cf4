"""The largest microbatch under PP x ZeRO, beside torch's PipelineStage and FSDP2.

The peer's code is torch's own and runs here, one rank at a time, on fake tensors: no data, no GPU, and every
storage that is alive is counted. Its group is torch's `fake` one. Both sides recompute from the same saved
values: the inputs of layers or those of stages, on the device or on the host. Both compute the head and the
loss of a microbatch whole, or in pieces of its positions, each recomputed in the backward.

Ours is compiled for several microbatches, and the one that fills a device lies between two of them. A peak is
the largest of several sums that grow evenly with the samples, so the line between two sizes is never below
it. The peer's line is continued from two sizes, which can only be to its advantage.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from gpu_peer import LARGE, Stage, cross_entropy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import piper
from piper import losses
from piper.compiler import Program
from piper.models import decoder
from piper.models.causal import stage_ranges
from piper.models.layers import rope
from piper.plan.memory_timeline import host_peak
from piper.runtime.memory_release import predicted_peak
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate

GIB = 2**30
PIECES = 8  # of the positions, for the head and the loss
SIZES: Mapping[int, Sequence[int]] = {  # samples of a microbatch that ours is compiled for, by pieces
    1: (16, 64),
    PIECES: (64, 128, 192, 256, 320),
}
PEER_SIZES = (24, 64)
LIMITS = (40, 80)  # GiB of a device
LEVELS = (1, 2, 3)  # of ZeRO
MICROBATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The job: a decoder with a stage on each rank, `dp` replicas of each, and samples of one length."""

    config: decoder.Config = LARGE
    dp: int = 4
    length: int = 1024
    microbatches: int = MICROBATCHES
    least_mb: float = 1  # smaller values stay on the device

    @property
    def pp(self) -> int:
        return self.config.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What is saved from forward to backward: the inputs of layers or of the whole stage, and where."""

    stage: bool = False
    host: bool = False

    def __str__(self) -> str:
        return f"{'stage' if self.stage else 'layer'} inputs" + (", on the host" if self.host else "")


LAYERS = Saved()  # what most users of the peer choose
WAYS = (LAYERS, Saved(stage=True), Saved(host=True), Saved(stage=True, host=True))


# the peer


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.paused = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = op(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, Tensor) and not self.paused:
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

    def copied_to_host(self, value: Tensor) -> Tensor:
        """Copy a tensor to memory that is not the device's: it is not counted."""
        self.paused = True
        try:
            return value.clone()
        finally:
            self.paused = False


@contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class PeerStage(Stage):
    """A stage of the peer that recomputes. Its last one computes the head and the loss in pieces, if asked.

    In pieces, it returns the summed cross entropy of each piece in place of logits.
    """

    def __init__(
        self, config: decoder.Config, index: int, saved: Saved, pieces: int, live: LiveBytes
    ) -> None:
        super().__init__(config, index)
        self.saved, self.pieces, self.live = saved, pieces, live

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = recomputed(self.layers, x) if self.saved.stage else self.layers(x)
        if self.head is None or self.norm is None:
            return x
        if labels is None:
            logits: Tensor = self.head(self.norm(x))
            return logits
        cut = zip(self.norm(x).chunk(self.pieces, 1), labels.chunk(self.pieces, 1), strict=True)
        return torch.stack([recomputed(self.piece, hidden, wanted) for hidden, wanted in cut])

    def layers(self, x: Tensor) -> Tensor:
        """Compute all layers. Each saves its input, and is recomputed from it."""
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = rope(x.shape[1], self.config.rotary, self.config.rope_base, like=x)
        for block in self.blocks:
            # As `save_on_cpu` of torch does: it copies what is saved, and copies it back for the backward.
            on_host = torch.autograd.graph.saved_tensors_hooks(self.live.copied_to_host, torch.clone)
            with on_host if self.saved.host else nullcontext():
                x = recomputed(block, x, rotation)
        return x

    def piece(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the summed cross entropy of a piece."""
        assert self.head is not None
        return losses.cross_entropy(self.head(hidden), labels)[0]


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function that saves its inputs for the backward, and is called again by it."""
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return result


def mean_of_pieces(sums: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of a microbatch from the sums of its pieces."""
    return sums.sum() / labels.numel()


def peer_bytes(grid: Grid, stage: int, size: int, zero: int, saved: Saved = LAYERS, pieces: int = 1) -> int:
    """Return the peak of one rank of the peer in a step, before which its optimizer has made its state."""
    from torch.distributed.device_mesh import init_device_mesh

    live = LiveBytes()
    with alone(grid.dp * stage, grid.dp * grid.pp):
        mesh = init_device_mesh("cpu", (grid.pp, grid.dp), mesh_dim_names=("pp", "dp"))
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            module = PeerStage(grid.config, stage, saved, pieces, live)
            step = peer_step(grid, mesh, module, stage, size, zero)
            live.peak = live.live
            step()
    return live.peak


def peer_step(
    grid: Grid, mesh: DeviceMesh, module: PeerStage, stage: int, size: int, zero: int
) -> Callable[[], None]:
    """Build one rank of the peer. FSDP2 has two modes: parameters stay gathered (1 and 2), or do not (3)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining import stage as pipelining

    config, first, last = grid.config, stage == 0, stage == grid.pp - 1
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=zero == 3)
    optimizer = optimizer_with_state(module)
    pieced = last and module.pieces > 1
    hidden = (size, grid.length, config.dim)
    came = torch.empty(
        (size, grid.length) if first else hidden,
        dtype=torch.long if first else torch.bfloat16,
        requires_grad=not first,
    )
    leaves = torch.empty(
        (module.pieces,) if pieced else (*hidden[:2], config.vocab) if last else hidden,
        dtype=torch.float32 if pieced else torch.bfloat16,
        requires_grad=True,
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
    schedule = Schedule1F1B(pipe, grid.microbatches, loss_fn=mean_of_pieces if pieced else cross_entropy)
    if hasattr(pipelining, "InferenceMode"):  # ranks vote on it with numbers, which fake tensors do not have

        def settled(stages: Sequence[PipelineStage], *_: object) -> None:
            for one in stages:
                one._inference_mode = pipelining.InferenceMode.STATIC

        schedule._warmup_p2p = settled  # type: ignore[method-assign, assignment]
    tokens = torch.randint(config.vocab, (grid.microbatches * size, grid.length))

    def step() -> None:
        if last:
            labels: dict[str, Any] = {"labels": tokens} if pieced else {}
            schedule.step(target=tokens, losses=[], return_outputs=False, **labels)
        else:
            schedule.step(*([tokens] if first else []), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def optimizer_with_state(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has taken a step of zero gradients."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


# ours


class PiecedDecoder(decoder.Decoder):
    """A decoder whose last stage computes the head and the loss in pieces, each a region tagged HEAD."""

    def __init__(self, config: decoder.Config, pieces: int) -> None:
        super().__init__(config)
        self.pieces = pieces

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the summed cross entropy, and how many labels it counts."""
        sizes, x = self.sizes, tokens
        sums: list[tuple[Tensor, Tensor]] = []
        for stage, layers in enumerate(stage_ranges(sizes.layers, sizes.stages)):
            with piper.annotate("PP"):
                if stage == 0:
                    x = self.embedding(x)
                rotation = rope(tokens.shape[1], sizes.rotary, sizes.rope_base, like=x)
                for layer in layers:
                    with piper.annotate("LAYER"):
                        x = self.layers[layer](x, rotation)
                if stage == sizes.stages - 1:
                    cut = zip(self.norm(x).chunk(self.pieces, 1), labels.chunk(self.pieces, 1), strict=True)
                    for hidden, wanted in cut:
                        with piper.annotate("HEAD"):
                            made = losses.cross_entropy(self.head(hidden), wanted)
                            sums.append((sums[-1][0] + made[0], sums[-1][1] + made[1]) if sums else made)
        return sums[-1]


def pieced_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss that the model has computed itself."""
    result: tuple[Tensor, Tensor] = model(batch["tokens"], batch["labels"])
    return result


def our_job(grid: Grid, size: int, zero: int, saved: Saved, pieces: int) -> piper.Job:
    """Return the job with a level of ZeRO and a way to recompute."""
    tokens = torch.randint(grid.config.vocab, (grid.dp * grid.microbatches * size, grid.length))
    strategy: list[piper.Directive] = [
        piper.replicate(piper.at(PP=stage), range(grid.dp * stage, grid.dp * (stage + 1)), zero=zero)
        for stage in range(grid.pp)
    ]
    strategy.append(piper.remat(piper.at(), 0.0, across="PP" if saved.stage else None))
    if pieces > 1:
        strategy.append(piper.remat(piper.at(HEAD="*"), 0.0))
    if saved.host:
        strategy.append(piper.offload(piper.at(), least_mb=grid.least_mb))
    strategy += [
        piper.split(piper.at(), parts=grid.microbatches),
        *piper.schedules.one_f_one_b(stages=grid.pp, microbatches=grid.microbatches),
    ]
    layered = replace(grid.config, by_layer=True)
    return piper.Job(
        model=partial(PiecedDecoder, layered, pieces) if pieces > 1 else partial(decoder.Decoder, layered),
        loss=pieced_loss if pieces > 1 else decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=strategy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        precision="bf16",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The figures of one of our jobs."""

    peaks: list[int]  # of a device of each stage
    host: int  # bytes of the host's memory, of the device that uses most
    seconds: float  # simulated, for each sample of a replica


def our_figures(grid: Grid, size: int, pieces: int) -> dict[tuple[int, Saved], Planned]:
    """Compile the job under each level of ZeRO and each way to recompute. The model is captured once."""
    found: dict[tuple[int, Saved], Planned] = {}
    program: Program | None = None
    for zero in LEVELS:
        for saved in WAYS:
            job = our_job(grid, size, zero, saved, pieces)
            program = piper.compile(job, device="cpu", compile=True, captured=program)
            plans = [program.plans.of(grid.dp * stage) for stage in range(grid.pp)]
            step = simulate(program.plans, program.outline, Roofline(load_cluster("h200"))).step
            found[zero, saved] = Planned(
                peaks=[predicted_peak(plan) for plan in plans],
                host=max(map(host_peak, plans)),
                seconds=step / (grid.microbatches * size),
            )
    return found


# both


def largest(peaks: Sequence[int], sizes: Sequence[int], limit: float) -> int:
    """Return the largest microbatch that fits, from the peaks of some sizes in rising order."""
    above = next((i for i, peak in enumerate(peaks) if peak > limit), len(peaks) - 1)
    one, two = max(above, 1) - 1, max(above, 1)
    slope = (peaks[two] - peaks[one]) / (sizes[two] - sizes[one])
    return int(sizes[one] + (limit - peaks[one]) / slope) if slope > 0 else 0


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


class Here(Executor):
    """Calls each function at once, in this process."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        done: Future[object] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest microbatch of a side, and the stage that it fills, from 1."""

    samples: int
    stage: int


def peer_tasks(grid: Grid, pieces: int) -> dict[int, int]:
    """Return the stages of the peer that are counted, and in how many pieces each computes the head.

    Of the stages between the ends, the second has the most microbatches under way, and none has more layers.
    """
    return {stage: pieces if stage == grid.pp - 1 else 1 for stage in (0, 1, grid.pp - 1)}


def peer_fits(
    grid: Grid, pool: Executor, pieces: Iterable[int], sizes: Sequence[int]
) -> dict[tuple[int, Saved, int, int], Fit]:
    """Return the peer's largest microbatch by the level of ZeRO, what is saved, the pieces and the limit."""
    wanted = {
        (zero, saved, *task): [pool.submit(peer_bytes, grid, task[0], n, zero, saved, task[1]) for n in sizes]
        for zero in (2, 3)
        for saved in WAYS
        for task in dict.fromkeys(task for count in pieces for task in peer_tasks(grid, count).items())
    }
    peaks = {key: [one.result() for one in made] for key, made in wanted.items()}
    return {
        (zero, saved, count, limit): fit(
            {
                stage: largest(peaks[max(zero, 2), saved, stage, parts], sizes, limit * GIB)
                for stage, parts in peer_tasks(grid, count).items()
            }
        )
        for zero in LEVELS
        for saved in WAYS
        for count in pieces
        for limit in LIMITS
    }


def fit(fits: Mapping[int, int]) -> Fit:
    """Return the fewest samples that fit on a stage."""
    stage = min(fits, key=lambda stage: fits[stage])
    return Fit(samples=fits[stage], stage=stage + 1)


def batch(
    grid: Grid | None = None,
    sizes: Mapping[int, Sequence[int]] = SIZES,
    peer_sizes: Sequence[int] = PEER_SIZES,
    workers: int = 0,
) -> list[dict[str, str]]:
    """Compare the largest microbatches of the job: the least over its stages.

    sizes: those that ours is compiled for, by the pieces of the head. workers: 0 uses this process only.
    """
    grid = Grid() if grid is None else grid
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else Here() as pool:
        made = {
            pieces: [pool.submit(our_figures, grid, size, pieces) for size in tried]
            for pieces, tried in sizes.items()
        }
        peers = peer_fits(grid, pool, sizes, peer_sizes)
        ours = {pieces: [one.result() for one in figures] for pieces, figures in made.items()}
    rows = []
    for zero in LEVELS:
        for limit in LIMITS:
            for pieces, tried in sizes.items():
                for saved in WAYS:
                    planned = [figures[zero, saved] for figures in ours[pieces]]
                    theirs = [peers[zero, way, pieces, limit] for way in (saved, LAYERS)]
                    rows.append(
                        {
                            "zero": f"{zero}",
                            "memory GiB": f"{limit}",
                            "head": "whole" if pieces == 1 else f"{pieces} pieces",
                            "saved": f"{saved}",
                        }
                        | compared(planned, tried, limit * GIB, *theirs)
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


def compared(
    planned: Sequence[Planned], sizes: Sequence[int], limit: int, same: Fit, usual: Fit
) -> dict[str, str]:
    """Compare one of our jobs with the peer that saves the same, and with the one that saves layer inputs."""
    stages = range(len(planned[0].peaks))
    ours = fit({stage: largest([plan.peaks[stage] for plan in planned], sizes, limit) for stage in stages})
    known = [i for i, size in enumerate(sizes) if size <= ours.samples]
    near = known[-1] if known else 0  # the largest size that was compiled and fits
    return {
        "Piper": f"{ours.samples}",
        "full stage": f"{ours.stage}",
        "PipelineStage + FSDP2": f"{same.samples}",
        "its full stage": f"{same.stage}",
        "ratio": f"{ours.samples / same.samples:.2f}x" if same.samples > 0 else "-",
        "to layer inputs": f"{ours.samples / usual.samples:.2f}x" if usual.samples > 0 else "-",
        "ms a sample": f"{1e3 * planned[near].seconds:.1f}",
        "host GiB": f"{planned[near].host / sizes[near] * ours.samples / GIB:.0f}",
    }
