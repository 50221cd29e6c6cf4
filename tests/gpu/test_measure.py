"""Candidates that run on a GPU, in turns."""

import pytest

import piper
from piper.tuning.space import Space
from tests.tuning.models import tower

pytestmark = pytest.mark.gpu


def test_the_best_few_run_on_the_gpu_that_is_there() -> None:
    space = Space(rows=(2, 4, 8), recompute=Space().recompute[:1])
    found = piper.tune(tower(), "h200", 1, space=space, front=False, measure=2)
    assert found.trial is not None
    assert [3 <= len(run.starts) <= 5 for run in found.trial.runs] == [True, True]
    assert all(1 <= len(start) <= 3 for run in found.trial.runs for start in run.starts)
    assert found.best is found.trial.runs[0].candidate
    assert not any(run.failed for run in found.trial.runs)
