"""`protect`: the plan copies the state; killed workers and lost machines go on from the copies, to the bit."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from piper.compiler import Program, compile
from piper.directives import protect
from piper.ir.select import at
from piper.launchers.base import StepResult
from piper.launchers.inline import launch_inline
from piper.recovery.recovering_run import recovering
from piper.recovery.run_events import Event
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job, strategy

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
SHARDED = Cell(case="decoder", schedule="1f1b", dp=2, zero=2, clip=0.3)
BUFFERS = Cell(case="convnet", schedule="none", dp=2, zero=0)
EXPERTS = Cell(case="moe", schedule="none", dp=2, zero=3, ways=2, rows=1)


class Deadly(torch.optim.lr_scheduler.LinearLR):
    """Kills the process that is asked for its state first, once a file is there: a protect instruction asks."""

    def __init__(self, optimizer: torch.optim.Optimizer, flag: str) -> None:
        super().__init__(optimizer, start_factor=0.1, total_iters=10)
        self.flag = Path(flag)

    def state_dict(self) -> dict[str, object]:
        try:
            self.flag.unlink()
        except FileNotFoundError:
            return {k: v for k, v in super().state_dict().items() if k != "flag"}
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def protected(cell: Cell, copies: int = 0, **changes: object) -> Program:
    asked = protect(at(), copies=copies, apart="device" if copies else "machine")
    return compile(job(cell, **{"strategy": [*strategy(cell), asked], **changes}))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("cell", "copies"),
    [
        (PAIR, 1),
        *(
            pytest.param(cell, n, marks=pytest.mark.slow)
            for cell in (SHARDED, BUFFERS, EXPERTS)
            for n in (0, 1)
        ),
    ],
    ids=str,
)
def test_a_process_killed_at_a_protect_instruction(cell: Cell, copies: int, tmp_path: Path) -> None:
    flag = tmp_path / "now"
    program = protected(cell, copies, scheduler=partial(Deadly, flag=str(flag)))
    given = batches(cell, 5)
    with launch_inline(program) as whole:
        wanted = [whole.step(batch) for batch in given]
        state = whole.state_dict()
    events: list[Event] = []
    got: list[StepResult] = []
    with recovering(program, "local", Options(), retries=3, notify=events.append) as run:
        for number, batch in enumerate(given):
            if number in (0, 3):
                flag.touch()
            got.append(run.step(batch))
        assert all(torch.equal(state[name], value) for name, value in run.state_dict().items())
    assert got == wanted
    assert [(e.event, e.step) for e in events] == [
        ("failure", 1), ("recovery", 1), ("failure", 4), ("recovery", 4),
    ]  # fmt: skip
    assert all(str(e.instruction).find("protect[") > 0 for e in events if e.event == "failure"), events
    assert (events[-1].version, events[-1].replayed) == (2, 1)  # the version of step 3 was not completed
