"""Callbacks see every step and evaluation, can stop a training, and survive a resume bit for bit."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import piper
from piper.callbacks import (
    EMA,
    Averaged,
    BestCheckpoint,
    Callback,
    EarlyStopping,
    Numbers,
    Running,
    StepNumbers,
    WeightsAndBiases,
    named_callbacks,
)
from piper.checkpoint.metadata import read_record
from piper.errors import ConfigError
from piper.train.train_command import train_recipe
from piper.train.train_options import TrainOptions
from piper.workers.results import StepResult
from tests import plain

PAIR = [piper.replicate(piper.at(), [0, 1], zero=3)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))}


def job(callbacks: Sequence[Callback] = (), **options: object) -> piper.Job:
    given: dict[str, object] = {"steps": 6, "strategy": PAIR, "optimizer": plain.sgd, **options}
    evaluate = piper.Evaluate(data=lambda: [rows(99)], every=2)
    return piper.Job(
        model=Net,
        loss=loss,
        data=lambda: [rows(seed) for seed in range(20)],
        precision="fp64",
        evaluate=evaluate,
        callbacks=callbacks,
        **given,  # type: ignore[arg-type]
    )


class Notes(Callback):
    """Writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        self.seen.append(f"step {step}")

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        self.seen.append(f"evaluate {step}")

    def on_save(self, run: Running, step: int, path: Path) -> None:
        self.seen.append(f"save {step} {path.name}")

    def on_end(self, run: Running, step: int) -> None:
        self.seen.append(f"end {step}")


def test_an_iterator_that_compile_would_begin_is_refused() -> None:
    shared = iter([rows(seed) for seed in range(60)])
    sources: list[Callable[[], Iterator[dict[str, Tensor]]]] = [
        lambda: shared,
        lambda: map(dict, shared),
        lambda: (dict(batch) for batch in shared),
        lambda: map(itemgetter(1), zip(count(), islice(shared, 4), strict=False)),
    ]
    for data in sources:
        with pytest.raises(ConfigError) as error:
            piper.compile(replace(job(), data=data))
        assert "data() returns the same iterator each time" in str(error.value)

    def fresh() -> Iterator[dict[str, Tensor]]:
        yield from (rows(seed) for seed in range(3))

    with piper.launch(piper.compile(replace(job(), data=fresh))) as run:
        losses = [result.loss for result in run.train(5)]
    with piper.launch(piper.compile(replace(job(), data=lambda: [*fresh()]))) as run:
        assert [result.loss for result in run.train(5)] == losses


class StopAt(Callback):
    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        if step == 3:
            run.stop()


def test_callbacks_run_after_steps_and_evaluations_and_at_the_end() -> None:
    notes = Notes()
    with piper.launch(piper.compile(job([notes]))) as run:
        assert len(list(run.train(3))) == 3
    assert notes.seen == ["step 1", "step 2", "evaluate 2", "step 3", "evaluate 3", "end 3"]


def test_a_callback_stops_the_training() -> None:
    with piper.launch(piper.compile(job([StopAt()]))) as run:
        assert len(list(run.train())) == 3
        assert len(list(run.train(2))) == 2  # a second call goes on


class Numbered:
    """An evaluation with given numbers."""

    def __init__(self, loss: float, **metrics: float) -> None:
        self.loss, self.metrics = loss, metrics


