"""Optimizers and schedulers with habits that those of torch do not have: what they train, save and resume.

Each is compared with plain PyTorch on one device, in fp64, with and without ZeRO, and after it has gone on from a
checkpoint under another degree of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import piper
from piper.checkpoint.load import Values
from piper.checkpoint.plain_state import FORMATS
from piper.compiler import Program
from piper.errors import ConfigError
from piper.train.other_programs import export_state, import_start
from tests import plain
from tests.optimizers import CountsInGroups, CountsInState, by_values

Make = Callable[[Iterable[Tensor]], Optimizer]
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return y


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]) - 0.5).square().mean()
    return found


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


class Each(Optimizer):
    """What the optimizers below share: each says how far a step moves one parameter."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, **defaults: object) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, self.direction(group, p), group["lr"])

    def move(self, p: Tensor, direction: Tensor, rate: float) -> None:
        p.sub_(direction, alpha=rate)

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad

    def averaged(self, p: Tensor, name: str, like: Tensor) -> Tensor:
        """Return a momentum that is kept in the shape of a tensor."""
        kept: Tensor = self.state[p].setdefault(name, torch.zeros_like(like))
        return kept.mul_(0.9).add_(like)


class AssignsData(Each):
    """Gives a parameter other memory in each step."""

    def move(self, p: Tensor, direction: Tensor, rate: float) -> None:
        p.data = p.data - rate * direction

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return self.averaged(p, "momentum", p.grad)


class Counts(Each):
    """Counts steps in its state under a name, where torch has parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.state["steps"] = 0  # type: ignore[index]
        self.state["also"] = torch.zeros(1, dtype=torch.float64)  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["steps"] += 1  # type: ignore[index]
        self.state["also"] += 1  # type: ignore[index]
        super().step()

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad / (self.state["steps"] + self.state["also"])  # type: ignore[index, no-any-return]


class Remembers(Each):
    """Keeps the last gradients in a list, a tuple, a dict and a deque."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        state, zero = self.state[p], torch.zeros_like(p)
        state["list"] = [*state.get("list", []), p.grad.clone()][-2:]
        state["tuple"] = (state.get("tuple", (0, zero))[0] + 1, p.grad.clone())
        rates = state.setdefault("rates", {0.5: zero.clone(), 0.9: zero.clone()})
        for rate, kept in rates.items():
            kept.mul_(rate).add_(p.grad)
        state.setdefault("queue", deque([zero.clone()], 2)).append(p.grad.clone())
        count, last = state["tuple"]
        all_of_them = [*state["list"], last / count, *rates.values(), *state["queue"]]
        return torch.stack(all_of_them).sum(0)


class Flat(Each):
    """Keeps a momentum in another shape than the parameter's."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return self.averaged(p, "momentum", p.grad.flatten()).view(p.shape)


class Turned(Each):
    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return self.averaged(p, "momentum", p.grad.movedim(0, -1)).movedim(-1, 0)


class Factored(Each):
    """Keeps one number for each row, and one for each column."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        squares = p.grad.square().reshape(len(p), -1)
        row = self.averaged(p, "row", squares.mean(1))
        column = self.averaged(p, "column", squares.mean(0, keepdim=True))
        return p.grad / (1e-3 + (row[:, None] * column).sqrt().view(p.shape))


class OneNumber(Each):
    """Keeps one number for each parameter: that of its steps, in a tensor with an axis."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad / self.averaged(p, "steps", torch.ones(1, dtype=p.dtype))


class Sparse(Each):
    """Keeps every third element, which lie apart in memory."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        kept = self.state[p].setdefault("start", p.detach().clone().flatten()[::30])
        scale: Tensor = 1 + kept.square().mean()
        return p.grad * scale


TRAITS = (AssignsData, Counts, Remembers, Flat, Turned, Factored, OneNumber, Sparse)
OPTIMIZERS: dict[str, Make] = {
    each.__name__: each for each in (*TRAITS, by_values, CountsInGroups, CountsInState)
}


def job(make: Make, zero: int | None, scheduler: Callable[[Optimizer], Any] | None = None) -> piper.Job:
    return piper.Job(
        model=Net,
        loss=loss,
        data=lambda: [rows(seed) for seed in range(STEPS)],
        strategy=[] if zero is None else [piper.replicate(piper.at(), [0, 1], zero=zero)],
        optimizer=make,
        scheduler=scheduler,
        precision="fp64",
    )


