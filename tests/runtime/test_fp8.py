"""Products in fp8 under layouts and schedules: the numbers of plain PyTorch on one device that rounds alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Directive, at, place, precision, remat, replicate, shard, split
from piper.check.check import Report, check, numbers
from piper.check.reference import Reference
from piper.compiler import Program, compile
from piper.ir.select import At
from piper.models import decoder
from piper.run.launch import launcher
from piper.schedules import one_f_one_b, zero_bubble
from tests import zoo
from tests.runtime import divided
from tests.runtime.grid import Cell, strategy
from tests.runtime.grid import batches as batches_of
from tests.runtime.grid import job as cell_job

FP8 = precision(at(), "fp8")
GATHERED = precision(at(), "fp8", gather="fp8")
WIDTH, TOKENS = 12, 3


class Net(nn.Module):
    """Two stages on tokens, the second of which has its samples on the second axis, and a head."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((WIDTH, WIDTH), (WIDTH, 9), (9, WIDTH), (WIDTH, WIDTH))  # a shard of a stage cuts a row
        self.stages = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = torch.tanh(self.stages[1](torch.relu(self.stages[0](x))))
        with piper.annotate("PP"):
            x = torch.relu(self.stages[2](x.transpose(0, 1)) @ self.square).transpose(0, 1)
            y: Tensor = self.head(torch.tanh(self.stages[3](x)))
        return y


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def data() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, TOKENS, WIDTH, generator=draw) for _ in range(2)]
    return [{"x": x, "y": x.sum(-1, keepdim=True)} for x in batches]


def job(*strategy: Directive, **changes: object) -> piper.Job:
    plain = piper.Job(model=Net, loss=loss, data=data, strategy=strategy, precision="fp64")
    return replace(plain, **changes)  # type: ignore[arg-type]


def checked(program: Program, on: str = "inline", tol: float = 1e-9, **more: object) -> Report:
    return check(program, lambda started, options: launcher(started, on, options), data(), tol, **more)  # type: ignore[arg-type]


def pairs(zero: int) -> list[Directive]:
    """Two stages, each on two replicas, as halves of backwards."""
    stages = [replicate(at(PP=stage), [2 * stage, 2 * stage + 1], zero=zero) for stage in range(2)]
    return [*stages, split(at(), parts=2), *zero_bubble(2, 2)]


def gathered(program: Program) -> dict[str, int]:
    """The bytes of one gather of each bucket that the first devices gather."""
    plan = next(iter(program.plans))
    return {ins.bucket: ins.nbytes for ins in plan.instrs if ins.op == "gather"}


def test_a_composed_layout_has_the_numbers_of_one_device() -> None:
    plain = compile(job(*pairs(3), FP8))
    report = checked(plain)
    assert report.ok and report.notes == (), report
    assert report.max_grad_diff < 1e-12
    narrow = compile(job(*pairs(3), GATHERED), captured=plain)
    report = checked(narrow)
    assert report.ok and report.notes == (), report
    # Of 252 elements of weights and 21 of biases each device sends half, rounded up: of 8 bytes, or of 1
    # with a scale of 8 bytes for the 11 rows that lie in a shard.
    assert gathered(plain) == {"PP=0/0": 137 * 8}
    assert gathered(narrow) == {"PP=0/0": 126 + 11 * 8, "PP=0/1": 11 * 8}


def test_the_numbers_are_not_those_without_fp8() -> None:
    plain = compile(job())
    narrow = compile(job(precision(at(PP=0), "fp8")), captured=plain)
    wanted = list(numbers(Reference(plain), data()))
    report = checked(narrow, wanted=wanted)
    assert not report.ok and 1e-4 < report.max_loss_diff < 0.1
    own = list(numbers(Reference(narrow), data()))
    assert own[0].loss != wanted[0].loss


def test_a_difference_is_reported() -> None:
    report = checked(compile(job(*pairs(3), FP8)), tol=0)
    assert not report.ok and "differs by" in str(report.first_bad)


def test_a_batch_of_another_size_is_compared_slice_by_slice() -> None:
    """Samples are repeated to fill the slices, so no whole batch has their rounding."""
    program = compile(job(replicate(at(), [0, 1], zero=3), GATHERED))
    short = {name: field[:3] for name, field in data()[0].items()}
    report = check(program, lambda started, options: launcher(started, "inline", options), [short])
    assert report.ok and report.notes == (
        "gradients cannot be rounded to fp8 for the whole batch (workers get a batch that is padded, or whose "
        "samples are repeated); compared with the same slices in plain PyTorch",
    )


