"""Buffers of an expert region: divided as its experts are, whole again in a state_dict and a checkpoint."""

import re
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.check.check import check
from piper.compiler import compile
from piper.errors import ScheduleError
from piper.job import Job
from piper.run.launch import launch_inline, launch_local
from tests.runtime.inline_workers import workers_of

EXPERTS, WIDTH, ROWS = 8, 16, 16


class Scaled(nn.Module):
    """One layer of experts, each scaled by a buffer; it may count the rows that each has seen."""

    def __init__(self, counts: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.scale, self.seen = nn.Buffer(torch.rand(EXPERTS, 1, 1)), nn.Buffer(torch.zeros(EXPERTS))
        self.counts, self.shared = counts, shared

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            chosen = self.gate(x).argmax(-1)
            order = chosen.argsort(stable=True)
            counts = torch.zeros(EXPERTS, dtype=torch.int64).index_add(0, chosen, torch.ones_like(chosen))
            with piper.annotate("EP"):
                rows, counts = piper.route(x[order], counts)
                if self.counts:
                    self.seen.add_(counts)
                y = piper.unroute(piper.grouped_mm(rows, self.up * self.scale, counts), counts, len(x))
            out = x + torch.zeros_like(x).index_copy(0, order, y)
            return out * self.scale.mean() if self.shared else out


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))}


def job(
    dp: int, ways: int, model: Callable[[], nn.Module] = Scaled, order: Sequence[int] | None = None
) -> Job:
    devices = [*(order or range(dp))]
    strategy = [piper.replicate(piper.at(), devices, zero=2), piper.split(piper.at(), parts=2)]
    if ways > 1:
        strategy.append(piper.shard(piper.at(EP="*"), devices, ways=ways))
    return Job(
        model=model,
        loss=lambda model, batch: model(batch["x"].double()).square().mean(),
        data=lambda: [batch(0)],
        strategy=strategy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        precision="fp64",
    )


@pytest.mark.parametrize(("dp", "ways"), [(2, 2), (4, 2), (4, 4)])
def test_each_device_holds_the_part_of_its_experts(dp: int, ways: int) -> None:
    program = compile(job(dp, ways))
    report = check(program, launch_inline, [batch(0), batch(1)])
    assert report.ok, report
    with launch_inline(program) as run:
        held = [worker.buffer("scale") for worker in workers_of(run).values()]
        whole = run.state_dict()["scale"]
    assert all(value is not None and len(value) == EXPERTS // ways for value in held)
    assert torch.equal(torch.cat([value for value in held[:ways] if value is not None]), whole)


def test_devices_in_any_order_hold_the_buffers_of_their_own_experts() -> None:
    program = compile(job(4, 2, order=[3, 0, 2, 1]))
    report = check(program, launch_inline, [batch(0), batch(1)])
    assert report.ok, report
    with launch_inline(program) as run:
        held = [workers_of(run)[device].buffer("scale") for device in (3, 0)]
        whole = run.state_dict()["scale"]
    assert torch.equal(torch.cat([value for value in held if value is not None]), whole)


def test_a_checkpoint_holds_the_whole(tmp_path: Path) -> None:
    """Saved with experts in four parts, loaded in two, and whole."""
    with launch_inline(compile(job(4, 4))) as run:
        run.step(batch(0))
        run.save(tmp_path / "saved")
        wanted = run.state_dict()
    for dp, ways in ((4, 2), (2, 1)):
        with piper.launch(compile(job(dp, ways)), resume=tmp_path / "saved") as resumed:
            found = resumed.state_dict()
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_processes_give_the_whole_too() -> None:
    program = compile(job(2, 2))
    with launch_inline(program) as run:
        wanted = run.state_dict()
    with launch_local(program) as crew:
        found = crew.state_dict()
    assert found.keys() == wanted.keys() and wanted
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def refusal(model: Callable[[], nn.Module]) -> str:
    with pytest.raises(ScheduleError) as caught:
        compile(job(2, 2, model))
    return re.sub(r"\.py:\d+", ".py", str(caught.value))


def test_a_buffer_that_is_written_is_not_divided() -> None:
    assert refusal(lambda: Scaled(counts=True)) == cleandoc("""
        shard #2 (test_expert_buffers.py): the buffer seen cannot be sharded with its experts
          asked: ways 2 over 0,1 for PP=0 EP=0 #1
          but:   PP=0 EP=0 #1 writes it, from the rows of 2 devices at once
          hint:  give each region a buffer of its own, which only what lies outside route and unroute writes, or do not shard this region
    """)
    assert check(compile(job(2, 1, lambda: Scaled(counts=True))), launch_inline, [batch(0)]).ok


def test_a_buffer_that_is_used_outside_is_not_divided() -> None:
    assert refusal(lambda: Scaled(shared=True)) == cleandoc("""
        shard #2 (test_expert_buffers.py): the buffer scale cannot be sharded with its experts
          asked: ways 2 over 0,1 for PP=0 EP=0 #1
          but:   PP=0 EP=0 #1 and PP=0 #1 share it
          hint:  give each region a buffer of its own, which only what lies outside route and unroute writes, or do not shard this region
    """)
