"""Two strategies by length that hold the state apart, composed: the numbers of one device, whatever moves between steps.

Any two meet of the kind of ZeRO of the first strategy, the second strategy with its schedule, recomputation, fp8, the
optimizer, and what the run does besides training: it evaluates, resumes, or loses a worker.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import at
from piper.check.check import check
from piper.compiler import Program
from piper.directives import Directive, precision, remat, replicate, shard, split
from piper.plan.instr import Instr
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.runtime.context import Bound
from piper.runtime.worker import Options
from piper.schedules import one_f_one_b, zero_bubble
from piper.workers.blame import Watcher
from tests.covering import Choices, covering, selected
from tests.runtime.grid import OPTIMIZERS
from tests.runtime.sharing import Shared, one_core
from tests.workers.sabotage import BrokenError

DEVICES, WIDTH, SHORT, LONG = range(4), 12, 2, 6
pytestmark = pytest.mark.timeout(120)


class Net(nn.Module):
    """Two stages on tokens, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.third, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = torch.tanh(self.second(torch.relu(self.first(x))))
        with piper.annotate("PP"):
            y: Tensor = self.head(torch.tanh(self.third(x)))
        return y


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batch(length: int, seed: int) -> dict[str, Tensor]:
    x = torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(-1, keepdim=True)}


def data(steps: int) -> list[dict[str, Tensor]]:
    return [batch((SHORT, LONG, LONG, SHORT)[step % 4], step) for step in range(steps)]


def stages(zero: int) -> list[Directive]:
    placed = [replicate(at(PP=n), [2 * n, 2 * n + 1], zero=zero) for n in range(2)]
    return [*placed, split(at(), axis="MB", parts=2)]


TENSOR = shard(at(), DEVICES, ways=2, axis="TP", weights={"first": 0, "second": 1})
SECOND: dict[str, list[Directive]] = {
    "replicas": [replicate(at(), DEVICES)],
    "TP x zero 3": [replicate(at(), DEVICES, zero=3), TENSOR],
    "1F1B x zero 2": [*stages(2), *one_f_one_b(stages=2, microbatches=2)],
    "zero bubble x zero 3": [*stages(3), *zero_bubble(2, 2)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCell:
    """One composition to try."""

    zero: int
    second: str
    saved: float  # of what regions save
    fp8: str  # the strategies that have it
    optimizer: str
    besides: str

    def __str__(self) -> str:
        kept = "" if self.saved == 1 else f"-remat{self.saved}"
        fp8 = f"-fp8_{self.fp8}" if self.fp8 else ""
        return f"zero{self.zero}-{self.second}{kept}{fp8}-{self.optimizer}-{self.besides}".replace(" ", "_")


def cells() -> list[LengthCell]:
    besides = ("nothing", "evaluates", "resumes", "loses a worker")
    axes = (
        range(4),
        SECOND,
        (1.0, 0.5),
        ("", "both", "first", "second"),
        ("adamw", "sgd", "adafactor"),
        besides,
    )
    names = ("zero", "second", "saved", "fp8", "optimizer", "besides")
    return [LengthCell(**dict(zip(names, each, strict=True))) for each in itertools.product(*axes)]  # type: ignore[arg-type]


def choices(cell: LengthCell) -> Choices:
    return asdict(cell)


def compiled(cell: LengthCell, shared: Shared) -> Program:
    more: list[Directive] = [] if cell.saved == 1 else [remat(at(), cell.saved)]
    narrow = [precision(at(), "fp8")]
    strategies = {
        SHORT: [
            replicate(at(), DEVICES, zero=cell.zero),
            *more,
            *(narrow if cell.fp8 in ("both", "first") else []),
        ],
        LONG: [*SECOND[cell.second], *more, *(narrow if cell.fp8 in ("both", "second") else [])],
    }
    job = piper.Job(
        model=Net,
        loss=loss,
        data=lambda: data(1),
        strategy=strategies,
        optimizer=OPTIMIZERS[cell.optimizer],
        precision="fp64",
    )
    with shared.capturing():
        program = piper.compile(job)
        program.shaped(batch(LONG, 0))
    return program


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


@pytest.mark.parametrize("cell", selected(cells(), covering(cells(), choices)))
def test_a_cell_has_the_numbers_of_one_device(
    shared: Shared, cell: LengthCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(cell, shared)
    with one_core():
        if cell.besides == "nothing":
            report = check(program, launch_inline, data(4))
            assert report.ok, report
            return
        with piper.launch(program) as run:
            losses = []
            for number, given in enumerate(data(4)):
                if number == 3:
                    run.save(tmp_path / "saved")
                losses.append(run.step(given).loss)
            state = run.state_dict()
            if cell.besides == "evaluates" and not cell.fp8:
                model = Net().double()
                model.load_state_dict(state)
                for length in (LONG, SHORT, 3):
                    wanted = loss(model, {k: v.double() for k, v in batch(length, 9).items()}).item()
                    assert run.evaluate([batch(length, 9)]).loss == pytest.approx(wanted, abs=1e-12)
        if cell.besides == "resumes":
            with piper.launch(program, resume=tmp_path / "saved") as run:
                assert run.step(data(4)[3]).loss == losses[3]
                assert all(torch.equal(value, state[name]) for name, value in run.state_dict().items())
        if cell.besides == "loses a worker":
            assert_recovers(program, losses, state, monkeypatch)


def assert_recovers(
    program: Program, losses: list[float], state: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device fails in a step of each layout, and the losses and the state are the same bits."""
    watch, breaks, trained = Watcher.watch, {2: 3, 3: 1}, list[float]()

    def watched(self: Watcher, place: int, ins: Instr, run: Bound) -> Bound:
        def act() -> None:
            if ins.op == "update" and breaks.get(len(trained)) == self.device:
                del breaks[len(trained)]
                raise BrokenError("lost")
            run()

        return watch(self, place, ins, act)

    monkeypatch.setattr(Watcher, "watch", watched)
    with recovering(program, "inline", Options(), retries=4) as run:
        for given in data(4):
            trained.append(run.step(given).loss)
        assert trained == losses and not breaks
        assert all(torch.equal(value, state[name]) for name, value in run.state_dict().items())
