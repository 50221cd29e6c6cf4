"""`check` compares with plain PyTorch on the whole batch, and says why where slices are not the batch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.check.check import Report, check
from piper.check.distance import differences, distance, relative
from piper.check.reference import Reference
from piper.check.replay import Replay
from piper.check.slicing import BatchSlicing, slicing_of
from piper.compiler import compile
from piper.directives import Directive, place, replicate, split
from piper.errors import ConfigError
from piper.ir.select import at
from piper.job import Job
from piper.run.launch import launch_inline
from tests import zoo

Batch = Mapping[str, Tensor]
DP = [replicate(at(), [0, 1])]
PARTS = [split(at(), parts=2)]


class Layers(nn.Module):
    """Two stages with something between their layers."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Tanh, classes: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), between()) for _ in range(2))
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            with annotate("PP"):
                x = stage(x)
        result: Tensor = self.head(x)
        return result


def job(
    model: Callable[[], nn.Module] = Layers,
    loss: Callable[[nn.Module, Batch], Any] = zoo.regression,
    batches: Sequence[Batch] = (),
    strategy: Sequence[Directive] = (),
    **changes: Any,  # noqa: ANN401
) -> Job:
    given = [*batches] or [zoo.vectors(8, seed) for seed in range(2)]
    fields: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    return Job(
        model=model,
        loss=loss,
        data=lambda: given,
        strategy=[*strategy],
        precision="fp64",
        **(fields | changes),
    )


def checked(made: Job, tol: float = 1e-9) -> Report:
    return check(compile(made, device="cpu"), launch_inline, [*made.data()], tol)


# The whole batch, sliced by hand.


def test_slices_follow_the_documented_rule() -> None:
    def slicing(sizes: Mapping[str, int], counts: Mapping[str, int]) -> BatchSlicing:
        parts: list[tuple[tuple[str, int], ...]] = [()]
        for axis, count in counts.items():
            parts = [(*part, (axis, i)) for part in parts for i in range(count)]
        placed = {name: dict.fromkeys(parts, tuple(range(size))) for name, size in sizes.items()}
        return BatchSlicing(placed=placed, cells=math.lcm(*sizes.values()), counts=counts)

    def rows(slicing: BatchSlicing, chunk: str, samples: int) -> list[tuple[int, ...]]:
        return [part.samples for part in slicing.slices(chunk, samples)]

    assert rows(slicing({"a": 2}, {"MB": 2}), "a", 8) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    two = slicing({"a": 2, "b": 1}, {"MB": 2})
    assert rows(two, "a", 8) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert rows(two, "b", 8) == [(0, 1, 4, 5), (2, 3, 6, 7)], "part k is the k-th piece of every cell"
    axes = slicing({"a": 1}, {"OUTER": 2, "MB": 3})
    assert rows(axes, "a", 6) == [(0,), (1,), (2,), (3,), (4,), (5,)], "the first axis is the slowest"
    assert [dict(part.part) for part in axes.slices("a", 6)][1] == {"OUTER": 0, "MB": 1}


def test_slices_are_read_off_the_plans() -> None:
    strategy = [replicate(at(PP=0), [0, 1]), place(at(PP=1), [2]), *PARTS]
    found = slicing_of(compile(job(strategy=strategy), device="cpu").plans)
    devices = {name: set(placed.values()) for name, placed in found.placed.items()}
    assert devices == {"PP=0": {(0, 1)}, "PP=1": {(2,)}}
    assert (found.cells, found.counts) == (2, {"MB": 2})


def test_the_reference_is_plain_pytorch_on_the_whole_batch() -> None:
    """Written out by hand, without anything of ours."""
    batch = zoo.vectors(8, 0)
    made = job(strategy=[*DP, *PARTS], clip_norm=0.05)
    reference = Reference(compile(made, device="cpu"))
    loss = reference.step(batch)
    torch.manual_seed(0)
    model = Layers().double()
    wanted = F.mse_loss(model(batch["x"].double()), batch["y"].double())
    wanted.backward()
    assert loss == wanted.item()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(reference.gradients[name], parameter.grad)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert reference.grad_norm == norm.item() > 0.05
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        assert torch.equal(reference.state_dict()[name], value)


