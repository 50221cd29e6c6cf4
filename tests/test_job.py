"""A job checks itself."""

from inspect import cleandoc
from pathlib import Path

import pytest

from piper import Checkpoint, ConfigError, Job, at, place, schedules

GOOD = {"model": dict, "loss": max, "data": list}


def test_a_job_of_the_least() -> None:
    job = Job(**GOOD)  # type: ignore[arg-type]
    assert (job.strategy, job.precision, job.clip_norm, job.steps, job.seed) == ((), "fp32", None, 100, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": 3},
            """
            Job: model is int, which cannot be called
              hint: give a function that builds the model: model=MyModel or model=lambda: MyModel(8)
            """,
        ),
        (
            {"data": [1]},
            """
            Job: data is list, which cannot be called
              hint: give a function that returns the batches: data=lambda: loader
            """,
        ),
        (
            {"scheduler": 1},
            """
            Job: scheduler cannot be called
              hint: give a function
            """,
        ),
        (
            {"precision": "fp8"},
            """
            Job: there is no precision 'fp8'
              hint: precision is one of fp32, bf16, fp64
            """,
        ),
        (
            {"clip_norm": 0.0},
            """
            Job: clip_norm=0.0
              hint: clip to a positive norm, or leave it out
            """,
        ),
        (
            {"steps": 0},
            """
            Job: steps=0
              hint: train at least 1 step
            """,
        ),
        (
            {"strategy": [place(at(), [0]), schedules.gpipe(1, 1)]},
            """
            Job: strategy[1] is list, not a directive
              hint: a strategy is a flat list of place, replicate, shard, split, order, remat; add a schedule with +, not inside the list
            """,
        ),
    ],
)
def test_a_bad_field_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Job(**{**GOOD, **changes})  # type: ignore[arg-type]
    assert str(error.value) == cleandoc(message)


def test_a_bad_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Checkpoint(folder=Path("runs"), every=0)
    assert str(error.value) == "Checkpoint: every=0\n  hint: save every so many steps, at least 1"
