"""Cells of the matrix share captures: without that, a cell takes several times as long, and nothing fails."""

from unittest.mock import patch

import pytest

from piper.capture.autodiff.differentiate import differentiate as differentiate_model
from piper.capture.trace.trace import trace as trace_model
from piper.check.check import numbers as numbers_of
from tests.runtime import sharing
from tests.runtime.grid import Cell
from tests.runtime.sharing import Shared

pytestmark = pytest.mark.usefixtures("own_captures")


def test_cells_of_a_model_are_captured_once() -> None:
    shared = Shared()
    cells = [
        Cell(case="mlp", schedule=schedule, dp=dp, rows=1) for schedule in ("gpipe", "1f1b") for dp in (1, 2)
    ]
    with (
        patch.object(sharing, "trace", wraps=trace_model) as trace,
        patch.object(sharing, "differentiate", wraps=differentiate_model) as differentiate,
        patch.object(sharing, "numbers", wraps=numbers_of) as numbers,
    ):
        assert all(shared.check(cell).ok for cell in [*cells, *cells])
    assert (trace.call_count, differentiate.call_count) == (1, 1)
    assert numbers.call_count == 2, "one device runs each way of cutting a batch once"