# A mean of means.


def labelled(rows: int = 8, seed: int = 0) -> Batch:
    """Rows with 1 to `rows` labels each."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (rows, rows), generator=rng)
    return {
        "x": torch.randn(rows, rows, 16, generator=rng),
        "labels": labels.masked_fill(torch.arange(rows) > torch.arange(rows)[:, None], -100),
    }


def mean_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def masked_mean(model: nn.Module, batch: Batch) -> Tensor:
    kept = batch["labels"] >= 0
    each = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (each * kept.flatten()).sum() / kept.sum()


def sum_and_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, labels = model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum().double()


@pytest.mark.parametrize("strategy", [DP, PARTS], ids=["replicas", "microbatches"])
@pytest.mark.parametrize("loss", [mean_of_labels, masked_mean])
def test_a_mean_of_uneven_slices_is_named(
    loss: Callable[[nn.Module, Batch], Tensor], strategy: list[Directive]
) -> None:
    report = checked(job(loss=loss, batches=[labelled()], strategy=strategy))
    assert not report.ok
    assert report.first_bad is not None
    assert report.first_bad.startswith("the loss is a mean of uneven slices: ")
    assert "divides by 10, 26 on the slices; return (sum, weight), as piper.losses" in report.first_bad
    assert "test_check.py:" in report.first_bad
    assert report.max_loss_diff > 1e-3


@pytest.mark.parametrize("strategy", [(), DP, PARTS, [*DP, *PARTS]], ids=len)
def test_a_sum_with_its_weight_is_exact(strategy: list[Directive]) -> None:
    report = checked(job(loss=sum_and_weight, batches=[labelled(), labelled(seed=1)], strategy=strategy))
    assert (report.ok, report.first_bad, report.notes) == (True, None, ())
    assert max(report.max_loss_diff, report.max_grad_diff, report.max_param_diff) < 1e-12


def test_an_uneven_mean_on_one_device_is_what_it_is() -> None:
    assert checked(job(loss=mean_of_labels, batches=[labelled()])).ok


def test_even_rows_with_ignored_labels_pass() -> None:
    batch = {**labelled(), "labels": torch.randint(4, (8, 8)).index_fill(1, torch.tensor([0]), -100)}
    assert checked(job(loss=mean_of_labels, batches=[batch], strategy=[*DP, *PARTS])).ok


def test_a_loss_that_is_a_sum_is_named() -> None:
    def total(model: nn.Module, batch: Batch) -> Tensor:
        error: Tensor = (model(batch["x"]) - batch["y"]).square()
        return error.mean() * error.numel()  # a plain sum is refused by compile

    report = checked(job(loss=total, strategy=DP))
    assert not report.ok
    assert (
        "because the loss of the batch is not the mean of the losses of its slices: it is a sum, or"
        in str(report.first_bad)
    )


def test_a_mean_after_batch_norm_is_still_found_uneven() -> None:
    class Normed(Layers):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(self.norm(x.flatten(0, 1))).unflatten(0, x.shape[:2])
            return result

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

    report = checked(job(Normed, mean_of_labels, [labelled()], DP))
    assert not report.ok
    assert "the loss is a mean of uneven slices" in str(report.first_bad)


# Operations that mix samples.


def test_batch_norm_is_named_and_compared_with_the_same_slices() -> None:
    def between() -> nn.Module:
        return nn.BatchNorm1d(16)

    report = checked(job(lambda: Layers(between), strategy=[*DP, *PARTS]))
    assert report.ok, report
    (note,) = report.notes
    assert note.startswith("these operations mix samples, and see one slice of the batch at a time")
    assert "native_batch_norm of stages.0.1 (test_check.py:" in note
    told = "The same numbers as one device on the same slices, not on the whole batch: native_batch_norm of stages"
    assert report.verdict.startswith(told)
    assert checked(job(lambda: Layers(between))).verdict == "The same numbers as one device."
    assert checked(job(lambda: Layers(between))).notes == (), "one slice is the batch"


def test_a_load_balancing_loss_is_named() -> None:
    def balanced(model: nn.Module, batch: Batch) -> Tensor:
        shares = model(batch["x"]).softmax(-1)
        balance: Tensor = (shares.mean(0) * shares.mean(0)).sum()
        return F.mse_loss(shares, batch["y"]) + balance

    report = checked(job(loss=balanced, strategy=DP))
    assert report.ok, report
    assert "mul of the loss (test_check.py:" in report.notes[0]
    assert "not on the whole batch: mul of the loss" in report.verdict


class Masked(nn.Module):
    """Mixes samples in its norm, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        fixed = torch.arange(16, device=x.device) % 3 > 0
        scores = torch.full_like(x, -math.inf).masked_fill(fixed, 0.0) + x
        shares = scores.masked_fill(~fixed, -math.inf).softmax(-1).repeat(1, 2)[:, 16:]
        result: Tensor = self.norm(shares)
        return result


