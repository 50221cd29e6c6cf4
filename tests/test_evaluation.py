"""`run.evaluate` gives the loss and the metrics that plain PyTorch gives in eval mode."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.compiler import Program
from piper.directives import Directive
from piper.errors import CaptureError, ConfigError
from piper.models import decoder
from piper.plan.memory_timeline import timeline
from piper.run.session import pieces_of
from tests import plain, zoo
from tests.runtime import divided

Batch = Mapping[str, Tensor]


class Net(nn.Module):
    """Two stages with everything that differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            h = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        with piper.annotate("PP"):
            logits: Tensor = self.last(h)
            return logits


def measured(
    model: nn.Module, batch: Batch
) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor | float]]]:
    """A sum with its weight, which some samples do not count in, and two metrics."""
    logits = model(batch["x"])
    counts = batch["y"] != 4
    each = F.cross_entropy(logits, batch["y"], reduction="none") * counts
    right = (logits.argmax(-1) == batch["y"]) & counts
    metrics: dict[str, tuple[Tensor, Tensor | float]] = {
        "accuracy": (right.sum(), counts.sum()),
        "size": (logits.square().sum(), len(logits)),
    }
    return (each.sum(), counts.sum()), metrics


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def rows(samples: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 6, generator=rng),
        "y": torch.randint(0, 5, (samples,), generator=rng),
    }


def four_devices(zero: int) -> list[Directive]:
    at = piper.at
    return [
        *(piper.replicate(at(PP=i), [2 * i, 2 * i + 1], zero=zero) for i in range(2)),
        piper.split(at(), parts=2),
        *piper.schedules.one_f_one_b(2, 2),
    ]


def job(strategy: Sequence[Directive] = (), **options: object) -> piper.Job:
    given = {"loss": measured, "data": lambda: [rows(8, seed) for seed in range(4)], **options}
    return piper.Job(model=Net, strategy=strategy, precision="fp64", optimizer=plain.sgd, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def program() -> Program:
    return piper.compile(job(four_devices(3)))


@pytest.fixture
def run(program: Program) -> Iterator[piper.Run]:
    with piper.launch(program) as run:
        yield run


def in_eval_mode(state: Mapping[str, Tensor]) -> nn.Module:
    model = Net().double().eval()
    model.load_state_dict(state)
    return model


def test_the_result_is_that_of_plain_pytorch(run: piper.Run) -> None:
    trained = [run.step(rows(8, seed)) for seed in range(2)]
    batches = [rows(8, 10), rows(8, 11), rows(5, 12)]  # the last one does not divide into 4 slices
    got = run.evaluate(batches)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "y")}
    model = in_eval_mode(run.state_dict())
    with torch.no_grad():
        logits = model(whole["x"].double())
    counts = whole["y"] != 4
    right = (logits.argmax(-1) == whole["y"]) & counts
    assert got.loss == pytest.approx(float(F.cross_entropy(logits[counts], whole["y"][counts])), abs=1e-12)
    assert got.metrics["accuracy"] == pytest.approx(int(right.sum()) / int(counts.sum()), abs=1e-12)
    assert got.metrics["size"] == pytest.approx(float(logits.square().sum()) / 21, abs=1e-12)
    assert (got.samples, got.batches) == (21, 3)
    assert all(0 <= result.metrics["accuracy"] <= 1 for result in trained)


def test_evaluation_changes_nothing(run: piper.Run) -> None:
    run.step(rows(8, 0))
    before = run.state_dict()
    first = run.evaluate([rows(8, 1)])
    assert run.evaluate([rows(8, 1)]) == first
    assert plain.largest_difference(before, run.state_dict()) == 0.0
    after = run.step(rows(8, 2)).loss
    assert run.evaluate([rows(8, 1)]).loss != first.loss
    assert math.isfinite(after)


