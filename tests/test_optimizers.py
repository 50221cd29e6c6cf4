"""Optimizers as people write them: groups by name and shape, and those that need whole tensors, under ZeRO."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import piper
from piper.callbacks import EMA
from piper.compiler import Program
from piper.errors import ConfigError
from piper.plan.prove import ProofError
from piper.plan.text import read_plans, show_plans
from piper.proof.values import prove_values
from piper.runtime.trainers import takes_pairs
from tests import plain
from tests.optimizers import Cooling

Make = Callable[..., Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 6)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            h = self.norm(torch.tanh(self.first(x)))
        with piper.annotate("PP"):
            y: Tensor = self.last(torch.tanh(self.second(h)))
            return y


class Matrices(Net):
    """Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.ndim == 2 or "norm" in name)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]) - 0.5).square().mean()
    return found


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def four_devices(zero: int) -> list[piper.Directive]:
    return [
        *(piper.replicate(piper.at(PP=i), [2 * i, 2 * i + 1], zero=zero) for i in range(2)),
        piper.split(piper.at(), parts=2),
    ]


def by_axes(params: Iterable[Tensor]) -> Optimizer:
    params = list(params)
    matrices = [p for p in params if p.ndim >= 2]
    others = [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def by_name(named: Iterable[tuple[str, Tensor]]) -> Optimizer:
    pairs = list(named)
    first = [p for name, p in pairs if name.startswith("first.")]
    rest = [p for name, p in pairs if not name.startswith("first.")]
    groups: list[dict[str, object]] = [{"params": rest}, {"params": first, "lr": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def by_names_of(params: Iterable[Tensor]) -> Optimizer:
    return by_name(params.named_parameters())  # type: ignore[attr-defined]


def muon(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.05, weight_decay=0.1)


def adafactor(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


class Shampoo(Optimizer):
    """Preconditions each matrix from both sides, as Shampoo does."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                step = p.grad
                for axis in range(p.ndim):
                    flat = p.grad.movedim(axis, 0).reshape(p.shape[axis], -1)
                    kept = self.state[p].setdefault(f"side{axis}", 0.1 * torch.eye(len(flat)).to(p))
                    kept += flat @ flat.T
                    values, vectors = torch.linalg.eigh(kept)
                    root = vectors @ torch.diag(values.pow(-0.5 / p.ndim)) @ vectors.T
                    step = torch.tensordot(root, step, dims=([1], [axis])).movedim(0, axis)
                p.sub_(step, alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "axes": by_axes,
    "pairs": by_name,
    "names": by_names_of,
    "muon": muon,
    "adafactor": adafactor,
    "shampoo": Shampoo,
    "cooling": Cooling,
}
WHOLE = ("muon", "adafactor", "shampoo")


def job(name: str, zero: int) -> piper.Job:
    return piper.Job(
        model=Matrices if name == "muon" else Net,
        loss=loss,
        data=lambda: [rows(seed) for seed in range(4)],
        strategy=four_devices(zero),
        optimizer=OPTIMIZERS[name],
        precision="fp64",
    )


def alone(name: str) -> dict[str, Tensor]:
    """Train in plain PyTorch, without Piper."""
    torch.manual_seed(0)
    model = (Matrices if name == "muon" else Net)().double()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    pairs = name in ("pairs", "names")
    make: Make = by_name if pairs else OPTIMIZERS[name]
    given: list[object] = [pair if pairs else pair[1] for pair in named]
    optimizer = make(given)
    for seed in range(4):
        optimizer.zero_grad()
        loss(model, rows(seed)).backward()
        optimizer.step()
    return model.state_dict()


def trained(program: Program) -> dict[str, Tensor]:
    with piper.launch(program) as run:
        list(run.train(4))
        return run.state_dict()


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        *(pytest.param(n, z, marks=pytest.mark.slow) for n in OPTIMIZERS for z in (0, 1, 2)),
        *((n, 3) for n in OPTIMIZERS),
    ],
)
def test_it_trains_as_in_plain_pytorch(name: str, zero: int) -> None:
    program = piper.compile(job(name, zero))
    assert plain.largest_difference(alone(name), trained(program)) < 1e-9
    cut = [bool(bucket.bounds) for bucket in program.plans.buckets.values() if bucket.trainable]
    assert all(cut) if name in WHOLE and zero else not any(cut)


class Averages:
    """An exponential moving average of the trained parameters, in plain PyTorch."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in named:
            old = self.values.get(name, value.detach())
            self.values[name] = 0.75 * old + 0.25 * value.detach()


@pytest.mark.parametrize("zero", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_averages_and_momentum_are_those_of_plain_pytorch(name: str, zero: int) -> None:
    ema = EMA(0.75)
    size = 1e-4 if zero else None  # with one bucket, some of its parameters are not the optimizer's
    small = [
        *(piper.replicate(piper.at(PP=i), [2 * i, 2 * i + 1], zero=zero, bucket_mb=size) for i in range(2)),
        piper.split(piper.at(), parts=2),
    ]
    program = piper.compile(replace(job(name, zero), strategy=small, callbacks=[ema]))
    bounds = [bucket.bounds for bucket in program.plans.buckets.values() if bucket.bounds]
    assert any(each[1] == 0 for each in bounds) == bool(zero), "a first device owns nothing of a bucket"
    with piper.launch(program) as run:
        list(run.train(3))
        averages, momentum = ema.averages(run), run.optimizer_state("momentum_buffer")
    torch.manual_seed(0)
    model = (Matrices if name == "muon" else Net)().double()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    trained = [n for n, p in model.named_parameters() if p.ndim == 2 or (name != "muon" and p.requires_grad)]
    wanted = Averages()
    for seed in range(3):
        optimizer.zero_grad()
        loss(model, rows(seed)).backward()
        optimizer.step()
        wanted.take((n, p) for n, p in model.named_parameters() if n in trained)
    assert plain.largest_difference({**model.state_dict(), **wanted.values}, averages) < 1e-9
    named = dict(model.named_parameters())
    kept = {n: optimizer.state[named[n]].get("momentum_buffer") for n in trained}
    assert plain.largest_difference({n: v for n, v in kept.items() if v is not None}, momentum) < 1e-9


@pytest.fixture(scope="module")
def program() -> Program:
    return piper.compile(job("adafactor", 3))


def test_each_matrix_has_one_owner(program: Program) -> None:
    for bucket in program.plans.buckets.values():
        held = [0] * bucket.group_size
        for piece in bucket.pieces:
            start, stop = bucket.shard(bucket.owner(piece))
            assert start <= piece.offset <= piece.offset + piece.numel <= stop
            held[bucket.owner(piece)] += piece.numel
        assert all(held), "both devices have something to update"


def test_the_proof_notices_a_parameter_that_is_cut_apart(program: Program) -> None:
    plans = program.plans
    name, bucket = next(iter(plans.buckets.items()))
    for bounds, why in (
        ((0, 1, bucket.numel), "cuts first.weight apart, which its optimizer needs whole"),
        ((), "has no shard for each of its 2 owners"),
        ((0, bucket.numel, bucket.numel + 1), f"hold 0 to {bucket.numel + 1} of {bucket.numel} elements"),
    ):
        edited = {**plans.buckets, name: replace(bucket, bounds=bounds)}
        with pytest.raises(ProofError) as error:
            prove_values(replace(plans, buckets=edited), program.graph, whole=True)
        assert why in str(error.value)


def test_bounds_stand_in_the_text_of_a_plan(program: Program) -> None:
    assert read_plans(show_plans(program.plans)).buckets == program.plans.buckets


def test_a_checkpoint_of_whole_tensors_goes_on_under_another_strategy(
    program: Program, tmp_path: Path
) -> None:
    with piper.launch(program) as run:
        list(run.train(2))
        run.save(tmp_path / "saved")
    other = piper.compile(
        piper.Job(model=Net, loss=loss, data=lambda: [rows(0)], optimizer=adafactor, precision="fp64")
    )
    with piper.launch(other, resume=tmp_path / "saved") as run:
        for seed in (2, 3):
            run.step(rows(seed))
        state = run.state_dict()
    assert plain.largest_difference(alone("adafactor"), state) < 1e-9


def test_state_that_belongs_to_no_parameter_goes_on_under_another_strategy(tmp_path: Path) -> None:
    with piper.launch(piper.compile(job("cooling", 3))) as run:
        list(run.train(2))
        run.save(tmp_path / "saved")
    other = piper.compile(replace(job("cooling", 0), strategy=[]))
    with piper.launch(other, resume=tmp_path / "saved") as run:
        for seed in (2, 3):
            run.step(rows(seed))
        state = run.state_dict()
    assert plain.largest_difference(alone("cooling"), state) < 1e-12


class Counting(torch.optim.SGD):
    """Says in its `state_dict` how many parameters it has, of which each device has others."""

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "numbers": [p.numel() for p in self.param_groups[0]["params"]]}


def test_state_outside_of_parameters_that_differs_by_device_is_not_saved(tmp_path: Path) -> None:
    counting = replace(job("cooling", 3), optimizer=lambda params: Counting(params, lr=0.1))
    with piper.launch(piper.compile(counting)) as run:
        list(run.train(1))
        with pytest.raises(ConfigError, match="devices differ in what it keeps outside"):
            run.save(tmp_path / "saved")
    assert not [*tmp_path.glob("saved/*.json")]


def test_whole_tensors_are_evaluated_where_they_are(program: Program) -> None:
    with piper.launch(program) as run:
        list(run.train(1))
        got = run.evaluate([rows(9)]).loss
        model = Net().double()
        model.load_state_dict(run.state_dict())
    assert got == pytest.approx(loss(model, rows(9)).item(), abs=1e-12)
    assert math.isfinite(got)


class Factory:
    """Makes an optimizer from pairs of a name and a parameter. It has an attribute that callbacks have too."""

    make = "adamw"

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> Optimizer:
        return by_name(named)


def test_an_object_is_asked_itself_what_it_takes() -> None:
    factory: Make = Factory()
    assert takes_pairs(factory)
    assert takes_pairs(EMA().wrap_optimizer(factory))
    assert not takes_pairs(EMA().wrap_optimizer(torch.optim.SGD))


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS cannot be used: its step\(\) needs a closure"):
        piper.compile(
            piper.Job(
                model=Net, loss=loss, data=lambda: [rows(0)], optimizer=lambda p: torch.optim.LBFGS(list(p))
            )
        )