def alone(
    make: Make, scheduler: Callable[[Optimizer], Any] | None = None, model: Callable[[], nn.Module] = Net
) -> dict[str, Tensor]:
    """Train in plain PyTorch, without Piper."""
    torch.manual_seed(0)
    net = model().double()
    optimizer = make([*net.parameters()])
    schedule = None if scheduler is None else scheduler(optimizer)
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss(net, rows(seed)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return net.state_dict()


def check(program: Program, resumed: Iterable[Program], wanted: Mapping[str, Tensor], folder: Path) -> None:
    """Compare a program, and others that go on from its checkpoint, with plain PyTorch."""
    with piper.launch(program) as run:
        for seed in range(2):
            run.step(rows(seed))
        run.save(folder / "saved")
        for seed in range(2, STEPS):
            run.step(rows(seed))
        assert plain.largest_difference(wanted, run.state_dict()) < 1e-12
    for other in resumed:
        with piper.launch(other, resume=folder / "saved") as run:
            for seed in range(2, STEPS):
                run.step(rows(seed))
            assert plain.largest_difference(wanted, run.state_dict()) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_and_resumes_as_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    wanted = alone(make)
    programs = {zero: piper.compile(job(make, zero)) for zero in (None, 0, 3)}
    for zero, program in programs.items():
        check(program, programs.values(), wanted, tmp_path / str(zero))


class Uneven(nn.Module):
    """Of 8 elements, the second of two devices has one of the first five, and the three others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.first).sum(-1, keepdim=True) * self.second


def test_one_number_is_no_element_where_a_device_has_one_of_many(tmp_path: Path) -> None:
    uneven = [replace(job(OneNumber, zero), model=Uneven) for zero in (1, None)]
    programs = [piper.compile(each) for each in uneven]
    (bucket,) = programs[0].plans.buckets.values()
    assert [high - low for _, low, high in bucket.update.pieces_in(*bucket.update.owned(1))] == [1, 3]
    check(programs[0], programs, alone(OneNumber, model=Uneven), tmp_path)


class Renamed(nn.Module):
    """Leaves its own name out of its `state_dict`, which has something more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.register_state_dict_post_hook(self.rename)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y

    def get_extra_state(self) -> object:
        return {"version": 1}

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in [*state]:
            state[name.removeprefix("inner.")] = state.pop(name)


@pytest.mark.parametrize("form", FORMATS)
def test_names_that_a_model_gives_its_values_when_it_is_saved(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(job(Flat, 0), model=Renamed, checkpoint=piper.Checkpoint(folder="checkpoints"))
    with piper.launch(piper.compile(here)) as run:
        for seed in range(2):
            run.step(rows(seed))
        run.save(tmp_path / "saved")
    export_state(here, Values(tmp_path / "saved"), tmp_path / "out", form=form, dtype=None)
    assert capsys.readouterr().err == "left out: what the model's state_dict() adds (_extra_state)\n"
    if form == "torch":
        assert torch.load(tmp_path / "out/checkpoint.pt")["model"].keys() == Net().state_dict().keys()
    back = import_start("traits", here, tmp_path / "out", tmp_path / "run")
    with piper.launch(piper.compile(here), resume=back.folder) as run:
        for seed in range(2, STEPS):
            run.step(rows(seed))
        wanted = {f"inner.{name}": value for name, value in alone(Flat).items()}
        assert plain.largest_difference(wanted, run.state_dict()) < 1e-12


class Adaptive(Each):
    """Adapts its rate to all parameters, as Prodigy does: by a sum that it keeps in its groups."""

    def __init__(self, params: Iterable[Tensor], beyond: float = 0.0) -> None:
        super().__init__(params, total=0.0, beyond=beyond)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] += sum(float(p.grad.square().sum()) for p in group["params"] if p.grad is not None)
        super().step()

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad * (1.0 if group["total"] < group["beyond"] else 0.5)


@pytest.mark.parametrize("beyond", [0.1, 1e9])
def test_a_rate_of_all_parameters_needs_them_all(beyond: float, tmp_path: Path) -> None:
    def make(params: Iterable[Tensor]) -> Optimizer:
        return Adaptive(params, beyond)

    programs = [piper.compile(job(make, zero)) for zero in (None, 0)]
    for number, program in enumerate(programs):
        check(program, programs, alone(make), tmp_path / str(number))
    why = "what it keeps for all parameters together differs" if beyond == 1e9 else "in another way"
    with pytest.raises(ConfigError, match=why):
        piper.compile(job(make, 1))


class OfShards(Each):
    """Keeps the norm of each tensor, which it would use much later."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad if self.averaged(p, "norm", p.grad.norm()) < 1e9 else p.grad / 2


class Late(Each):
    """Looks at whole tensors from the eleventh step on."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return p.grad / (p.grad.abs().max() if self.state[p]["step"] > 10 else 1)


@pytest.mark.parametrize("make", [OfShards, Late])
def test_a_tensor_that_is_needed_whole_is_noticed_before_it_is(make: Make) -> None:
    program = piper.compile(job(make, 1))
    assert all(bucket.bounds for bucket in program.plans.buckets.values() if bucket.trainable)


class Halving:
    """A scheduler that only has the methods of one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps, self.stepped = 0, optimizer

    def step(self) -> None:
        self.steps += 1
        for group in self.stepped.param_groups:
            group["lr"] = 0.1 * 0.5**self.steps

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


def test_a_scheduler_needs_no_more_than_its_methods(tmp_path: Path) -> None:
    program = piper.compile(job(Each, 1, Halving))
    check(program, [program], alone(Each, Halving), tmp_path)


@pytest.mark.parametrize("name", ["Remembers", "Flat", "Sparse"])
def test_what_is_kept_goes_on_in_plain_pytorch_and_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = OPTIMIZERS[name]
    here = replace(job(make, 3), checkpoint=piper.Checkpoint(folder="checkpoints"))
    with piper.launch(piper.compile(here)) as run:
        for seed in range(2):
            run.step(rows(seed))
        run.save(tmp_path / "saved")
    export_state(here, Values(tmp_path / "saved"), tmp_path / "out", form="torch", dtype=None)
    saved = torch.load(tmp_path / "out/checkpoint.pt", weights_only=False)
    model = Net().double()
    optimizer = make([*model.parameters()])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for values in optimizer.state.values():
        if "queue" in values:  # torch forgets its length
            values["queue"] = deque(values["queue"], 2)
    for seed in range(2, STEPS):
        optimizer.zero_grad()
        loss(model, rows(seed)).backward()
        optimizer.step()
    assert plain.largest_difference(alone(make), model.state_dict()) < 1e-12
    if name == "Remembers":
        with pytest.raises(ConfigError, match="keeps tensors in lists or dicts, for which this format"):
            export_state(here, Values(tmp_path / "saved"), tmp_path / "dcp", form="dcp", dtype=None)
        assert not (tmp_path / "dcp").exists()
        file = tmp_path / "out/checkpoint.pt"
        for left_out, why in (
            ((), "it holds a collections.deque"),
            (("queue",), "keeps tensors in lists, tuples or dicts"),
            (("queue", "list", "rates"), "keeps tensors in lists, tuples or dicts"),
        ):
            for kept in saved["optimizer"]["state"].values():
                for key in left_out:
                    kept.pop(key, None)
            torch.save(saved, file)
            with pytest.raises(ConfigError, match=why):
                import_start("traits", here, file, tmp_path / "run")
        return
    back = import_start("traits", here, tmp_path / "out", tmp_path / "run")
    with piper.launch(piper.compile(here), resume=back.folder) as run:
        for seed in range(2, STEPS):
            run.step(rows(seed))
        assert plain.largest_difference(alone(make), run.state_dict()) < 1e-12
    assert not capsys.readouterr().err


def test_an_export_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = job(Counts, None)
    with piper.launch(piper.compile(counts)) as run:
        run.step(rows(0))
        run.save(tmp_path / "saved")
    for form in FORMATS:
        export_state(counts, Values(tmp_path / "saved"), tmp_path / form, form=form, dtype=None)
        name = f"{__name__}.Counts"
        assert capsys.readouterr().err == f"left out: what {name} keeps for no parameter (state)\n"


class Unsaveable(Each):
    """Keeps an object of its own."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        self.state[p]["self"] = self
        return p.grad


class Wraps(Each):
    """Keeps the whole `state_dict` of another optimizer, in which parameters have numbers."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {**state_dict}
        self.inner.load_state_dict(state.pop("inner"))
        super().load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "zero", "message"),
    [
        (Unsaveable, 1, "a part of the state cannot be written down"),
        (Wraps, 1, "devices differ in what it keeps outside"),
    ],
)
def test_a_save_that_is_refused_leaves_nothing_behind(
    make: Make, zero: int, message: str, tmp_path: Path
) -> None:
    with piper.launch(piper.compile(job(make, zero))) as run:
        run.step(rows(0))
        with pytest.raises(ConfigError, match=message) as refused:
            run.save(tmp_path / "new" / "saved")
        assert [*(tmp_path / "new").iterdir()] == []
        run.step(rows(1))
    assert "make room" not in str(refused.value)


class HalvingBy(Halving):
    """Has an object in its `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "self": self}


@pytest.mark.parametrize(("make", "scheduler", "done"), [(Unsaveable, None, 1), (Each, HalvingBy, 0)])
def test_a_state_that_cannot_be_saved_is_said_at_the_first_step(
    make: Make, scheduler: Callable[[Optimizer], Any] | None, done: int, tmp_path: Path
) -> None:
    saved = replace(job(make, 1, scheduler), checkpoint=piper.Checkpoint(folder=str(tmp_path), every=100))
    with piper.launch(piper.compile(saved)) as run:
        with pytest.raises(ConfigError, match="a part of the state cannot be written down"):
            list(run.train(3))
        assert run.done == done
    assert [*tmp_path.iterdir()] == []


def test_state_that_does_not_fit_is_an_error_of_the_load(tmp_path: Path) -> None:
    check(piper.compile(job(Wraps, 0)), [piper.compile(job(Wraps, None))], alone(Wraps), tmp_path)
    with (
        pytest.raises(ConfigError, match=r"Wraps.load_state_dict\(\) failed"),
        piper.launch(piper.compile(job(Wraps, 3)), resume=tmp_path / "saved"),
    ):
        pass


def test_a_differentiable_step_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        piper.compile(job(lambda params: torch.optim.AdamW(params, differentiable=True), None))
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "AdamW(params" in text
    )
    assert str(refused.value) == cleandoc(f"""
        optimizer (test_optimizer_traits.py:{line}): AdamW cannot be used with differentiable=True
          why:  such a step is part of a graph for autograd, which no parameter of a model can be in
          hint: leave differentiable out: the step is the same
    """)