def test_an_evaluation_leaves_the_steps_after_it_as_they_would_be(program: Program) -> None:
    losses = []
    for evaluates in (False, True):
        with piper.launch(program) as run:
            found = []
            for seed in range(3):
                found.append(run.step(rows(8, seed)).loss)
                if evaluates:
                    run.evaluate([rows(8, 9)])
            losses.append(found)
    assert losses[0] == losses[1]


def test_its_plans_only_run_forward(program: Program) -> None:
    evaluation = program.evaluation(rows(8, 1))
    ops = {ins.op for plan in evaluation.plans for ins in plan.instrs}
    assert ops == {"gather", "load", "compute", "send", "recv", "accumulate", "norm", "total"}
    computed = {ins.computes.phase for plan in evaluation.plans for ins in plan.instrs if ins.op == "compute"}
    assert computed == {"F"}
    assert not any(slot.kind in ("saved", "kept") for plan in evaluation.plans for slot in plan.slots)


def peak(program: Program) -> int:
    return max(timeline(plan).peak for plan in program.plans)


def test_it_needs_half_the_memory_of_training() -> None:
    wide = {"data": lambda: [rows(256, 0)]}  # activations count here, as in real models
    trained = piper.compile(job(four_devices(3), **wide))
    evaluation = trained.evaluation(rows(256, 1))
    assert [plan.devices for plan in evaluation.plans] == [plan.devices for plan in trained.plans]
    assert peak(evaluation) <= peak(trained) / 2


@pytest.mark.slow
def test_a_decoder_needs_half_the_memory_of_training() -> None:
    case = zoo.case("decoder")
    trained = piper.compile(
        piper.Job(
            model=case.model,
            loss=case.loss,
            data=lambda: [case.batch(8, 0)],
            strategy=four_devices(3),
            precision="fp64",
        )
    )
    evaluation = trained.evaluation(case.batch(8, 1))
    assert peak(evaluation) <= peak(trained) / 2


def test_mean_losses_count_by_the_samples_of_a_batch() -> None:
    with piper.launch(piper.compile(job(loss=mean))) as run:
        batches = [rows(8, 3), rows(2, 4)]
        got = run.evaluate(batches)
        model = in_eval_mode(run.state_dict())
    each = [mean(model, {"x": b["x"].double(), "y": b["y"]}).item() for b in batches]
    assert got.loss == pytest.approx((each[0] * 8 + each[1] * 2) / 10, abs=1e-12)
    assert got.metrics == {}


def test_a_job_says_what_is_evaluated_and_how() -> None:
    evaluate = piper.Evaluate(data=lambda: [rows(8, 5)], every=2, metrics=measured)
    with piper.launch(piper.compile(job(loss=mean, evaluate=evaluate))) as run:
        assert run.step(rows(8, 0)).metrics == {}
        assert set(run.evaluate().metrics) == {"accuracy", "size"}


def test_a_sample_is_in_one_piece_and_copies_fill_the_slices() -> None:
    batch = {"x": torch.arange(11)}
    pieces = [(p.batch["x"].tolist(), p.samples, p.copies) for p in pieces_of(batch, 4)]
    assert pieces == [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, 1),
        ([8, 9, 8, 9], 2, 2),
        ([10, 10, 10, 10], 1, 4),
    ]


def test_no_batch_is_an_error(run: piper.Run) -> None:
    with pytest.raises(ConfigError) as error:
        run.evaluate([])
    assert str(error.value) == "evaluate: there is no batch to evaluate on\n  hint: give at least one batch"
    with pytest.raises(ConfigError) as error:
        run.evaluate()
    assert str(error.value) == (
        "evaluate: there are no batches to evaluate on\n"
        "  hint: give them: run.evaluate(batches); or let the job have some: "
        "piper.Job(..., evaluate=piper.Evaluate(data=...))"
    )
    with pytest.raises(ConfigError) as error:
        run.evaluate([{"x": torch.zeros(4, 6), "y": torch.zeros(3)}])
    assert str(error.value) == (
        "evaluate: the fields of a batch disagree on the number of samples\n"
        "  x:    4 samples\n"
        "  y:    3 samples\n"
        "  hint: the first axis of every field is the samples"
    )


