"""In bf16 the gradients of microbatches are summed in float32, as Megatron and TorchTitan do.

Held against plain PyTorch: each microbatch differentiated in bf16, the gradients added up in float32. The error of
both is measured from the gradient of the whole batch in fp64. With sums in bf16 it grows with the number of
microbatches: 0.2 % of the gradient with one, 1.6 % with 256.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.compiler import Program, compile
from piper.directives import Directive
from piper.job import Job
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests.runtime.as_compiled import as_compiled

WIDTH, STAGES, DP = 16, 4, 2
AT_MOST = 1.2  # times the error of plain PyTorch with float32 sums
SCHEDULES: dict[
    str, tuple[int, Callable[[int], Sequence[Directive]]]
] = {  # ranks that share the stages, and the order
    "none": (2, lambda m: []),
    "gpipe": (4, lambda m: piper.schedules.gpipe(4, m)),
    "1f1b": (4, lambda m: piper.schedules.one_f_one_b(4, m)),
    "interleaved-1f1b": (2, lambda m: piper.schedules.interleaved_1f1b(2, m)),
    "zero-bubble": (4, lambda m: piper.schedules.zero_bubble(4, m)),
    "interleaved-zero-bubble": (2, lambda m: piper.schedules.interleaved_zero_bubble(2, m)),
    "zbv": (-2, lambda m: piper.schedules.zbv(2, m)),  # below 0: rank 0 has the first and the last stage
    "dualpipe-v": (-2, lambda m: piper.schedules.dualpipe_v(2, m)),
}


class Stages(nn.Module):
    """A small network in stages."""

    def __init__(self, stages: int = STAGES) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(stages)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            with piper.annotate("PP"):
                x = stage(x)
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]).float(), batch["y"].float())


def batch_of(samples: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(samples, 4, WIDTH, generator=draw).bfloat16().float() for name in "xy"}


def sgd(params: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def job(
    parts: int,
    *,
    schedule: str = "none",
    zero: int = 0,
    dp: int = DP,
    reduce: str = "fp32",
    precision: str = "bf16",
    stages: int = STAGES,
) -> Job:
    ranks, orders = SCHEDULES[schedule]
    count = abs(ranks)
    homes = [s % count if ranks > 0 or s < count else 2 * count - 1 - s for s in range(stages)]
    placed: list[Directive] = [
        piper.replicate(
            piper.at(PP=stage),
            [*range(rank * dp, (rank + 1) * dp)],
            zero=zero if dp > 1 else 0,
            reduce=reduce,
        )
        for stage, rank in enumerate(homes)
    ]
    asked = [*placed, piper.split(piper.at(), axis="MB", parts=parts), *orders(parts)]
    batch = batch_of(parts * dp)
    return Job(
        model=partial(Stages, stages), loss=loss, data=lambda: [batch], strategy=asked, optimizer=sgd, precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


def start(job: Job) -> nn.Module:
    """The model as a job begins with it."""
    torch.manual_seed(job.seed)
    return job.model()


def exact_gradients(job: Job, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the whole batch in fp64, from the weights as bf16 holds them."""
    model = start(job).bfloat16().double()
    nn.functional.mse_loss(model(batch["x"].double()), batch["y"].double()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(job: Job, batch: Mapping[str, Tensor], slices: int) -> dict[str, Tensor]:
    """What a plain PyTorch loop gets: one backward in bf16 for each slice, their sum in float32."""
    model = start(job).bfloat16()
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for x, y in zip(batch["x"].bfloat16().chunk(slices), batch["y"].chunk(slices), strict=True):
        model.zero_grad()
        (nn.functional.mse_loss(model(x).float(), y) / slices).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            sums[name] += p.grad
    return sums


def error(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """How far gradients are from the exact ones, as one vector, relative to its length."""
    off = sum((got[name].double() - true).square().sum() for name, true in exact.items())
    return float((off / sum(true.square().sum() for true in exact.values())) ** 0.5)


def gradients_of(program: Program) -> dict[str, Tensor]:
    with launch_inline(program, Options(keep_gradients=True)) as run:
        result = run.step(next(iter(program.job.data())))
        found = run.gradients()
    norm = sum(gradient.double().square().sum().item() for gradient in found.values()) ** 0.5
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    return found


def assert_as_exact_as_plain(program: Program) -> None:
    batch = next(iter(program.job.data()))
    exact = exact_gradients(program.job, batch)
    usual = error(plain_gradients(program.job, batch, len(batch["x"])), exact)
    found = error(gradients_of(program), exact)
    assert found <= AT_MOST * usual, (found, usual)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_64_microbatches_are_as_exact_as_plain_sums_in_float32(zero: int) -> None:
    assert_as_exact_as_plain(compile(job(64, zero=zero, stages=2), device="cpu"))


def test_one_device_sums_in_float32() -> None:
    assert_as_exact_as_plain(compile(job(64, dp=1, stages=1), device="cpu"))


@pytest.mark.parametrize("zero", [1, 3])
def test_compiled_backwards_add_in_float32(zero: int, tmp_path: Path) -> None:
    program = compile(job(64, zero=zero, stages=1), device="cpu", compile=True, cache=tmp_path)
    assert as_compiled(program)
    assert_as_exact_as_plain(program)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_256_microbatches_under_every_schedule(
    schedule: str, zero: int, compiled: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.getbasetemp() / "compiled"
    asked = job(256, schedule=schedule, zero=zero)
    program = compile(asked, device="cpu", compile=compiled, cache=cache)
    assert_as_exact_as_plain(program)


def moved(plans: Plans) -> int:
    """The bytes that reductions of gradients send."""
    reductions = ("all_reduce", "reduce_scatter")
    return sum(ins.nbytes for plan in plans for ins in plan.instrs if ins.op in reductions)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_travel_in_the_type_that_replicate_says(zero: int) -> None:
    wide = compile(job(4, zero=zero), device="cpu").plans
    narrow = compile(job(4, zero=zero, reduce="bf16"), device="cpu").plans
    assert moved(wide) == 2 * moved(narrow) > 0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_that_travel_in_bf16_are_rounded_once_for_each_reduction(zero: int) -> None:
    program = compile(job(4, zero=zero, reduce="bf16"), device="cpu")
    batch = next(iter(program.job.data()))
    exact = exact_gradients(program.job, batch)
    usual = error(plain_gradients(program.job, batch, len(batch["x"])), exact)
    found = error(gradients_of(program), exact)
    assert found <= AT_MOST * usual + 2**-8, (found, usual)
    wide = error(gradients_of(compile(job(4, zero=zero), device="cpu")), exact)
    assert found != wide


def test_float64_is_never_rounded_on_the_way() -> None:
    plans = compile(job(2, zero=1, reduce="bf16", precision="fp64"), device="cpu").plans
    assert {bucket.precision.travel_dtype for bucket in plans.buckets.values()} == {"float64"}


def test_a_job_in_fp32_may_reduce_in_bf16() -> None:
    wide, narrow = (
        compile(job(2, zero=1, reduce=r, precision="fp32"), device="cpu") for r in ("fp32", "bf16")
    )
    assert moved(wide.plans) == 2 * moved(narrow.plans)
    exact = gradients_of(wide)
    assert 0 < error(gradients_of(narrow), {name: g.double() for name, g in exact.items()}) < 2**-8


def test_sums_count_as_float32_in_the_memory_of_a_plan() -> None:
    """One gradient that nothing is added to keeps its two bytes; a sum takes four."""
    sizes = {}
    for parts in (1, 2):
        plans = compile(job(parts, dp=1), device="cpu").plans
        kept = {slot: held for plan in plans for slot, held in plan.slots.items() if slot.kind == "grad"}
        elements = {name: bucket.numel for name, bucket in plans.buckets.items()}
        sizes[parts] = {held.nbytes / elements[slot.owner] for slot, held in kept.items()}
    assert sizes == {1: {2.0}, 2: {4.0}}