def test_what_holds_infinities_does_not_mix_samples() -> None:
    (note,) = checked(job(lambda: Layers(Masked), strategy=DP)).notes
    named = [each.partition(" of ")[0] for each in note.partition("accumulation: ")[2].split("; ")]
    assert set(named) == {"native_batch_norm"}, note


def test_a_buffer_that_counts_is_compared_with_the_same_slices() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(len(x))
            return torch.tanh(x)

    report = checked(job(lambda: Layers(Counts), strategy=DP))
    assert report.ok, report
    assert report.notes == (
        "these buffers hold what the first replica's slices wrote, as under DDP: stages.0.1.seen, "
        "stages.1.1.seen. The same slices in plain PyTorch agree",
    )
    assert "not on the whole batch: the first replica's slices write stages.0.1.seen" in report.verdict
    assert checked(job(lambda: Layers(Counts), strategy=PARTS)).notes == (), "one replica counts all"


# Types.


class Cancels(nn.Module):
    """Computes in float32, and carries its rounding far: of ten thousand times a gradient, one is left."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float().tanh()
        return (1e4 * y - 9999.0 * y).to(x.dtype)


def weighted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return (model(batch["x"]) - batch["y"]).square().sum(), batch["y"].new_tensor(0.37 * len(batch["y"]))


@pytest.mark.parametrize("strategy", [[], [*DP, *PARTS]], ids=["one device", "slices"])
def test_rounding_of_the_model_s_own_type_is_no_difference(strategy: list[Directive]) -> None:
    report = checked(job(lambda: Layers(Cancels), weighted, strategy=strategy))
    assert report.verdict == "The same numbers as one device."
    (note,) = report.notes
    assert note.startswith("these operations compute in float32: ")
    assert float(note.partition("agrees to ")[2].partition(",")[0]) > 1.2e-5, "more than one operation's"


class LastToken(nn.Module):
    """Reads the last token that is no padding, as mBART does: a batch of zeros has none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        last = tokens.gather(1, tokens.ne(0).sum(dim=1, keepdim=True) - 1)
        with annotate("PP"):
            x = F.dropout(self.table(last[:, 0]), 0.5)
        result: Tensor = self.head(x)
        return result


def test_values_that_a_chunk_cannot_run_on_do_not_stop_the_count_of_its_draws() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        squares: Tensor = model(batch["tokens"]).square().mean()
        return squares

    batch = {"tokens": torch.arange(1, 49).view(8, 6) % 7 + 1}
    report = checked(job(LastToken, loss, [batch, batch], strategy=[*DP, *PARTS]))
    assert report.verdict == "The same numbers as one device."


