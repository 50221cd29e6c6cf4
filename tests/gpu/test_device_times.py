"""The time that a GPU computes: not the time to issue, which is the same on a slow one."""

from functools import partial
from time import perf_counter

import pytest
import torch
from torch import Tensor

from piper.plan.instr import Instr
from piper.workers.blame import Watcher, private_marks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
CYCLES = 200_000_000


def add(value: Tensor) -> None:
    value.add_(1)


def test_a_watcher_measures_the_device_and_not_the_host() -> None:
    watcher = Watcher(0, private_marks(), print, accelerator=torch.device("cuda", 0))
    run = watcher.watch(0, Instr(op="compute", node="F", stream="compute"), lambda: torch.cuda._sleep(CYCLES))
    run()  # the first call loads the kernel
    torch.cuda.synchronize()
    watcher.take_busy()
    began = perf_counter()
    run()
    issued = perf_counter() - began
    torch.cuda.synchronize()
    took, busy = perf_counter() - began, watcher.take_busy()
    assert issued < 0.1 * took and busy == pytest.approx(took, rel=0.2)
    assert watcher.take_busy() == 0.0, "nothing ran since"


def test_a_step_that_is_captured_is_not_measured() -> None:
    watcher, value = (
        Watcher(0, private_marks(), print, accelerator=torch.device("cuda", 0)),
        torch.zeros(8, device="cuda"),
    )
    run = watcher.watch(0, Instr(op="compute", node="F", stream="compute"), partial(add, value))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    assert value.tolist() == [1.0] * 8 and watcher.take_busy() == 0.0
