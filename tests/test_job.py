"""A job checks itself."""

from inspect import cleandoc
from pathlib import Path

import pytest
from torch import nn

from piper import Checkpoint, ConfigError, Job, at, place, schedules
from piper.callbacks import EarlyStopping

GOOD = {"model": dict, "loss": max, "data": list}


def test_a_job_of_the_least() -> None:
    job = Job(**GOOD)  # type: ignore[arg-type]
    assert (job.strategy, job.precision, job.clip_norm, job.steps, job.seed) == ((), "fp32", None, 100, 0)


def line_of(begin: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.startswith(begin))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": 3},
            """
            Job (test_job.py:LINE): model is int, which cannot be called
              hint: give a function that builds the model: model=MyModel or model=lambda: MyModel(8)
            """,
        ),
        (
            {"loss": nn.CrossEntropyLoss()},
            """
            Job (test_job.py:LINE): loss is torch's CrossEntropyLoss: it takes no model and no batch
              hint: give a function that calls it: loss=lambda model, batch: criterion(model(batch["x"]), batch["y"])
            """,
        ),
        (
            {"loss": nn.functional.mse_loss},
            """
            Job (test_job.py:LINE): loss is torch's mse_loss: it takes no model and no batch
              hint: give a function that calls it: loss=lambda model, batch: criterion(model(batch["x"]), batch["y"])
            """,
        ),
        (
            {"data": [1]},
            """
            Job (test_job.py:LINE): data is list, which cannot be called
              hint: give a function that returns the batches: data=lambda: loader
            """,
        ),
        (
            {"callbacks": EarlyStopping()},
            """
            Job (test_job.py:LINE): callbacks is EarlyStopping, not a list
              hint: put callbacks in a list: callbacks=[piper.callbacks.EarlyStopping()]
            """,
        ),
        (
            {"scheduler": 1},
            """
            Job (test_job.py:LINE): scheduler cannot be called
              hint: give a function: scheduler=lambda optimizer: StepLR(optimizer, 10)
            """,
        ),
        (
            {"precision": "fp8"},
            """
            Job (test_job.py:LINE): there is no precision 'fp8'
              hint: precision is one of fp32, bf16, fp64
            """,
        ),
        (
            {"clip_norm": 0.0},
            """
            Job (test_job.py:LINE): clip_norm=0.0
              hint: clip to a positive norm, or leave it out
            """,
        ),
        (
            {"initial": "cuda"},
            """
            Job (test_job.py:LINE): initial='cuda'
              hint: initial values are drawn on the device that the job runs on, or on the host: one of device, host
            """,
        ),
        (
            {"steps": 0},
            """
            Job (test_job.py:LINE): steps=0
              hint: train at least 1 step, a whole number
            """,
        ),
        (
            {"seed": True},
            """
            Job (test_job.py:LINE): seed=True
              hint: choose a whole number from 0
            """,
        ),
        (
            {"seed": 2**63},
            """
            Job (test_job.py:LINE): seed=9223372036854775808
              hint: choose a whole number from 0
            """,
        ),
        (
            {"strategy": 3},
            """
            Job (test_job.py:LINE): strategy is int, not a list of directives
              hint: put directives in a list, or give the path of a JSON file
            """,
        ),
        (
            {"strategy": [place(at(), [0]), schedules.gpipe(1, 1)]},
            """
            Job (test_job.py:LINE): strategy[1] is list, not a directive
              hint: a strategy is a flat list of place, replicate, shard, split, order, remat, precision, protect, offload, average; add a schedule with +, not inside the list
            """,
        ),
    ],
)
def test_a_bad_field_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Job(**{**GOOD, **changes})  # type: ignore[arg-type]
    assert str(error.value) == cleandoc(message).replace("LINE", str(line_of("        Job(**{**GOOD")))


def test_a_bad_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Checkpoint(folder=Path("runs"), every=0)
    where = f"Checkpoint (test_job.py:{line_of('        Checkpoint(folder')})"
    assert str(error.value) == f"{where}: every=0\n  hint: save every so many steps, at least 1"