def test_a_metric_without_a_weight_is_refused() -> None:
    with pytest.raises(CaptureError) as error:
        piper.compile(job(loss=lambda model, batch: (mean(model, batch), {"accuracy": batch["y"].sum()})))
    assert error.value.what == "the metric 'accuracy' is not a pair (sum, weight)"


class OnlyEvaluated(Net):
    """A model with a buffer that only eval mode reads."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((5,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.training else logits + self.shift * torch.arange(5)


def test_a_buffer_that_only_evaluation_reads_has_its_value() -> None:
    made = piper.Job(model=OnlyEvaluated, loss=mean, data=lambda: [rows(8, 0)], precision="fp64")
    with piper.launch(piper.compile(made)) as run:
        got = run.evaluate([rows(8, 1)]).loss
        model = OnlyEvaluated().double().eval()
        model.load_state_dict(run.state_dict())
    assert got == pytest.approx(mean(model, {"x": rows(8, 1)["x"].double(), "y": rows(8, 1)["y"]}).item())


def compared(job: piper.Job, batches: Sequence[Batch], on: str = "inline") -> float:
    """Train a step, evaluate, and return how far the loss is from plain PyTorch's."""
    total = weights = 0.0
    with piper.launch(piper.compile(job), on=on) as run:
        next(run.train(1))
        got = run.evaluate(batches).loss
        state = run.state_dict()
    model = job.model().double()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            fields = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            found: Any = job.loss(model, fields)
            found = found[0] if isinstance(found, tuple) and isinstance(found[1], dict) else found
            samples = len(next(iter(batch.values())))
            summed, weight = found if isinstance(found, tuple) else (found * samples, samples)
            total, weights = total + float(summed), weights + float(weight)
    return abs(got - total / weights)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["decoder", "sum_weight", "convnet", "dropout", "frozen_stage"])
def test_every_level_of_zero_equals_plain_pytorch(name: str, zero: int) -> None:
    case = zoo.case(name)
    made = piper.Job(
        model=case.model,
        loss=case.loss,
        data=lambda: [case.batch(8, 0)],
        strategy=four_devices(zero),
        precision="fp64",
    )
    assert compared(made, [case.batch(8, 1), case.batch(6, 2)]) < 1e-9


@pytest.mark.slow
def test_expert_parallelism_equals_plain_pytorch() -> None:
    case = zoo.case("moe")
    strategy = [
        *four_devices(2),
        *(piper.shard(piper.at(PP=i, EP="*"), [2 * i, 2 * i + 1]) for i in range(2)),
    ]
    made = piper.Job(
        model=case.model, loss=case.loss, data=lambda: [case.batch(8, 0)], strategy=strategy, precision="fp64"
    )
    assert compared(made, [case.batch(8, 1), case.batch(3, 2)]) < 1e-9


def with_metrics(model: nn.Module, batch: Batch) -> tuple[Any, dict[str, tuple[Tensor, float]]]:
    found = decoder.token_loss(model, batch)
    return found, {"twice": (2 * found[0], 1.0)}


@pytest.mark.slow
def test_tensor_parallelism_equals_plain_pytorch() -> None:
    case, model = zoo.case("sum_weight"), divided.MODELS["decoder"]()
    made = piper.Job(
        model=lambda: model.build(1),
        loss=with_metrics,
        data=lambda: [case.batch(8, 0)],
        strategy=[*divided.zero(model, 3), piper.split(piper.at(), parts=2)],
        precision="fp64",
    )
    assert compared(made, [case.batch(8, 1), case.batch(3, 2)]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("on", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_processes_give_the_same(on: str) -> None:
    assert compared(job(four_devices(3)), [rows(8, 1), rows(5, 2)], on) < 1e-9
