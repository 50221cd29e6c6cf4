"""Which jobs share a capture in a run of the tests, and which do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import piper
import tests.captures
from piper.capture.recordings import Recordings
from piper.recipe import load_recipe
from tests.captures import SharedCaptures, code_of

RECIPE = """
import torch
from torch import nn
import piper
SCALE = 1.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x) * SCALE
def job():
    return piper.Job(model=Net, loss=lambda model, batch: model(batch["x"]).mean(), data=lambda: [{"x": torch.ones(2, 2)}])
"""


def code_in(path: Path, text: str) -> bytes | None:
    path.write_text(text)
    job = load_recipe(f"{path}:job")
    return code_of(job.model, job.loss)


def test_a_file_that_is_read_again_has_the_same_code(tmp_path: Path) -> None:
    first = code_in(tmp_path / "net.py", RECIPE)
    assert first is not None and first == code_in(tmp_path / "net.py", RECIPE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("SCALE = 1.0", "SCALE = 0.25"), ("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)"), ("mean", "sum")],
)
def test_a_file_that_has_changed_has_other_code(old: str, new: str, tmp_path: Path) -> None:
    """Also where only a class or a global has changed that a model uses."""
    first = code_in(tmp_path / "net.py", RECIPE)
    assert first != code_in(tmp_path / "net.py", RECIPE.replace(old, new))


def job(width: int) -> piper.Job:
    def data() -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.ones(4, width)}]

    return piper.Job(
        model=lambda: nn.Linear(width, 2), loss=lambda model, batch: model(batch["x"]).mean(), data=data
    )


def test_equal_jobs_share_and_others_do_not() -> None:
    first = piper.compile(job(3)).recordings
    assert piper.compile(job(3)).recordings is first
    assert piper.compile(replace(job(3), strategy=[piper.split(piper.at(), parts=2)])).recordings is first
    assert piper.compile(job(4)).recordings is not first, "it closes over another value"
    assert piper.compile(replace(job(3), precision="bf16")).recordings is not first


@pytest.mark.usefixtures("own_captures")
def test_a_test_may_capture_by_itself() -> None:
    assert piper.compile(job(3)).recordings is not piper.compile(job(3)).recordings


def test_what_several_jobs_use_is_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.captures, "KEPT", 2)
    shared = SharedCaptures()

    def recordings(width: int) -> Recordings:
        made = job(width)
        return shared.recordings(made, "cpu", next(iter(made.data())), made.loss, compiled=False)

    first = recordings(2)
    assert recordings(2) is first
    second, third = recordings(3), recordings(4)
    assert recordings(2) is first and recordings(4) is third
    assert recordings(3) is not second