def test_weights_of_classes_in_another_type_are_named() -> None:
    def weighed(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"].argmax(-1), weight=torch.ones(4))

    with pytest.raises(ConfigError) as caught:
        checked(job(loss=weighed))
    assert "the loss fails in plain PyTorch" in str(caught.value)
    assert "weight.to(logits.dtype)" in caught.value.hint


def test_another_error_of_the_loss_in_fp64() -> None:
    def overflows(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"])
        masked = torch.zeros(4).masked_fill(torch.ones(4) > 0, torch.finfo(scores.dtype).min)
        result: Tensor = (scores + masked.clamp(min=0)).square().mean()
        return result

    with pytest.raises(ConfigError) as caught:
        checked(job(loss=overflows))
    assert caught.value.facts["why"].endswith("value cannot be converted to type float without overflow")
    assert "call the loss without Piper" in caught.value.hint


# Random numbers.


def dropped() -> nn.Module:
    return Layers(lambda: nn.Dropout(0.3))


@pytest.mark.parametrize(
    "strategy",
    [
        (),
        [*DP, *PARTS],
        [replicate(at(PP=0), [0, 1], zero=3), place(at(PP=1), [2]), *PARTS],
        [place(at(PP=0), [0]), replicate(at(PP=1), [1, 2]), *PARTS],
    ],
    ids=["one", "slices", "sizes", "sizes back"],
)
def test_dropout_is_replayed_on_the_whole_batch(strategy: list[Directive]) -> None:
    report = checked(job(dropped, strategy=strategy))
    assert report.ok, report
    assert report.notes == ()
    assert report.max_grad_diff < 1e-12


def test_batch_norm_and_dropout_on_one_device() -> None:
    def both() -> nn.Module:
        return Layers(lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.3)))

    report = checked(job(both))
    assert report.ok, report
    sliced = checked(job(both, strategy=[*DP, *PARTS]))
    assert sliced.ok, sliced
    assert "native_batch_norm" in sliced.notes[0]


def test_an_uneven_mean_with_dropout_is_found() -> None:
    report = checked(job(dropped, mean_of_labels, [labelled()], [*DP, *PARTS]))
    assert not report.ok
    assert "divides by 3, 7, 11, 15 on the slices" in str(report.first_bad)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randint(1000, (len(x),), device=x.device),
        lambda x: torch.randint(3, 1000, (len(x), 16), device=x.device),
        lambda x: torch.randint_like(x, 1000),
        lambda x: torch.randint(1, (len(x), 64), device=x.device).sum(1),  # all draws are equal
    ],
    ids=["high", "low and high", "like", "of one number"],
)
def test_whole_numbers_are_replayed_on_the_whole_batch(draw: Callable[[Tensor], Tensor]) -> None:
    """As the time steps of diffusion are drawn in its loss."""

    def noised(model: nn.Module, batch: Batch) -> Tensor:
        times = draw(batch["x"]).reshape(len(batch["x"]), -1).to(batch["x"].dtype)
        noise = torch.randn_like(batch["x"])
        return F.mse_loss(model(batch["x"] + noise * (1 + times / 1000)), batch["y"])

    report = checked(job(loss=noised, strategy=[*DP, *PARTS]))
    assert report.ok, report
    assert report.notes == ()
    assert report.max_grad_diff < 1e-12


def test_an_order_that_all_samples_share_is_compared_by_slice() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(16, device=x.device)]

    report = checked(job(lambda: Layers(Shuffled), strategy=PARTS))
    assert report.ok, report
    assert "does not draw one row for each sample" in report.notes[0]


def test_a_draw_that_all_samples_share_is_compared_by_slice() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(16, dtype=x.dtype, device=x.device)

    report = checked(job(lambda: Layers(Shared), strategy=PARTS))
    assert report.ok, report
    assert "does not draw one row for each sample" in report.notes[0]


