"""Regions that run again before their backwards: the numbers of one device, in less memory.

The second run is the same code on the same values, so where gradients are added up in the same order, whether
a region runs again shows in no bit.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piper import compiler
from piper.capture.compile.inductor import Compiled
from piper.capture.trace.annotate import annotate
from piper.check.check import ComparedNumbers, Report, check, numbers
from piper.check.reference import Reference
from piper.cli import main
from piper.compiler import Program
from piper.directives import Directive, remat, replicate, shard, split
from piper.ir.select import at
from piper.job import Job
from piper.models import decoder, moe
from piper.plan.memory_timeline import timeline
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import zoo
from tests.capture.test_fallback import square
from tests.runtime.grid import SHAPES
from tests.runtime.inline_workers import workers_of
from tests.runtime.memory_meter import measured, meter_of, planned_bytes
from tests.runtime.sharing import Shared, one_core

PARTS = 4


def layers() -> nn.Module:
    """A decoder whose layers are regions inside its two stages."""
    return decoder.Decoder(replace(decoder.Config.tiny(), by_layer=True))


def long() -> nn.Module:
    """The same with four stages."""
    return decoder.Decoder(replace(decoder.Config.tiny(stages=4), by_layer=True))


def sparse() -> nn.Module:
    """Layers with experts, inside two stages."""
    return moe.MoEDecoder(replace(moe.Config.tiny(), by_layer=True))


class Noisy(nn.Module):
    """Two stages of two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in range(2):
            with annotate("PP"):
                for i in range(2):
                    with annotate("LAYER"):
                        x = self.dropout(torch.tanh(self.layers[2 * stage + i](x)))
        return x[:, :4]


