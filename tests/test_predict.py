"""`run.predict` gives the rows that plain PyTorch gives in eval mode, in the order of the batch."""

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.directives import Directive
from piper.errors import CaptureError, ConfigError
from piper.job import Batch
from piper.models import causal
from piper.runtime.setup import Forward
from tests import zoo
from tests.runtime import divided
from tests.test_evaluation import four_devices, in_eval_mode, job, mean, rows


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch["x"])
    return logits


def tokens_of(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch["tokens"])
    return logits


def distance(got: Tensor, wanted: Tensor) -> float:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    return float((got - wanted).abs().max())


def plain_logits(run: piper.Run, batch: Batch) -> Tensor:
    with torch.no_grad():
        logits: Tensor = in_eval_mode(run.state_dict())(batch["x"].double())
    return logits


@pytest.mark.parametrize("on", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_the_rows_are_those_of_plain_pytorch(on: str) -> None:
    with piper.launch(piper.compile(job(four_devices(3))), on=on) as run:
        for seed in range(2):
            run.step(rows(8, seed))
            batch = rows(15, 10 + seed)  # 12 samples divide into 4 slices; the others run several times
            wanted = plain_logits(run, batch)
            assert distance(run.predict(batch, logits_of), wanted) < 1e-12


def test_microbatches_that_run_on_other_devices_keep_their_rows() -> None:
    ways = ((range(2), 0), (range(2, 4), 1))  # half of the microbatches go down the ranks, half go up
    homes = [(stage, parts, abs(way - stage)) for stage in range(2) for parts, way in ways]
    strategy = [
        piper.split(piper.at(), parts=4),
        *(piper.replicate(piper.at(PP=s, MB=m), [2 * r, 2 * r + 1], zero=1) for s, m, r in homes),
        *piper.schedules.dualpipe(2, 4),
    ]
    with piper.launch(piper.compile(job(strategy, data=lambda: [rows(16, 0)]))) as run:
        run.step(rows(16, 0))
        batch = rows(19, 1)
        assert distance(run.predict(batch, logits_of), plain_logits(run, batch)) < 1e-12


def test_any_type_and_shape_comes_back_for_each_sample() -> None:
    def chosen(model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model, batch).argmax(-1)

    def products(model: nn.Module, batch: Batch) -> Tensor:
        logits = logits_of(model, batch)
        return logits[:, :, None] * batch["x"][:, None, :]

    with piper.launch(piper.compile(job(four_devices(1)))) as run:
        batch = rows(8, 3)
        wanted = plain_logits(run, batch)
        assert torch.equal(run.predict(batch, chosen), wanted.argmax(-1))
        expected = wanted[:, :, None] * batch["x"].double()[:, None, :]
        assert distance(run.predict(batch, products), expected) < 1e-12


def test_a_prediction_changes_no_step_and_is_compiled_once() -> None:
    program = piper.compile(job(four_devices(2)))
    losses: list[list[float]] = []
    for predicts in (False, True):
        with piper.launch(program) as run:
            losses.append([])
            for seed in range(3):
                losses[-1].append(run.step(rows(8, seed)).loss)
                if predicts:
                    run.predict(rows(8, 9), logits_of)
                    evaluated = run.evaluate([rows(8, 9)])
                    assert evaluated.samples == 8
            assert run.session.preparations == (2 if predicts else 0)
    assert losses[0] == losses[1]


def exact_rope(length: int, head_dim: int, base: float, like: Tensor) -> Tensor:
    """Return the decoder's rotation of each position in float64, from start to end."""
    steps = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float64) / head_dim
    angles = torch.arange(length, device=like.device, dtype=torch.float64)[:, None] / base**steps
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


SHARDED: dict[str, Callable[[divided.Model], list[Directive]]] = {
    "tp": lambda model: [*divided.tensor(model), piper.split(piper.at(), parts=2)],
    "tp x dp, zero 3": lambda model: [*divided.zero(model, 3), piper.split(piper.at(), parts=2)],
    "cp": lambda model: divided.context(),
    "cp, zigzag": lambda model: divided.context(2, "ring", "zigzag"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in SHARDED])
def test_sharded_regions_give_whole_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the decoder's own angles, in float32, a trace and plain PyTorch agree to 1e-10 only.
    monkeypatch.setattr(causal, "rope", exact_rope)
    case, model = zoo.case("sum_weight"), divided.MODELS["decoder"]()
    made = piper.Job(
        model=lambda: model.build(1),
        loss=case.loss,
        data=lambda: [case.batch(8, 0)],
        strategy=SHARDED[name](model),
        precision="fp64",
    )
    assert compared(made, case.batch(11, 1)) < 1e-12


def compared(made: piper.Job, batch: Batch) -> float:
    """Train a step, predict, and return how far the logits are from plain PyTorch's."""
    with piper.launch(piper.compile(made)) as run:
        next(run.train(1))
        got, state = run.predict(batch, tokens_of), run.state_dict()
    plain = made.model().double()
    plain.load_state_dict(state)
    plain.eval()
    with torch.no_grad():
        return distance(got, tokens_of(plain, batch))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.down(torch.tanh(self.up(x)))
        return [self.first(x), self.second(x)]


@pytest.mark.parametrize("level", [0, 3])
def test_a_forward_may_use_fewer_parameters_of_a_sharded_region_than_training_does(level: int) -> None:
    def first(model: nn.Module, batch: Batch) -> Tensor:
        head: Tensor = model(batch["x"])[0]
        return head

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        left, right = model(batch["x"])
        distance: Tensor = (left - right).square().mean()
        return distance

    devices, draws = range(4), torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    strategy = [
        piper.replicate(piper.at(), devices, zero=level),
        piper.shard(piper.at(), devices, 2, axis="TP", weights={"up": 0, "down": 1}),
    ]
    made = piper.Job(
        model=TwoHeads, loss=loss, data=lambda: [{"x": draws}], strategy=strategy, precision="fp64"
    )
    with piper.launch(piper.compile(made)) as run:
        next(run.train(1))
        got, state = run.predict({"x": draws[:7]}, first), run.state_dict()
    plain = TwoHeads().double()
    plain.load_state_dict(state)
    with torch.no_grad():
        assert distance(got, first(plain, {"x": draws[:7].double()})) < 1e-12


def test_a_result_without_a_row_for_each_sample_is_refused() -> None:
    wrong: Sequence[tuple[Callable[[nn.Module, Batch], object], str]] = (
        (mean, "a tensor of shape []"),
        (lambda model, batch: logits_of(model, batch).T, "a tensor of shape [5, 8]"),
        (lambda model, batch: {"logits": logits_of(model, batch)}, "dict"),
    )
    with piper.launch(piper.compile(job())) as run:
        for forward, got in wrong:
            with pytest.raises(CaptureError) as error:
                run.predict(rows(8, 0), cast(Forward, forward))
            assert error.value.what == "a prediction is not a tensor with a row for each sample"
            assert error.value.facts["got"] == got
        with pytest.raises(ConfigError, match="predict: a batch is not a dict of tensors"):
            run.predict({}, logits_of)
        assert len(run.predict(rows(3, 0), logits_of)) == 3


def test_an_evaluation_still_refuses_a_loss_that_is_not_a_number() -> None:
    evaluate = piper.Evaluate(data=lambda: [rows(8, 5)], metrics=logits_of)
    program = piper.compile(job(evaluate=evaluate))
    with piper.launch(program) as run, pytest.raises(CaptureError, match="the loss is not a loss"):
        run.evaluate()
