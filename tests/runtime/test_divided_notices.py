"""`check` names a collective that is broken, and random numbers of divided models are those of one device."""

from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from piper.compiler import compile
from piper.directives import shard, split
from piper.ids import Pass
from piper.ir.select import at
from piper.job import Job
from piper.launchers.inline import launch_inline
from piper.plan.instr import Instr
from piper.runtime import kernels
from piper.runtime.context import Bound, Env
from piper.runtime.debug.check import check

WEIGHTS = {"up": 0, "down": 1}


class Net(nn.Module):
    """A feed-forward with a norm and dropout, so that a divided one needs every kind of collective."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.inner, self.outer = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(torch.tanh(self.up(self.norm(x))))
        result: Tensor = x + self.outer(self.down(hidden))
        return result


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).pow(3).mean()
    return result


def job(drop: float = 0.0, between: int | None = 1, dp: int = 1, parts: int = 1) -> Job:
    x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0))
    devices = list(range(2 * dp))
    return Job(
        model=lambda: Net(drop),
        loss=loss,
        data=lambda: [{"x": x}, {"x": x + 1}],
        strategy=[
            shard(at(), devices, 2, axis="TP", weights=WEIGHTS, between=between),
            *([split(at(), axis="MB", parts=parts)] if parts > 1 else []),
        ],
        precision="fp64",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def broken(at_run: Pass) -> Callable[[Env, Instr], Bound]:
    """Return a kernel that is wrong in one collective, on one device: it adds one to the result."""
    right = kernels.KERNELS["collect"]

    def bind(env: Env, ins: Instr) -> Bound:
        run = right(env, ins)
        if ins.run != at_run or env.device != 1:
            return run
        slot = env.at(ins.writes[0])

        def wrong() -> None:
            run()
            env.slots[slot] = cast(Tensor, env.slots[slot]) + 1.0

        return wrong

    return bind


def test_each_broken_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    program = compile(made, device="cpu")
    runs = [ins.collects.run for plan in program.plans for ins in plan.instrs if ins.op == "collect"]
    assert [str(run) for run in runs] == [
        "F[TP=1]",
        "F[TP=2]",
        "B[TP=1]",
        "B[TP=0]",
    ]
    assert check(program, launch_inline, [*made.data()]).ok
    for run in runs:
        with monkeypatch.context() as patched:
            patched.setitem(cast(dict[str, object], kernels.KERNELS), "collect", broken(run))
            report = check(program, launch_inline, [*made.data()])
        assert not report.ok
        assert report.first_bad is not None and report.first_bad.startswith(
            f"step 0: {run} on device 1: the "
        ), report


@pytest.mark.parametrize(("between", "dp", "parts"), [(None, 1, 1), (1, 2, 2)])
def test_dropout_in_a_divided_region_drops_what_one_device_drops(
    between: int | None, dp: int, parts: int
) -> None:
    made = job(0.5, between, dp, parts)
    report = check(compile(made, device="cpu"), launch_inline, [*made.data()], tol=1e-9)
    assert report.ok, report