class Opaque(nn.Module):
    """A layer of the first stage cannot be traced backward: it runs under eager autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            with annotate("LAYER"):
                x = torch.tanh(self.a(x))
            with annotate("LAYER"):
                x = square(self.b(x))
        with annotate("PP"), annotate("LAYER"):
            result: Tensor = self.c(x)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model under a schedule, whose regions may run again."""

    model: Callable[[], nn.Module] = layers
    schedule: str = "1f1b"
    dp: int = 1
    zero: int = 0
    ways: int = 1
    budget: float = 0.5
    across: str = "PP"
    again: bool = True  # else only the budget is asked for

    def __str__(self) -> str:
        text = (
            f"{self.model.__name__}-{self.schedule}-dp{self.dp}-zero{self.zero}-{self.across}-{self.budget}"
        )
        return text + (f"-ways{self.ways}" if self.ways > 1 else "")

    @property
    def once(self) -> "Run":
        """The same, with nothing run again."""
        return replace(self, again=False)

    def batches(self) -> list[dict[str, Tensor]]:
        draw = zoo.vectors if self.model in (Noisy, Opaque) else zoo.tokens
        return [draw(self.dp * PARTS, seed) for seed in range(2)]

    def strategy(self) -> list[Directive]:
        shape, stages = SHAPES[self.schedule], 4 if self.model is long else 2
        ranks = stages // shape.stages_per_rank
        made: list[Directive] = []
        for stage in range(stages):
            first = shape.rank_of(stage, ranks) * self.dp
            devices = range(first, first + self.dp)
            made.append(replicate(at(PP=stage), devices, zero=self.zero))
            made += [shard(at(PP=stage, EP="*"), devices, ways=self.ways)] if self.ways > 1 else []
        inside = at(LAYER="*") if self.across == "LAYER" else at()
        less = remat(inside, self.budget, self.across if self.again else None)
        return [*made, split(at(), parts=PARTS), *shape.orders(ranks, PARTS), less]

    def job(self) -> Job:
        return Job(
            model=self.model,
            loss=zoo.regression if self.model in (Noisy, Opaque) else decoder.loss,
            data=self.batches,
            strategy=self.strategy(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            precision="fp64",
            clip_norm=0.3,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Keeps what runs of one model have in common: its capture, and the numbers of one device."""

    shared: dict[object, Shared] = field(default_factory=dict)
    known: dict[object, list[ComparedNumbers]] = field(default_factory=dict)

    def compile(self, run: Run) -> Program:
        with self.shared.setdefault(run.model, Shared()).capturing():
            return compiler.compile(run.job(), device="cpu")

    def check(self, run: Run, program: Program) -> Report:
        """Whether a run gives the numbers of one device."""
        key = (run.model, run.dp)
        if key not in self.known:
            self.known[key] = list(numbers(Reference(program), run.batches()))
        return check(program, launch_inline, run.batches(), wanted=self.known[key])


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with one_core():
        yield Bench()


def left(program: Program, run: Run) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of a run, and the gradients and parameters that it leaves."""
    with launch_inline(program, Options(keep_gradients=True)) as running:
        losses = [running.step(batch).loss for batch in run.batches()]
        return losses, running.gradients(), running.state_dict()


def counted(program: Program) -> Counter[str]:
    """How often each kind of instruction stands in the plans; what runs again apart."""
    return Counter("again" if ins.again else ins.op for plan in program.plans for ins in plan.instrs)


RUNS = [
    *(Run(dp=2, zero=zero) for zero in range(4)),
    *(Run(budget=budget, schedule="gpipe") for budget in (0, 1)),
    Run(schedule="zero-bubble", budget=1),
    Run(schedule="zero-bubble", across="LAYER"),
    Run(schedule="none", dp=2, zero=3, across="LAYER"),
    Run(model=long, schedule="interleaved-1f1b"),
    Run(model=long, schedule="zbv", dp=2, zero=3, budget=1),
    Run(model=Noisy, dp=2, zero=1, budget=1),
    Run(model=Noisy, schedule="zero-bubble", budget=0),
    Run(model=Opaque, budget=1),
    Run(model=Opaque, schedule="zero-bubble", dp=2, zero=3, budget=1),
    Run(model=sparse, dp=2, zero=1, ways=2, budget=1),
    Run(model=sparse, schedule="zero-bubble", dp=2, zero=3, ways=2),
    Run(model=sparse, budget=0),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_numbers_of_one_device_and_the_bits_of_one_run(bench: Bench, run: Run) -> None:
    program, once = bench.compile(run), bench.compile(run.once)
    check_counts(run, counted(program), counted(once))
    report = bench.check(run, program)
    assert report.ok, report
    losses, *found = left(program, run)
    wanted, *others = left(once, run)
    assert losses == wanted
    for got, kept in zip(found, others, strict=True):
        assert got.keys() == kept.keys()
        assert [name for name in got if not torch.equal(got[name], kept[name])] == []


def check_counts(run: Run, more: Counter[str], once: Counter[str]) -> None:
    """No row, no activation and no gradient travels again; only sharded parameters are gathered again."""
    assert 0 < more.pop("again") <= once["compute"]
    assert set(more - once) == ({"gather"} if run.zero == 3 and run.across == "PP" else set())
    assert not once - more
    if run.ways > 1:
        assert more["exchange"] == 2 * 2 * 2 * PARTS  # in each layer, out and back, forward and backward


def test_the_models_are_what_they_are_meant_to_be(bench: Bench) -> None:
    opaque, noisy = bench.compile(Run(model=Opaque, budget=1)), bench.compile(Run(model=Noisy, budget=1))
    assert [list(code.fallbacks) for code in opaque.codes.values()] == [["PP=0 LAYER=1"]]
    assert {chunk.name for chunk in noisy.outline.chunks if chunk.random} >= {"PP=0 LAYER=0", "PP=1 LAYER=3"}
    for program, chunk in ((opaque, "PP=0 LAYER=1"), (noisy, "PP=0 LAYER=0")):
        assert any(ins.again and ins.computes.chunk == chunk for ins in program.plans.of(0).instrs)


MEMORY = [Run(schedule="gpipe", budget=1), Run(model=long, budget=1)]


@pytest.mark.parametrize("run", MEMORY, ids=str)
def test_live_bytes_are_as_planned_and_fewer(bench: Bench, run: Run) -> None:
    counted, planned = [], []
    for asked in (run, run.once):
        with measured(), launch_inline(bench.compile(asked), Options()) as running:
            running.step(run.batches()[0])
            for worker in workers_of(running).values():
                assert meter_of(worker).live == planned_bytes(worker)
                if worker.device == 0:  # the first stage has most parts in flight
                    counted.append(max(meter_of(worker).live))
                    planned.append(timeline(worker.env.plan).peak)
    assert counted[0] < 0.8 * counted[1]
    assert planned[0] < planned[1]


RECIPE = """
import torch
from torch import nn
import piper

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        for stage in range(2):
            with piper.annotate("PP"):
                for layer in self.layers[2 * stage : 2 * stage + 2]:
                    with piper.annotate("LAYER"):
                        x = nn.functional.dropout(layer(x).tanh(), 0.2)
        return x

def again():
    places = [piper.replicate(piper.at(PP=s), [2 * s, 2 * s + 1], zero=3) for s in range(2)]
    parts = [piper.split(piper.at(), parts=2), *piper.schedules.zero_bubble(2, 2)]
    return piper.Job(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.linspace(0, 1, 64).view(8, 8)}] * 2,
        strategy=[*places, *parts, piper.remat(piper.at(), 1, across="PP")],
    )
"""


@pytest.mark.parametrize("on", ["inline", "local"])
def test_piper_check_says_so_too(
    on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(RECIPE)
    words = ["piper", "check", f"{tmp_path}/net.py:again", "--on", on, "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    found = json.loads(capsys.readouterr().out)
    assert (ended.value.code or 0, found["ok"], found["first_bad"]) == (0, True, None)


@pytest.mark.slow
@pytest.mark.timeout(180)  # a compiler for C++ is at work
def test_compiled_code_runs_again(tmp_path: Path) -> None:
    run = Run(model=Noisy, budget=1)
    program = compiler.compile(run.job(), device="cpu", compile=True, cache=tmp_path)
    assert counted(program)["again"]
    report = check(program, launch_inline, run.batches())
    assert report.ok, report
    used = [code for captured in program.codes.values() for code in captured.built.values()]
    assert any(isinstance(code, Compiled) for code in used)