class Recorded:
    """A run that notes what callbacks ask of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stop(self) -> None:
        self.asked.append("stop")

    def resize(self, devices: int) -> None:
        self.asked.append(f"resize {devices}")

    folder = Path("runs/a")

    def save(self, path: Path | str, **options: object) -> None:
        self.asked.append(f"save {path}")

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        return {}


def test_early_stopping_waits_for_its_patience() -> None:
    stopping, run = EarlyStopping(patience=2), Recorded()
    for step, value in enumerate([3.0, 2.0, 2.5, 1.0, 1.0, float("nan")]):
        stopping.on_evaluate(run, step, Numbered(value))
        assert run.asked == (["stop"] if step == 5 else []), step
    assert stopping.state_dict() == {"best": 1.0, "step": 3, "waited": 2}


def test_early_stopping_can_ask_for_more_of_a_metric() -> None:
    stopping, run = EarlyStopping("accuracy", mode="max", patience=1, least=0.1), Recorded()
    stopping.on_evaluate(run, 1, Numbered(0.0, accuracy=0.5))
    stopping.on_evaluate(run, 2, Numbered(0.0, accuracy=0.55))
    assert run.asked == ["stop"]
    with pytest.raises(ConfigError) as error:
        stopping.on_evaluate(run, 3, Numbered(0.0))
    assert error.value.what == "there is no metric 'accuracy'"


def test_the_best_checkpoint_is_saved() -> None:
    best, run = BestCheckpoint("best"), Recorded()
    for step, value in enumerate([3.0, 4.0, 2.0]):
        best.on_evaluate(run, step, Numbered(value))
    assert run.asked == ["save runs/a/best", "save runs/a/best"]
    absolute = BestCheckpoint(Path("/elsewhere"))
    absolute.on_evaluate(run, 3, Numbered(1.0))
    assert run.asked[2:] == ["save /elsewhere"]
    assert best.state_dict() == {"best": 2.0, "step": 2}


def test_callbacks_of_one_class_have_names_of_their_own() -> None:
    found = named_callbacks([EarlyStopping(), StopAt(), EarlyStopping("accuracy")])
    assert list(found) == ["EarlyStopping", "StopAt", "EarlyStopping.1"]


def test_an_average_is_that_of_plain_pytorch() -> None:
    ema = EMA(0.75)
    with piper.launch(piper.compile(job([ema]))) as run:
        list(run.train(3))
        got = ema.averages(run)
    torch.manual_seed(0)
    model = Net().double()
    optimizer = plain.sgd(model.parameters())
    wanted: dict[str, Tensor] = {}
    for seed in range(3):
        optimizer.zero_grad()
        loss(model, {"x": rows(seed)["x"].double()}).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            wanted[name] = 0.75 * wanted[name] + 0.25 * value if name in wanted else value.clone()
    assert plain.largest_difference(wanted, got) < 1e-12


def test_a_job_made_from_another_one_averages_once_with_its_own_decay() -> None:
    again = replace(job([EMA(0.9)]), callbacks=[EMA(0.5)], steps=2)
    assert again.optimizer == Averaged(make=job().optimizer, decay=0.5)


def test_averages_and_counts_survive_a_resume_bit_for_bit(tmp_path: Path) -> None:
    def made() -> tuple[EMA, EarlyStopping, BestCheckpoint, piper.Job]:
        ema, early, best = EMA(0.9), EarlyStopping(patience=9), BestCheckpoint(tmp_path / "best")
        return ema, early, best, job([ema, early, best])

    ema, early, best, whole = made()
    program = piper.compile(whole)
    with piper.launch(program) as run:
        list(run.train(6))
        wanted, counts, saved = ema.averages(run), early.state_dict(), best.state_dict()
    assert read_record(tmp_path / "best").step == saved["step"]
    first = made()
    with piper.launch(piper.compile(first[-1])) as run:
        list(run.train(4))
        run.save(tmp_path / "half", data={"kept": 1})
    ema, early, best, rest = made()
    alone = replace(rest, strategy=[])  # under another strategy
    with piper.launch(piper.compile(alone), resume=tmp_path / "half") as run:
        list(run.train(2))
        assert plain.largest_difference(wanted, ema.averages(run)) < 1e-15
    ema, early, best, rest = made()
    with piper.launch(piper.compile(rest), resume=tmp_path / "half") as run:
        list(run.train(2))
        assert plain.largest_difference(wanted, ema.averages(run)) == 0.0
    assert early.state_dict() == counts
    assert best.state_dict() == saved


RECIPE = """
import piper
from tests.test_callbacks import Notes, job

NOTES = Notes()

def small():
    return job([NOTES, piper.callbacks.EarlyStopping(patience=9)], steps=4, checkpoint=piper.Checkpoint(folder="saved", every=2))
"""


def test_training_from_the_command_line_evaluates_and_resumes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    asked = {"recipe": f"{recipe}:small", "on": "inline", "out": tmp_path / "out"}
    console = Console(width=120, record=True, quiet=True)
    train_recipe(TrainOptions(**asked, steps=2), console)  # type: ignore[arg-type]
    train_recipe(TrainOptions(**asked, resume=True), console)  # type: ignore[arg-type]
    lines = (tmp_path / "out" / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]
    assert set(json.loads(lines[0])) == {"step", "loss", "metrics", "samples", "batches"}


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    """A run that was killed after step 3 wrote of steps that the resumed run takes again."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = cast(Running, SimpleNamespace())
    for steps in ((1, 2, 3, 4, 5), (4,)):
        board = piper.callbacks.TensorBoard(tmp_path)
        for step in steps:
            board.on_step(run, step, StepResult(loss=5 / step, grad_norm=1.25, metrics={"right": 0.5}))
        board.on_end(run, steps[-1])
        time.sleep(1.1)  # files are read in the order of their names: the second, then a count without zeros
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/grad_norm", "train/loss", "train/right"]
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(5 / step)) for step in (1, 2, 3, 4)]


def test_numbers_go_to_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[object, int]] = []
    run = SimpleNamespace(
        log=lambda numbers, step: logged.append((numbers, step)), finish=lambda: logged.append(("end", 0))
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    callback = WeightsAndBiases(project="mine")
    callback.on_evaluate(Recorded(), 3, Numbered(1.5, accuracy=0.5))
    callback.on_end(Recorded(), 3)
    assert logged == [({"evaluate/loss": 1.5, "evaluate/accuracy": 0.5}, 3), ("end", 0)]


def test_a_callback_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        job([print])  # type: ignore[list-item]
    assert error.value.what == "callbacks[0] is builtin_function_or_method, not a callback"
    with pytest.raises(ConfigError, match=r"decay=1\.5"):
        EMA(1.5)
    with pytest.raises(ConfigError, match="patience=0"):
        EarlyStopping(patience=0)
    with pytest.raises(ConfigError, match="there is no mode 'up'"):
        BestCheckpoint("best", mode="up")  # type: ignore[arg-type]
