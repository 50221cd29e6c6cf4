"""`check` notices a collective that is broken, and random numbers of divided models are those of one device."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from piper.check.check import check
from piper.compiler import compile
from piper.directives import shard, split
from piper.ir.ids import Pass
from piper.ir.select import at
from piper.job import Job
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.run.launch import launch_inline
from piper.runtime import kernels
from piper.runtime.context import Bound, Env

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


def broken(at_run: Pass, op: Op = "collect") -> Callable[[Env, Instr], Bound]:
    """Return a kernel that is wrong in one collective, on one device: it adds one to the result."""
    right = kernels.KERNELS[op]

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


def test_each_broken_collective_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert not report.ok and str(report.first_bad).startswith("step 0: "), report


@pytest.mark.parametrize(("between", "dp", "parts"), [(None, 1, 1), (1, 2, 2)])
def test_dropout_in_a_divided_region_drops_what_one_device_drops(
    between: int | None, dp: int, parts: int
) -> None:
    made = job(0.5, between, dp, parts)
    report = check(compile(made, device="cpu"), launch_inline, [*made.data()], tol=1e-9)
    assert report.ok, report


class Noise(nn.Module):
    """A feed-forward whose hidden values get noise, of which each device draws for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = torch.tanh(hidden + 0.1 * torch.randn_like(hidden)) * torch.rand_like(hidden)
        result: Tensor = x + self.down(hidden)
        return result


class Attention(nn.Module):
    """Attention that drops weights: four query heads, two of keys and values."""

    def __init__(self, masked: bool, drop: float = 0.5) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.out, self.masked, self.drop = nn.Linear(8, 8), masked, drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1) if self.masked else None
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=self.drop, is_causal=not self.masked, enable_gqa=True
        )
        result: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("kind", ["noise", "causal", "masked"])
def test_random_numbers_of_a_divided_region_are_those_of_one_device(kind: str) -> None:
    heads = {"q|k|v": 0, "out": 1}
    made = replace(
        job(),
        model=Noise if kind == "noise" else lambda: Attention(kind == "masked"),
        strategy=[
            shard(at(), [0, 1], axis="TP", weights=WEIGHTS if kind == "noise" else heads, between=1),
            split(at(), axis="MB", parts=2),
        ],
    )
    report = check(compile(made, device="cpu"), launch_inline, [*made.data()], tol=1e-9)
    assert report.ok, report


@pytest.mark.parametrize(
    ("attention", "kinds"),
    [
        ("heads", {("F", "all_to_all"): 4, ("B", "all_to_all"): 4, ("F", "all_reduce"): 1}),
        ("gather", {("F", "all_gather"): 2, ("B", "reduce_scatter"): 2, ("F", "all_reduce"): 1}),
    ],
)
def test_a_broken_collective_of_a_divided_sequence_is_noticed(
    attention: str, kinds: dict[tuple[str, str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(
        job(),
        model=lambda: Attention(masked=False, drop=0.0),
        strategy=[shard(at(), [0, 1], axis="CP", batch={"x": 1}, attention=attention)],
    )
    program = compile(made, device="cpu")
    found = [ins.collects for plan in program.plans for ins in plan.instrs if ins.op == "collect"]
    assert Counter((one.run.phase, one.how.op) for one in found) == kinds
    each = {(one.run.phase, one.how.op): one for one in found}  # one of each kind
    for one in each.values():
        with monkeypatch.context() as patched:
            patched.setitem(cast(dict[str, object], kernels.KERNELS), "collect", broken(one.run))
            report = check(program, launch_inline, [*made.data()])
        assert not report.ok and str(report.first_bad).startswith("step 0: "), report


@pytest.mark.parametrize(("weights", "name"), [({"down": 1}, "F[TP=0]"), ({"up": 0}, "B[TP=1]")])
def test_a_broken_slice_is_noticed(
    weights: dict[str, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(job(), strategy=[shard(at(), [0, 1], axis="TP", weights=weights)])
    program = compile(made, device="cpu")
    runs = [ins.collects.run for plan in program.plans for ins in plan.instrs if ins.op == "slice"]
    assert [str(run) for run in runs] == [name]
    patch = broken(runs[0], "slice")
    monkeypatch.setitem(cast(dict[str, object], kernels.KERNELS), "slice", patch)
    report = check(program, launch_inline, [*made.data()])
    assert not report.ok and str(report.first_bad).startswith("step 0: "), report
