"""The rows of `gpu_ranks`: whole jobs of four ranks, their models and batches, and each as a job of Piper."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import piper
from piper.models import decoder, moe
from piper.models.causal import CausalDecoder, Sizes
from tests import deepseek

RANKS = 4
SEED = 0
FIELDS = {"tokens": 1, "labels": 1}  # and the dimension of their positions
Schedule = Literal["", "1f1b", "interleaved", "zbv", "dualpipe-v"]
FOLDED = ("zbv", "dualpipe-v")  # each rank has two stages, one on the way down a V and one on the way up
Precision = Literal["bf16", "fp32"]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to divide a job over four ranks, what both sides are called, and what is asked of the ratio.

    peer: empty: ours alone runs it.
    """

    name: str
    peer: str
    ours: str
    pp: int = 1
    dp: int = 1  # replicas, of which each has its own samples
    tp: int = 1
    cp: int = 1
    ep: int = 1  # over the replicas, or neighbouring ones of them
    zero: int = 0
    keep: Literal["use", "step"] = "use"
    schedule: Schedule = ""
    capacity: float | None = None  # of blocks in which rows travel to experts
    stream: str | None = None  # of reductions and exchanges of ours; None: each has its own
    graphs: bool = False  # ours issues a step as one graph
    halves: bool = False  # ours computes gradients of weights while those of inputs are on their way
    recompute: bool = False  # layers save only their inputs, on both sides
    asked: float = 1.0  # of the peer's time at most

    @property
    def stages(self) -> int:
        """Return the number of stages of the model."""
        return self.pp * (2 if self.schedule in ("interleaved", *FOLDED) else 1)

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline that runs a stage."""
        if self.schedule in FOLDED and stage >= self.pp:
            return 2 * self.pp - 1 - stage
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank of the pipeline runs."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def devices_of(self, stage: int) -> list[int]:
        """Return the ranks of the job that run a stage."""
        width = RANKS // self.pp
        first = width * self.rank_of(stage)
        return [*range(first, first + width)]


ROWS = {
    row.name: row
    for row in (
        Row(name="ddp", dp=4, peer="DistributedDataParallel", ours="zero=0"),
        Row(name="fsdp", dp=4, zero=3, peer="FSDP2", ours="zero=3"),
        Row(
            name="tp4",
            tp=4,
            halves=True,
            peer="parallelize_module with sequence parallelism",
            ours="TP, between=1, weight gradients beside collectives",
        ),
        Row(
            name="1f1b",
            pp=4,
            schedule="1f1b",
            halves=True,
            peer="Schedule1F1B",
            ours="one_f_one_b, backwards in halves",
            asked=0.97,
        ),
        Row(
            name="1f1b_whole",
            pp=4,
            schedule="1f1b",
            peer="",
            ours="one_f_one_b, backwards whole: beside 1f1b",
        ),
        Row(
            name="interleaved",
            pp=4,
            schedule="interleaved",
            peer="ScheduleInterleaved1F1B, 2 stages a rank",
            ours="interleaved_1f1b",
            asked=0.97,
        ),
        Row(name="zbv", pp=4, schedule="zbv", peer="ScheduleZBVZeroBubble", ours="zbv", asked=0.97),
        Row(
            name="pp2_fsdp2",
            pp=2,
            dp=2,
            zero=2,
            schedule="1f1b",
            peer="Schedule1F1B + FSDP2, parameters stay gathered",
            keep="step",
            ours='one_f_one_b, zero=2, keep="step"',
        ),
        Row(
            name="pp2_fsdp2_reshard",
            pp=2,
            dp=2,
            zero=3,
            schedule="1f1b",
            peer="Schedule1F1B + FSDP2, resharded after forward",
            keep="step",
            ours='one_f_one_b, zero=3, keep="step"',
        ),
        Row(
            name="pp2_tp2",
            pp=2,
            tp=2,
            schedule="1f1b",
            halves=True,
            peer="Schedule1F1B + parallelize_module",
            ours="one_f_one_b, TP, between=1, weight gradients beside collectives",
        ),
        Row(
            name="ep4",
            dp=4,
            ep=4,
            halves=True,
            peer="DDP, experts by all_to_all_single",
            ours="zero=0, experts sharded, weight gradients beside exchanges",
        ),
        # At first up to 1.64 even shares of the rows of a layer go to one rank, with random tokens.
        Row(
            name="ep4_blocks",
            dp=4,
            ep=4,
            capacity=1.75,
            peer="",
            ours="zero=0, experts sharded, capacity=1.75: beside ep4",
        ),
        Row(
            name="ep4_graphs",
            dp=4,
            ep=4,
            capacity=1.75,
            graphs=True,
            peer="",
            ours="the same as one graph: beside ep4",
        ),
        Row(
            name="pp2_ep2",
            pp=2,
            dp=2,
            ep=2,
            schedule="1f1b",
            peer="Schedule1F1B, experts by all_to_all_single",
            ours="one_f_one_b, experts sharded",
        ),
        Row(
            name="dualpipev_ep2",
            pp=2,
            dp=2,
            ep=2,
            schedule="dualpipe-v",
            peer="",
            ours="dualpipe_v, experts sharded: beside pp2_ep2",
        ),
        Row(
            name="interleaved_ep2",
            pp=2,
            dp=2,
            ep=2,
            schedule="interleaved",
            peer="",
            ours="interleaved_1f1b, experts sharded: beside dualpipev_ep2",
        ),
        # These three with experts so wide that their exchanges take about half as long as the computation.
        Row(
            name="pp2_ep2_wide",
            pp=2,
            dp=2,
            ep=2,
            schedule="1f1b",
            peer="",
            ours="one_f_one_b, wide experts sharded",
        ),
        Row(
            name="dualpipev_wide",
            pp=2,
            dp=2,
            ep=2,
            schedule="dualpipe-v",
            peer="",
            ours="dualpipe_v, wide experts sharded: beside pp2_ep2_wide",
        ),
        Row(
            name="interleaved_wide",
            pp=2,
            dp=2,
            ep=2,
            schedule="interleaved",
            peer="",
            ours="interleaved_1f1b, wide experts sharded: beside dualpipev_wide",
        ),
        Row(
            name="streams_one",
            dp=4,
            ep=2,
            stream="shared",
            peer="",
            ours="zero=0, experts over pairs, reductions and exchanges on one stream",
        ),
        Row(
            name="streams_own",
            dp=4,
            ep=2,
            peer="",
            ours="zero=0, experts over pairs, a stream for each: beside streams_one",
        ),
        # Beside TorchTitan's own models, in `gpu_systems`.
        Row(name="qwen3_ep4", dp=4, ep=4, zero=3, halves=True, peer="", ours="zero=3, experts sharded"),
        Row(
            name="deepseek_ep4",
            dp=4,
            ep=4,
            zero=3,
            halves=True,
            peer="",
            ours="zero=3, latent attention, a shared expert, the others sharded",
        ),
        Row(
            name="deepseek_pp2_ep2",
            pp=2,
            dp=2,
            ep=2,
            zero=2,
            keep="step",
            schedule="1f1b",
            peer="",
            ours='one_f_one_b, zero=2, keep="step", experts sharded',
        ),
        Row(
            name="largest_zero2",
            pp=2,
            dp=2,
            zero=2,
            schedule="1f1b",
            recompute=True,
            peer="Schedule1F1B + FSDP2, parameters stay gathered, checkpoint of each layer",
            ours="one_f_one_b, zero=2, remat of each layer",
        ),
        Row(
            name="largest_zero3",
            pp=2,
            dp=2,
            zero=3,
            schedule="1f1b",
            recompute=True,
            peer="Schedule1F1B + FSDP2, resharded after forward, checkpoint of each layer",
            ours="one_f_one_b, zero=3, remat of each layer",
        ),
        Row(name="cp4", cp=4, peer="DDP + context_parallel", ours="CP, ring, zigzag"),
    )
}
RECOMPUTED = [row.name for row in ROWS.values() if row.recompute]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model and the batch of a row: samples of a microbatch on one replica, and how many microbatches.

    budget: the part of its activations that our first stage, which holds most, may save. None: all.
    """

    model: Sizes
    length: int
    samples: int
    microbatches: int = 1
    budget: float | None = None

    def rows(self, replicas: int) -> int:
        """Return the samples of a step."""
        return self.samples * self.microbatches * replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of every row at one size, and its types."""

    name: str
    shapes: Mapping[str, Shape]
    precision: Precision = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which both sides compute."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


SMALL = decoder.Config(vocab=16_384, dim=1024, layers=16, heads=16, kv_heads=8, head_dim=64, hidden=4096)
SMALL_MOE = moe.Config(
    vocab=16_384, dim=1024, layers=8, heads=16, kv_heads=8, head_dim=64, experts=16, top_k=4, hidden=512
)
WIDE_MOE = moe.Config(
    vocab=16_384, dim=1024, layers=8, heads=16, kv_heads=8, head_dim=64, experts=8, top_k=1, hidden=16_384
)
WIDE = dict.fromkeys(("pp2_ep2_wide", "dualpipev_wide", "interleaved_wide"), (4, 8))
SMALL_LATENT = deepseek.Config(
    vocab=16_384,
    dim=1024,
    layers=8,
    heads=16,
    kv_heads=16,
    head_dim=64,  # and 96 of queries and keys: with 192, as published, few fused kernels have a backward
    rope_dim=32,
    q_rank=384,
    kv_rank=256,
    dense_hidden=4096,
    experts=16,
    top_k=4,
    hidden=512,
    balance=0.0,
)
MEDIUM = decoder.Config(vocab=32_768, dim=2048, layers=16, heads=16, kv_heads=8, head_dim=128, hidden=8192)
LARGE = decoder.Config(vocab=32_768, dim=4096, layers=16, heads=32, kv_heads=8, head_dim=128, hidden=14_336)
LARGE_MOE = moe.Config(
    vocab=32_768, dim=2048, layers=8, heads=16, kv_heads=8, head_dim=128, experts=64, top_k=4, hidden=1024
)
LARGE_LATENT = replace(
    SMALL_LATENT,
    vocab=32_768,
    dim=2048,
    heads=32,
    kv_heads=32,
    q_rank=768,
    kv_rank=512,
    dense_hidden=8192,
    experts=64,
    hidden=1024,
)
LATENT = {"deepseek_ep4": (4, 1), "deepseek_pp2_ep2": (4, 4)}
LARGEST = {"largest_zero2": (12, 4), "largest_zero3": (12, 4)}  # few words, so that logits decide less
TINY = decoder.Config(vocab=64, dim=32, layers=8, heads=4, kv_heads=4, head_dim=8, hidden=64)
TINY_MOE = moe.Config(
    vocab=64, dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, experts=8, top_k=2, hidden=16, init_std=0.2
)
TINY_LATENT = replace(deepseek.Config.tiny(stages=1), balance=0.0)


def shapes(
    dense: Sizes,
    experts: Sizes,
    length: int,
    by_row: Mapping[str, tuple[int, int]],
    budgets: Mapping[str, float] | None = None,
) -> dict[str, Shape]:
    """Return the shapes of rows with one dense model and one of experts: samples, microbatches, budgets."""
    return {
        name: Shape(
            model=experts if ROWS[name].ep > 1 else dense,
            length=length,
            samples=samples,
            microbatches=microbatches,
            budget=(budgets or {}).get(name),
        )
        for name, (samples, microbatches) in by_row.items()
    }


LONG = 32_768  # tokens of the one sample under context parallelism
SIZES = {
    size.name: size
    for size in (
        Size(
            name="small",  # 0.3 billion parameters
            shapes={
                **shapes(
                    SMALL,
                    SMALL_MOE,
                    1024,
                    {
                        "ddp": (24, 1),
                        "fsdp": (24, 1),
                        "tp4": (8, 1),
                        "1f1b": (8, 8),
                        "1f1b_whole": (8, 8),
                        "interleaved": (8, 8),
                        "zbv": (8, 8),
                        "pp2_fsdp2": (12, 4),
                        "pp2_fsdp2_reshard": (12, 4),
                        "pp2_tp2": (4, 4),
                        "ep4": (4, 1),
                        "ep4_blocks": (4, 1),
                        "ep4_graphs": (4, 1),
                        "pp2_ep2": (4, 4),
                        "dualpipev_ep2": (4, 4),
                        "interleaved_ep2": (4, 4),
                        "streams_one": (4, 1),
                        "streams_own": (4, 1),
                        "qwen3_ep4": (4, 1),
                    },
                ),
                **shapes(SMALL, WIDE_MOE, 1024, WIDE),
                **shapes(SMALL, SMALL_LATENT, 1024, LATENT),
                **shapes(replace(SMALL, vocab=4096), SMALL_MOE, 1024, LARGEST),
                "cp4": Shape(model=SMALL, length=LONG, samples=1),
            },
        ),
        # About 30 GiB a rank. Ranks that gather or reduce whole gradients over sockets have a model of 1.1
        # billion parameters and more samples, the others one of 3.8 billion.
        Size(
            name="large",
            shapes={
                **shapes(
                    MEDIUM,
                    LARGE_MOE,
                    1024,
                    {
                        "ddp": (4, 1),
                        "fsdp": (12, 1),
                        "pp2_fsdp2": (6, 4),
                        "pp2_fsdp2_reshard": (6, 4),
                        "ep4": (8, 1),
                        "ep4_blocks": (8, 1),
                        "ep4_graphs": (8, 1),
                        "pp2_ep2": (4, 4),
                        "dualpipev_ep2": (4, 4),
                        "interleaved_ep2": (4, 4),
                        "streams_one": (8, 1),
                        "streams_own": (8, 1),
                        "qwen3_ep4": (8, 1),
                    },
                    {"pp2_fsdp2_reshard": 0.35, "pp2_ep2": 0.2},
                ),
                **shapes(
                    LARGE,
                    LARGE_MOE,
                    1024,
                    {
                        "tp4": (4, 1),
                        "1f1b": (2, 8),
                        "1f1b_whole": (2, 8),
                        "interleaved": (2, 8),
                        "zbv": (2, 8),
                        "pp2_tp2": (2, 4),
                    },
                    {"pp2_tp2": 0.4},
                ),
                **shapes(LARGE, WIDE_MOE, 1024, WIDE),
                **shapes(LARGE, LARGE_LATENT, 1024, LATENT),
                **shapes(replace(MEDIUM, vocab=4096), LARGE_MOE, 1024, LARGEST),
                "cp4": Shape(model=replace(MEDIUM, layers=12), length=LONG, samples=1),
            },
        ),
    )
}
TINY_SIZE = Size(  # for a host without GPUs
    name="tiny",
    shapes={
        **shapes(
            TINY, TINY_MOE, 16, {name: (2, 8 if ROWS[name].pp > 1 else 1) for name in ROWS if name != "cp4"}
        ),
        **shapes(TINY, TINY_LATENT, 16, {"deepseek_ep4": (2, 1), "deepseek_pp2_ep2": (2, 8)}),
        "cp4": Shape(model=TINY, length=64, samples=1),
    },
    precision="fp32",
)
SIZES |= {"tiny": TINY_SIZE, "tiny-bf16": replace(TINY_SIZE, name="tiny-bf16", precision="bf16")}


def model_of(config: Sizes) -> CausalDecoder:
    """Build the whole model of a row."""
    if isinstance(config, deepseek.Config):
        return deepseek.DeepSeekDecoder(config)
    return moe.MoEDecoder(config) if isinstance(config, moe.Config) else decoder.Decoder(config)  # type: ignore[arg-type]


def batch_of(row: Row, shape: Shape) -> Batch:
    """Return the batch of all steps, on the host: random tokens, each with the next one as its label."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.model.vocab, (shape.rows(row.dp), shape.length + 1), generator=drawn)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def strategy_of(row: Row, shape: Shape) -> list[piper.Directive]:
    """Return Piper's strategy of a row."""
    strategy: list[piper.Directive] = []
    for stage in range(row.stages):
        selected, devices = piper.at(PP=stage), row.devices_of(stage)
        if row.tp > 1:
            tensor = piper.shard(selected, devices, axis="TP", weights=decoder.SHARDED_WEIGHTS, between=1)
            strategy.append(tensor)
        elif row.cp > 1:
            ring = piper.shard(selected, devices, axis="CP", batch=FIELDS, attention="ring", balance="zigzag")
            strategy.append(ring)
        elif row.dp > 1:
            replicas = piper.replicate(
                selected, devices, zero=row.zero, keep=row.keep, reduce_stream=row.stream
            )
            strategy.append(replicas)
        else:
            strategy.append(piper.place(selected, devices))
        if row.ep > 1:
            experts = piper.at(PP=stage, EP="*")
            strategy.append(
                piper.shard(experts, devices, ways=row.ep, stream=row.stream, capacity=row.capacity)
            )
    if row.recompute:
        strategy.append(piper.remat(piper.at(LAYER="*"), 0))
    if shape.budget is not None:
        strategy.append(piper.remat(piper.at(PP=0), budget=shape.budget))
    if shape.microbatches > 1:
        strategy.append(piper.split(piper.at(), parts=shape.microbatches))
    return [*strategy, *halves_of(row), *order_of(row, shape.microbatches)]


