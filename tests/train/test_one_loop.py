"""`run.train()`, a script's own loop and `piper train` give the same batches and weights, also after a resume."""

from collections.abc import Iterable, Mapping
from functools import partial
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
from piper.data import TokenFile
from piper.train.session import train_recipe
from piper.train.train_options import TrainOptions

Way = Literal["train", "own loop", "command"]
WAYS: tuple[Way, ...] = ("train", "own loop", "command")
STEPS, STOP = 5, 3
NOTES = "notes.txt"


class Rows(Dataset[dict[str, Tensor]]):
    """Samples with noise that is drawn where they are loaded, in worker processes too."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((6,), float(index)) + torch.randn(6)}


def loader(folder: Path) -> Iterable[Mapping[str, Tensor]]:
    return DataLoader(Rows(), batch_size=4, shuffle=True, drop_last=True, num_workers=2)


def stateful(folder: Path) -> Iterable[Mapping[str, Tensor]]:
    made = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [{"x": torch.full((6,), float(index))} for index in range(9)]
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


def command(kind: str, data: Path, steps: int, on: str, resume: bool) -> None:
    recipe = data / f"{kind}.py"
    text = f"""
        from pathlib import Path
        from tests.train.test_one_loop import make
        def job(): return make({kind!r}, Path({str(data)!r}))
    """
    recipe.write_text("\n".join(line.strip() for line in text.splitlines()), encoding="utf-8")
    asked = TrainOptions(recipe=f"{recipe}:job", on=on, out=Path("."), steps=steps, resume=resume)
    train_recipe(asked, Console(quiet=True))


def script(way: Way, kind: str, data: Path, steps: int, on: str, resume: bool) -> None:
    """A script of the user's, in the folder that its checkpoints go to."""
    job = make(kind, data, steps)
    with piper.launch(piper.compile(job), on=on, resume="." if resume else None) as run:
        if way == "train":
            assert all(result.loss > 0 for result in run.train())
            return
        for batch in run.batches():
            result = run.step(batch)
            run.after_step(run.done, result, job.steps)
        run.after_training(run.done)


def trained(
    way: Way, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...], on: str
) -> tuple[list[str], dict[str, Tensor]]:
    """Train up to each of some steps, by a launch each. Return the notes and the state at the end."""
    name = f"{way}-{kind}-{len(parts)}-{on}".replace(" ", "-")
    folder, data = tmp_path / name, tmp_path / "data"
    folder.mkdir()
    data.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    torch.manual_seed(hash(name))  # what the process has drawn before does not matter
    for number, steps in enumerate(parts):
        if way == "command":
            command(kind, data, steps, on, resume=number > 0)
        else:
            script(way, kind, data, steps, on, resume=number > 0)
    last = folder / "checkpoints" / f"step-{parts[-1]:08}"
    state = {
        f"{file.name} {key}": value
        for file in sorted(last.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }
    return (folder / NOTES).read_text(encoding="utf-8").splitlines(), state


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


LAUNCHERS = [
    "inline",
    pytest.param("local", marks=pytest.mark.slow),
    pytest.param("ray", marks=pytest.mark.ray),
]


@pytest.mark.parametrize("on", LAUNCHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_three_ways_give_the_same(
    kind: str, on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {way: trained(way, kind, tmp_path, monkeypatch, (STEPS,), on) for way in WAYS}
    notes, state = found["train"]
    assert [line.rsplit(" ", 3)[0] for line in notes if line.startswith("step")] == [
        f"step {n}" for n in range(1, STEPS + 1)
    ]
    assert [line for line in notes if not line.startswith("step")] == [
        "save 2 step-00000002",
        "save 4 step-00000004",
        "save 5 step-00000005",
        "end 5",
    ]
    assert len({line.split()[-1] for line in notes if line.startswith("step")}) == STEPS, "no batch twice"
    for way in WAYS:
        assert found[way][0] == notes, way
        assert same(found[way][1], state), way


@pytest.mark.parametrize("on", LAUNCHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_was_not_stopped(
    kind: str, on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, state = trained("train", kind, tmp_path, monkeypatch, (STEPS,), on)
    steps = [line for line in notes if line.startswith("step")]
    for way in WAYS:
        again, weights = trained(way, kind, tmp_path, monkeypatch, (STOP, STEPS), on)
        assert [line for line in again if line.startswith("step")] == steps, way
        assert same(weights, state), way
