"""`run.train()`, a script's own loop and `piper train` give the same batches and weights, also after a resume."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import piper
from piper.callbacks import Callback, Running, StepNumbers
from piper.compiler import Program, compile
from piper.data import TokenFile
from piper.errors import ConfigError
from piper.train.train_command import train_recipe
from piper.train.train_options import TrainOptions
from tests.workers.test_torchrun import torchrun

Way = Literal["train", "own loop", "command"]
WAYS: tuple[Way, ...] = ("train", "own loop", "command")
STEPS, STOP = 5, 3
NOTES = "notes.txt"


class Rows(Dataset[dict[str, Tensor]]):
    """Samples with noise that is drawn where they are loaded, in worker processes too."""

    def __len__(self) -> int:
        return 17  # four batches: the fifth is of the next epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((6,), float(index)) + torch.randn(6)}


def loader(folder: Path) -> Iterable[Mapping[str, Tensor]]:
    return DataLoader(Rows(), batch_size=4, shuffle=True, drop_last=True, num_workers=2)


def stateful(folder: Path) -> Iterable[Mapping[str, Tensor]]:
    made = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [{"x": torch.full((6,), float(index))} for index in range(17)]
    found: Iterable[Mapping[str, Tensor]] = made.StatefulDataLoader(
        rows, batch_size=4, shuffle=True, drop_last=True
    )
    return found


class Floats(TokenFile):
    """Tokens as the model here takes them."""

    def at(self, step: int) -> dict[str, Tensor]:
        return {"x": super().at(step)["tokens"].float()}


def tokens(folder: Path) -> Iterable[Mapping[str, Tensor]]:
    path = folder / "tokens.bin"
    if not path.exists():  # another rank may have it mapped, and must not see it shrink
        np.arange(9 * 6 + 1, dtype=np.uint16).tofile(path)
    return Floats(path, length=6, batch=4, seed=3)


KINDS = {"loader": loader, "stateful": stateful, "tokens": tokens}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, float]]]:
    """The metric names the batch: no two batches have the same."""
    x = batch["x"]
    return model(x).square().mean(), {"batch": ((x * x.sin()).sum(), 1.0)}


class Noted(Callback):
    """Writes down every step and every checkpoint, in the current folder."""

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        self._write(f"step {step} {result.loss!r} {result.grad_norm!r} {result.metrics['batch']!r}")

    def on_save(self, run: Running, step: int, path: Path) -> None:
        self._write(f"save {step} {path.name}")

    def on_end(self, run: Running, step: int) -> None:
        self._write(f"end {step}")

    def _write(self, line: str) -> None:
        with Path(NOTES).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def make(kind: str, data: Path, steps: int = STEPS) -> piper.Job:
    return piper.Job(
        model=Net,
        loss=loss,
        data=partial(KINDS[kind], data),
        strategy=[piper.replicate(piper.at(), [0, 1], zero=1)],
        evaluate=piper.Evaluate(data=lambda: [{"x": torch.ones(2, 6)}], every=2),
        checkpoint=piper.Checkpoint(folder="checkpoints", every=2, keep=9),
        callbacks=[Noted()],
        steps=steps,
    )


@cache
def compiled(kind: str, data: Path) -> Program:
    return compile(make(kind, data))


def command(kind: str, data: Path, steps: int, on: str, resume: bool) -> None:
    recipe = data / f"{kind}.py"
    lines = [
        "from pathlib import Path",
        "from tests.train.test_one_loop import make",
        f"def job(): return make({kind!r}, Path({str(data)!r}))",
    ]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    asked = TrainOptions(recipe=f"{recipe}:job", on=on, out=Path("."), steps=steps, resume=resume)
    train_recipe(asked, Console(quiet=True))


def script(way: Way, kind: str, data: Path, steps: int, on: str, resume: bool) -> None:
    """A script of the user's, in the folder that its checkpoints go to."""
    program = replace(compiled(kind, data), job=make(kind, data, steps))
    with piper.launch(program, on=on, resume="." if resume else None) as run:
        if way == "train":
            assert all(result.loss > 0 for result in run.train())
            return
        for batch in run.batches():
            result = run.step(batch)
            run.after_step(run.done, result, steps)
        run.after_training(run.done)


