"""Whole jobs on processes: each feature trains, is saved, resumes under another layout and launcher, as plain PyTorch."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from piper.train.train_command import train_recipe
from piper.train.train_options import TrainOptions
from tests import plain
from tests.hosts.training import events, written
from tests.whole.jobs import CHAINS, STEPS, STOP, Case
from tests.whole.models import wide_angles
from tests.whole.plain_loop import Numbers, plain_training
from tests.workers.family import family, free_port

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
BOUND = 280.0  # seconds that the ranks of torchrun may take, on a busy machine
TOLERANCE = 1e-9
RECIPE = """
from pathlib import Path
from tests.whole.jobs import Case, job
from tests.whole.models import wide_angles

wide_angles().__enter__()

def recipe():
    return job({case!r}, {number}, Path({kill!r}))
"""


def train(case: Case, number: int, folder: Path, on: str | None = None) -> None:
    """Train the first or the second part of a run. on: another launcher than the case's."""
    recipe, launcher = folder / f"part{number}.py", on or case.layout(number)[3]
    recipe.write_text(RECIPE.format(case=case, number=number, kill=str(folder / "killed")), encoding="utf-8")
    if launcher == "torchrun":
        return torchrun(recipe, folder / "run", case.devices(number), resume=number > 0)
    asked = TrainOptions(recipe=f"{recipe}:recipe", on=launcher, out=folder / "run", resume=number > 0)
    with wide_angles():
        train_recipe(asked, Console(quiet=True))


def torchrun(recipe: Path, out: Path, count: int, *, resume: bool) -> None:
    """Run `piper train` on ranks that have the environment torchrun gives them, which saves a process."""
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [
        sys.executable,
        "-m",
        "piper",
        "train",
        f"{recipe}:recipe",
        "--on",
        "torchrun",
        "--out",
        str(out),
    ]
    with family() as ranks:
        processes = [
            ranks.start(
                [*words, *(["--resume"] if resume else [])],
                env={**ENVIRONMENT, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(count)
        ]
        ended = [process.communicate(timeout=BOUND) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, ended


def numbers_of(run: Path) -> Numbers:
    """Return what a run has written."""
    lines = written(run, "notes.jsonl")
    steps = [line for line in lines if "step" in line]
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    end = torch.load(run / "end.pt", weights_only=True)
    return Numbers(
        losses=column(steps, "loss"),
        norms=column(steps, "norm"),
        samples=column(steps, "samples"),
        evaluations={
            int(str(line["evaluated"])): column([line], "loss")[0] for line in lines if "evaluated" in line
        },
        state=end["state"],
        predicted=end["predicted"],
    )


def column(lines: list[dict[str, object]], name: str) -> list[float]:
    return [float(str(line[name])) for line in lines]


def differences(got: Numbers, wanted: Numbers) -> Mapping[str, float]:
    """Return the largest difference of each kind of number."""

    def largest(left: list[float], right: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(left, right, strict=True))

    assert wanted.evaluations.keys() <= got.evaluations.keys()
    return {
        "samples": largest(got.samples, wanted.samples),
        "loss": largest(got.losses, wanted.losses),
        "norm": largest(got.norms, wanted.norms),
        "evaluation": max(abs(got.evaluations[step] - loss) for step, loss in wanted.evaluations.items()),
        "state": plain.largest_difference(kept(wanted.state, got.state), got.state),
        "prediction": float((got.predicted - wanted.predicted).abs().max()),
    }


def kept(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state that a run has too: parameters, and buffers that are saved."""
    assert got.keys() <= wanted.keys() and len(got) > 4
    return {name: value for name, value in wanted.items() if name in got}


CASES = [
    Case(chain=name, place=place, stock=stock)
    for name, chain in CHAINS.items()
    for stock in (False, True)
    for place in range(len(chain.features))
]


KILLS = [  # a worker of the second part
    Case(chain="dense", place=3, stock=False, kill=True),  # in a group of ZeRO, whose replica lives
    Case(chain="experts", place=5, stock=False, kill=True),  # experts over devices that share a sequence
    Case(chain="average", place=1, stock=False, kill=True),  # of a group that trains apart
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [case for case in CASES if replace(case, kill=True) not in KILLS] + KILLS, ids=str
)
def test_a_feature_trains_and_resumes_as_plain_pytorch(tmp_path: Path, case: Case) -> None:
    train(case, 0, tmp_path)
    assert not (tmp_path / "run" / "end.pt").exists()
    train(case, 1, tmp_path)
    found = differences(numbers_of(tmp_path / "run"), plain_training(case))
    assert max(found.values()) < TOLERANCE, found
    assert (tmp_path / "killed").exists() == case.kill
    assert events(tmp_path / "run") == ([("failure", None), ("recovery", "memory")] if case.kill else [])


def test_a_first_part_on_threads(tmp_path: Path) -> None:
    case = Case(chain="dtensor", place=0, stock=False)
    train(case, 0, tmp_path, on="inline")
    steps = [line for line in written(tmp_path / "run", "notes.jsonl") if "step" in line]
    wanted = plain_training(case)
    assert column(steps, "loss") == pytest.approx(wanted.losses[:STOP], abs=TOLERANCE)
    assert column(steps, "norm") == pytest.approx(wanted.norms[:STOP], abs=TOLERANCE)