def test_the_seed_of_a_draw_is_the_documented_one() -> None:
    program = compile(job(dropped, strategy=[*DP, *PARTS], seed=3), device="cpu")
    replay = Replay(program, slicing_of(program.plans), {}, {})
    # The first 63 bits of BLAKE2b("3/5/PP=1/MB=1/0"), by Python's hashlib.
    import hashlib

    wanted = int(hashlib.blake2b(b"3/5/PP=1/MB=1/0", digest_size=8).hexdigest(), 16) >> 1
    assert replay.seed(5, "PP=1", (("MB", 1),), 0) == wanted


# Optimizers, NaN, names, thresholds.


@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_optimizer_may_hold_some_of_the_parameters(clip: float | None) -> None:
    def matrices(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.dim() > 1], lr=0.1)

    given = [zoo.vectors(8, seed) for seed in range(3)]
    report = checked(job(batches=given, optimizer=matrices, strategy=DP, clip_norm=clip))
    assert report.ok, report


def test_nan_is_named_on_either_side() -> None:
    batches = [zoo.vectors(8, 0), {**zoo.vectors(8, 1), "y": torch.full((8, 4), math.nan)}]
    report = checked(job(batches=batches, strategy=DP))
    assert not report.ok
    assert report.max_loss_diff == math.inf
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert [*differences({"w": bad}, {"w": good})] == [("w", math.inf, "is NaN in the run")]
    assert [*differences({"w": good}, {"w": bad})] == [("w", math.inf, "is NaN in plain PyTorch")]
    both = "is NaN in the run and in plain PyTorch"
    assert [*differences({"w": bad}, {"w": bad})] == [("w", math.inf, both)]
    assert relative(math.nan, math.nan) == math.inf


def test_missing_names_and_other_shapes_are_differences() -> None:
    one = torch.ones(2)
    assert [*differences({}, {"w": one})] == [("w", math.inf, "is missing in the run")]
    assert [*differences({"w": one}, {})] == [("w", math.inf, "is in the run, but not in plain PyTorch")]
    shaped = [*differences({"w": torch.ones(3)}, {"w": one})]
    assert shaped == [("w", math.inf, "has the shape [3], in plain PyTorch [2]")]


def test_distances_are_relative_to_the_largest_element() -> None:
    assert distance(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0])) == 0.125
    assert distance(torch.tensor([0.5]), torch.tensor([0.0]), floor=2.0) == 0.25
    assert relative(3.0, 2.0) == 0.5
    assert distance(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf


@dataclass(frozen=True)
class Off:
    """A step whose loss is off by a factor."""

    loss: float
    grad_norm: float


@pytest.mark.parametrize(("factor", "ok"), [(1.0 + 2e-9, False), (1.0 + 0.5e-9, True), (1.0 - 2e-9, False)])
@pytest.mark.parametrize("what", ["loss", "grad", "param"])
def test_the_threshold_is_1e_9(factor: float, ok: bool, what: str) -> None:
    made = job(strategy=DP)

    @contextmanager
    def off(program: Any, options: Any) -> Any:  # noqa: ANN401
        with launch_inline(program, options) as run:
            step, gradients, state = run.step, run.gradients, run.state_dict

            def scaled(values: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
                scale = factor if what == kind else 1.0
                return {n: v * scale if n == "head.weight" else v for n, v in values.items()}

            def taken(batch: Batch) -> Off:
                result = step(batch)
                return Off(result.loss * (factor if what == "loss" else 1.0), result.grad_norm)

            run.step, run.gradients = taken, lambda: scaled(gradients(), "grad")  # type: ignore[method-assign, assignment]
            run.state_dict = lambda: scaled(state(), "param")  # type: ignore[method-assign]
            yield run

    report = check(compile(made, device="cpu"), off, [*made.data()])
    assert report.ok is ok
    diffs = {"loss": report.max_loss_diff, "grad": report.max_grad_diff, "param": report.max_param_diff}
    assert diffs[what] == pytest.approx(abs(factor - 1.0), rel=1e-3)
    if not ok:
        assert {"loss": "the loss", "grad": "the gradient of head.weight", "param": "head.weight"}[
            what
        ] in str(report.first_bad)