Part = tuple[int, str]  # the step up to which a launch trains, and its launcher


def trained(
    way: Way, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *parts: Part
) -> tuple[list[str], dict[str, Tensor]]:
    """Train up to each of some steps, by a launch each. Return the notes and the state at the end."""
    name = f"{way}-{kind}-{len(parts)}".replace(" ", "-")
    folder, data = tmp_path / name, tmp_path / "data"
    folder.mkdir()
    data.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    torch.manual_seed(len(name))  # what the process has drawn before does not matter
    for number, (steps, on) in enumerate(parts):
        if way == "command":
            command(kind, data, steps, on, resume=number > 0)
        else:
            script(way, kind, data, steps, on, resume=number > 0)
    return noted(folder), saved(folder, parts[-1][0])


def noted(folder: Path) -> list[str]:
    return (folder / NOTES).read_text(encoding="utf-8").splitlines()


def steps_of(notes: list[str]) -> list[str]:
    return [line for line in notes if line.startswith("step")]


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    files = sorted((folder / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))
    return {f"{file.name} {key}": value for file in files for key, value in load_file(file).items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", KINDS)
def test_the_three_ways_are_the_run_that_was_not_stopped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch by batch and weight by weight. Each of the three stops after step 3 and is resumed."""
    notes, state = trained("train", kind, tmp_path, monkeypatch, (STEPS, "inline"))
    assert [line.split()[1] for line in steps_of(notes)] == [str(n) for n in range(1, STEPS + 1)]
    assert [line for line in notes if not line.startswith("step")] == [
        "save 2 step-00000002",
        "save 4 step-00000004",
        "save 5 step-00000005",
        "end 5",
    ]
    assert len({line.split()[-1] for line in steps_of(notes)}) == STEPS, "no batch twice"
    for way in WAYS if kind == "loader" else WAYS[:2]:  # all of them: `test_every_launcher_gives_the_same`
        again, weights = trained(way, kind, tmp_path, monkeypatch, (STOP, "inline"), (STEPS, "inline"))
        assert steps_of(again) == steps_of(notes), way
        assert [line for line in again if line.startswith(("save", "end"))] == [
            "save 2 step-00000002",
            "save 3 step-00000003",
            "end 3",
            "save 4 step-00000004",
            "save 5 step-00000005",
            "end 5",
        ]
        assert same(weights, state), way


def test_a_run_goes_on_with_another_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, state = trained("train", "tokens", tmp_path, monkeypatch, (STEPS, "inline"))
    again, weights = trained("train", "tokens", tmp_path, monkeypatch, (STOP, "inline"), (STEPS, "local"))
    assert steps_of(again) == steps_of(notes)
    assert same(weights, state)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on", ["inline", "local"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_launcher_gives_the_same(
    kind: str, on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, state = trained("train", kind, tmp_path, monkeypatch, (STEPS, "inline"))
    for way in WAYS:
        parts = ((STOP, on), (STEPS, on)) if on != "inline" else ((2, on), (3, on), (STEPS, on))
        again, weights = trained(way, kind, tmp_path, monkeypatch, *parts)
        assert steps_of(again) == steps_of(notes), way
        assert same(weights, state), way


@pytest.mark.ray
@pytest.mark.timeout(300)  # two clusters are started
def test_ray_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, state = trained("train", "tokens", tmp_path, monkeypatch, (STEPS, "inline"))
    again, weights = trained("train", "tokens", tmp_path, monkeypatch, (STOP, "ray"), (STEPS, "ray"))
    assert steps_of(again) == steps_of(notes)
    assert same(weights, state)


SCRIPT = """
import os, sys
from pathlib import Path
import piper
from tests.train.test_one_loop import make

kind, data, steps, resume = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
program = piper.compile(make(kind, data, steps))
with piper.launch(program, on="local", resume="." if resume else None) as run:
    losses = [result.loss for result in run.train()]
    assert run.done == steps and len(run.state_dict()) == 4, os.environ["RANK"]
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_torchrun_give_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, state = trained("train", kind, tmp_path, monkeypatch, (STEPS, "inline"))
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    for steps, resume in ((STOP, "first"), (STEPS, "resume")):
        words = ("script.py", kind, str(tmp_path / "data"), str(steps), resume)
        done = torchrun(*words, folder=folder)
        assert done.returncode == 0, done.stderr
    assert steps_of(noted(folder)) == steps_of(notes), "rank 0 alone writes"
    assert same(saved(folder, STEPS), state)


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program whose first four steps are saved in the current folder."""
    monkeypatch.chdir(tmp_path)
    program = compiled("tokens", tmp_path)
    with piper.launch(program) as run:
        list(run.train(4))
    return program


def test_checkpoints_of_another_run_are_refused_before_the_first_step(twice: Program) -> None:
    with piper.launch(twice) as run, pytest.raises(ConfigError) as error:
        next(run.train())
    assert error.value.what == "this folder holds the checkpoints of another run"
    with piper.launch(twice, resume="checkpoints/step-00000002") as run, pytest.raises(ConfigError) as error:
        next(run.train())
    assert error.value.facts == {"newest": "step-00000004"}, "of later steps"
    assert len(steps_of(noted(Path()))) == 4


def test_a_damaged_checkpoint_is_passed_over(twice: Program, caplog: pytest.LogCaptureFixture) -> None:
    next(Path("checkpoints/step-00000004").glob("*.safetensors")).write_bytes(b"nothing")
    with piper.launch(twice, resume="checkpoints") as run:
        assert (run.done, run.folder) == (2, Path.cwd())
        assert len(list(run.train())) == STEPS - 2
    assert any("using checkpoints/step-00000002 instead" in line for line in caplog.messages)


def test_a_run_without_checkpoints_yet_starts_at_the_first_step(twice: Program, tmp_path: Path) -> None:
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with piper.launch(twice, resume="new") as run:
        next(run.train())
        assert run.done == 1
        run.stop()
    with pytest.raises(ConfigError, match="there is no complete checkpoint here"):
        piper.launch(twice, resume="nowhere")


def test_batches_of_the_users_own_count_as_those_of_their_steps(twice: Program) -> None:
    """So a run that saves in between is the run that does not."""
    job = replace(twice.job, checkpoint=None)
    program, given = replace(twice, job=job), [*islice(job.data(), 3)]
    with piper.launch(program) as run:
        whole = [result.metrics["batch"] for result in run.train(3)]
    with piper.launch(program) as run:
        for batch in given[:2]:
            run.step(batch)
        run.save("own")
        assert [result.metrics["batch"] for result in run.train(1)] == whole[2:]
    with piper.launch(program, resume="own") as run:
        assert [result.metrics["batch"] for result in run.train(1)] == whole[2:]


def test_a_run_shows_its_methods(twice: Program) -> None:
    with piper.launch(twice) as run:
        assert isinstance(run, piper.Run)
        assert {"train", "batches", "step", "after_step", "evaluate", "save", "load"} <= set(dir(run))


def test_numbers_that_are_not_finite_end_a_script_too(twice: Program) -> None:
    poisoned = replace(twice.job, data=lambda: [{"x": torch.full((4, 6), float("nan"))}], checkpoint=None)
    launched = piper.launch(replace(twice, job=poisoned), keep_outputs=True)
    with launched as run, pytest.raises(ConfigError, match="the numbers are not finite any more") as error:
        next(run.train())
    assert error.value.facts["first"].startswith("F[")