def halves_of(row: Row) -> Iterator[piper.Directive]:
    """Yield what runs backwards in halves: gradients of weights while those of inputs are on their way."""
    if row.halves and (row.tp > 1 or row.ep > 1):  # collectives in every stage
        yield piper.order([[piper.at(PASS="BI"), piper.at(PASS="BW")]])
    elif row.halves:
        for stage in range(1, row.stages):  # the first one sends no gradient
            yield piper.order([[piper.at(PP=stage, PASS="BI"), piper.at(PP=stage, PASS="BW")]])


def order_of(row: Row, microbatches: int) -> Sequence[piper.Directive]:
    """Return the order of a pipeline."""
    match row.schedule:
        case "1f1b":
            return piper.schedules.one_f_one_b(row.pp, microbatches)
        case "interleaved":
            return piper.schedules.interleaved_1f1b(row.pp, microbatches, stages_per_rank=2)
        case "zbv":
            return piper.schedules.zbv(row.pp, microbatches)
        case "dualpipe-v":
            return piper.schedules.dualpipe_v(row.pp, microbatches)
    return ()


def job_of(row: Row, size: Size, optimizer: MakeOptimizer = adamw, by_layer: bool | None = None) -> piper.Job:
    """Return a row as a job.

    by_layer: each layer is a chunk of its own. None: where there are replicas, whose reductions and
    gathers then overlap other layers, or stages, whose receives then overlap one layer and not a whole
    backward: until a value arrives, its receive takes multiprocessors.
    """
    shape = size.shapes[row.name]
    layered = (row.dp > 1 or row.pp > 1) if by_layer is None else by_layer
    batch = batch_of(row, shape)
    return piper.Job(
        model=partial(model_of, replace(shape.model, stages=row.stages, by_layer=layered)),
        loss=decoder.token_loss,
        data=lambda: [batch],
        strategy=strategy_of(row, shape),
        optimizer=optimizer,
        precision=size.precision,
        seed=SEED,
    )