def test_as_many_tokens_as_samples_are_compared_slice_by_slice() -> None:
    """The second stage has its samples on the second axis, which plain PyTorch cannot tell from the first."""
    square = [{name: field[:TOKENS] for name, field in batch.items()} for batch in data()]
    program = compile(job(replicate(at(), [0, 1, 2]), FP8, data=lambda: square))
    report = check(program, lambda started, options: launcher(started, "inline", options), square)
    assert report.ok and "two axes as long as the batch" in report.notes[0], report


def test_a_loss_that_is_a_sum_is_wrong_also_where_rows_are_unsure() -> None:
    def total(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        error: Tensor = (model(batch["x"]) - batch["y"]).square()
        return error.mean() * error.numel()

    square = [{name: field[:TOKENS] for name, field in batch.items()} for batch in data()]
    program = compile(job(replicate(at(), [0, 1, 2]), FP8, data=lambda: square, loss=total), device="cpu")
    report = check(program, lambda started, options: launcher(started, "inline", options), square)
    assert not report.ok and report.max_loss_diff > 0.1, report


class Tied(Net):
    """Two layers of different stages have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stages[0].weight = self.stages[3].weight


def test_a_tied_weight_is_rounded_by_the_slices_of_each_stage() -> None:
    wider = (place(at(PP=0), [0]), place(at(PP=1), [1, 2]), split(at(), parts=2))
    report = checked(compile(job(*wider, FP8, model=Tied)))
    assert report.ok and report.notes == (), report


LAYOUTS: dict[str, Sequence[Directive]] = {
    "one device": (),
    "microbatches": (split(at(), parts=4),),
    **{f"zero {level}": pairs(level) for level in range(3)},
    "fewer devices later": (place(at(PP=0), [0, 1]), place(at(PP=1), [2]), split(at(), parts=2)),
    "more devices later": (place(at(PP=0), [0]), place(at(PP=1), [1, 2]), split(at(), parts=2)),
    "level 3": pairs(3),
    "buckets": (replicate(at(), [0, 1], zero=3, bucket_mb=0.002), split(at(), parts=2)),
    "recomputed": (remat(at(), 0.25, across="PP"), split(at(), parts=2)),
    "budget": (remat(at(), 0.0), split(at(), parts=2)),
    "1f1b": (place(at(PP=0), [0]), place(at(PP=1), [1]), split(at(), parts=4), *one_f_one_b(2, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", [at(), at(PP=1)], ids=["all", "one stage"])
def test_every_layout_has_the_numbers_of_one_device(layout: str, where: At) -> None:
    report = checked(compile(job(*LAYOUTS[layout], precision(where, "fp8"))))
    assert report.ok and report.notes == (), report


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["level 3", "buckets"])
def test_gathers_in_fp8_have_the_numbers_of_one_device(layout: str) -> None:
    report = checked(compile(job(*LAYOUTS[layout], GATHERED)))
    assert report.ok and report.notes == (), report


def test_a_shard_that_owners_update_in_parts_is_gathered_in_fp8() -> None:
    further = replicate(at(), range(4), zero=3, within=2, optimizer_within=4)
    report = checked(compile(job(further, GATHERED)))
    assert report.ok and report.notes == (), report


@pytest.mark.slow
def test_processes_have_the_numbers_of_one_device() -> None:
    assert checked(compile(job(*pairs(3), GATHERED)), on="local").ok


@pytest.mark.slow
def test_an_optimizer_of_whole_tensors_gathers_uneven_shards_in_fp8() -> None:
    asked = job(*pairs(3), GATHERED, optimizer=lambda params: torch.optim.Adafactor(params, lr=0.01))
    program = compile(asked)
    assert any(bucket.bounds and bucket.gathered_as for bucket in program.plans.buckets.values())
    assert checked(program).ok


@pytest.mark.slow
@pytest.mark.timeout(900)  # a C++ compiler works for each kernel
def test_compiled_code_has_the_numbers_of_one_device(tmp_path: Path) -> None:
    compiled = compile(job(split(at(), parts=2), FP8), compile=True, cache=tmp_path)
    assert checked(compiled).ok


@pytest.mark.parametrize(
    "cell",
    [
        Cell(case="moe", schedule="none", dp=2, ways=2, zero=1),
        pytest.param(
            Cell(case="qwen3_moe_hf", schedule="1f1b", dp=2, ways=2, zero=1, parts=2), marks=pytest.mark.slow
        ),
        pytest.param(Cell(case="moe", schedule="zero-bubble", dp=2, ways=2, parts=2), marks=pytest.mark.slow),
        pytest.param(
            Cell(case="moe", schedule="gpipe", dp=2, ways=2, parts=2, capacity=1), marks=pytest.mark.slow
        ),
        pytest.param(
            Cell(case="qwen3_moe_hf", schedule="none", dp=2, ways=2, capacity=2), marks=pytest.mark.slow
        ),
        pytest.param(Cell(case="moe", schedule="1f1b", dp=2, zero=3, parts=2), marks=pytest.mark.slow),
    ],
    ids=lambda cell: f"{cell.case} {cell.schedule}",
)
def test_grouped_products_of_experts_run_in_fp8(cell: Cell) -> None:
    program = compile(replace(cell_job(cell), strategy=[*strategy(cell), FP8]))
    experts = [chunk for chunk in program.outline.chunks if chunk.kind == "expert"]
    assert experts and all(len(chunk.products) == 2 and chunk.precision for chunk in experts)
    report = check(
        program, lambda started, options: launcher(started, "inline", options), batches_of(cell, 2)
    )
    assert report.ok and report.notes == (), report


def test_slices_of_weights_are_rounded_by_scales_of_their_own() -> None:
    slices = shard(at(), [0, 1], axis="TP", weights={"stages.0": 0, "stages.3": 1, "square": 0})
    report = checked(compile(job(slices, split(at(), parts=2), FP8)))
    assert report.ok and report.notes == (), report


DIVIDED = [
    ("decoder", "tp2cp2dp2"),
    ("decoder", "tp4"),  # two devices have the same heads of keys
    *(
        pytest.param(model, strategy, marks=pytest.mark.slow)
        for model, strategy in [
            ("decoder", "tp2dp2z3"),
            ("decoder", "cp2heads"),
            ("gpt2", "tp2"),
            ("llama", "tp2zb"),
            ("llama", "tp2pp2"),
            ("llama", "tp4"),
            ("moe", "tp2ep2"),
            ("moe", "sp2ep4"),
            ("moe", "cp2ep4"),
        ]
    ),
]


@pytest.mark.parametrize(("model", "strategy"), DIVIDED)
def test_divided_models_have_the_numbers_of_one_device(model: str, strategy: str, on: str = "inline") -> None:
    made = divided.job(model, strategy)
    program = compile(replace(made, strategy=[*made.strategy, FP8]))  # type: ignore[misc]
    report = check(
        program, lambda started, options: launcher(started, on, options), divided.batches(), tol=1e-9
    )
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), [("decoder", "tp2dp2z3"), ("gpt2", "tp2pp2")])
def test_processes_of_divided_models_have_the_numbers_of_one_device(model: str, strategy: str) -> None:
    test_divided_models_have_the_numbers_of_one_device(model, strategy, "local")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "moe", "qwen3_hf"])
def test_models_have_the_numbers_of_one_device(name: str) -> None:
    case = zoo.case(name)
    batches = [case.batch(8, seed) for seed in range(2)]
    asked = piper.Job(
        model=case.model, loss=case.loss, data=lambda: batches, strategy=[split(at(), parts=2), FP8]
    )
    program = compile(replace(asked, precision="fp64"))
    assert sum(len(chunk.products) for chunk in program.outline.chunks if chunk.precision) > 4
    report = check(program, lambda started, options: launcher(started, "inline", options), batches)
    assert report.ok, report


def test_a_job_in_bf16_trains() -> None:
    with piper.launch(compile(job(FP8, precision="bf16"), device="cpu"), on="inline") as run:
        first, *_, last = (run.step(data()[0]).loss for _ in range(4))
    assert last < first


def texts(steps: int) -> list[dict[str, Tensor]]:
    """Batches of a random chain in which each of 64 tokens is followed by one of four."""
    draw = torch.Generator().manual_seed(0)
    follow = torch.randint(64, (64, 4), generator=draw)
    found = []
    for _ in range(steps):
        tokens = [torch.randint(64, (16,), generator=draw)]
        for _ in range(16):
            tokens.append(follow[tokens[-1], torch.randint(4, (16,), generator=draw)])
        rows = torch.stack(tokens, 1)
        found.append({"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()})
    return found


@pytest.mark.slow
def test_a_training_in_fp8_ends_where_the_plain_one_does() -> None:
    config = decoder.Config(
        vocab=64, dim=32, layers=2, heads=4, kv_heads=4, head_dim=8, hidden=64, qk_norm=True
    )
    batches = texts(150)
    ends = []
    for asked_for in ((), (FP8,)):
        asked = piper.Job(
            model=lambda: decoder.Decoder(config),
            loss=decoder.token_loss,
            data=lambda: batches,
            strategy=asked_for,
            optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
        )
        with piper.launch(compile(asked, device="cpu"), on="inline") as run:
            losses = [run.step(batch).loss for batch in batches]
        assert losses[-1] < 0.5 * losses[0]
        ends.append(sum(losses[-20:]) / 20)
    assert ends[1] == pytest.approx(ends[0], rel=0.005) and ends[0] != ends[1]
