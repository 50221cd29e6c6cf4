"""A run on CUDA goes on from its checkpoint, under another strategy and on the host too."""

from functools import partial
from pathlib import Path

import pytest
import torch

from piper.compiler import compile
from piper.run.launch import launch_inline, launch_local
from tests.runtime.grid import Cell, batches, job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
MOMENTUM = partial(
    torch.optim.SGD, lr=0.1, momentum=0.9
)  # Adam magnifies that a GPU's cosines round otherwise
SHARDED = Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, clip=0.3)


def test_a_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    first, *rest = batches(SHARDED, 3)
    with launch_local(compile(job(SHARDED, optimizer=MOMENTUM), device="cuda")) as run:
        run.step(first)
        run.save(tmp_path / "step-1")
        wanted = [run.step(batch) for batch in rest]
        state = run.state_dict()
    for device in ("cuda", "cpu"):
        alone = job(SHARDED, strategy=[], optimizer=MOMENTUM)
        with launch_inline(compile(alone, device=device)) as run:
            assert run.load(tmp_path / "step-1").step == 1
            for batch, result in zip(rest, wanted, strict=True):
                assert run.step(batch).loss == pytest.approx(result.loss, rel=1e-9)
            for name, value in run.state_dict().items():
                torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-8)
