"""Modules that once failed train under PP2 x DP2 with ZeRO-3 as in plain PyTorch, in fp64."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from piper import schedules
from piper.capture.trace.annotate import annotate
from piper.capture.trace.trace import trace
from piper.compiler import compile
from piper.directives import Directive, replicate, split
from piper.errors import CaptureError, ScheduleError
from piper.ir.select import at
from piper.job import Job
from piper.run.launch import launch_inline
from tests import plain, zoo
from tests.runtime.against_plain import MICROBATCHES, PP2_DP2, difference, program, refusal

EXACT = 1e-12
Kind = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]
ZERO_BUBBLE: list[Directive] = [*PP2_DP2, *schedules.zero_bubble(stages=2, microbatches=2)]


class Two(nn.Module):
    """Two linear stages, changed by the test."""

    def __init__(self, change: Callable[["Two"], object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = torch.tanh(self.a(x))
        with annotate("PP"):
            result: Tensor = self.b(h)
        return result


class Recurrent(nn.Module):
    """Two recurrent stages over four steps of four features."""

    def __init__(self, kind: Kind, *, layers: int = 1, both: bool = False, dropout: float = 0) -> None:
        super().__init__()
        self.a = kind(4, 8, num_layers=layers, bidirectional=both, dropout=dropout, batch_first=True)
        self.b = kind(16 if both else 8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h, _ = self.a(x.view(-1, 4, 4))
        with annotate("PP"):
            h, _ = self.b(h)
            result: Tensor = self.head(h[:, -1])
        return result


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(kind: Kind) -> None:
    def model() -> nn.Module:
        return Recurrent(kind, layers=2, both=True) if kind is nn.LSTM else Recurrent(kind)

    assert difference(model, zoo.regression, zoo.vectors) < EXACT


def test_an_lstm_in_fp32() -> None:
    """On a CPU torch has another LSTM for fp32, which has no backward without autograd."""
    batch = zoo.vectors(16, 0)

    def model() -> nn.Module:
        return Recurrent(nn.LSTM)

    wanted = plain.train(model, zoo.regression, [batch])
    job = Job(model=model, loss=zoo.regression, data=lambda: [batch], strategy=PP2_DP2, optimizer=plain.sgd)
    with launch_inline(compile(job, device="cpu")) as run:
        assert run.step(batch).loss == pytest.approx(wanted.losses[0], rel=1e-5)
        assert plain.largest_difference(wanted.state, run.state_dict()) < 1e-6


@pytest.mark.parametrize(("dropout", "random"), [(0.5, True), (0.0, False)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_draws(kind: Kind, dropout: float, random: bool) -> None:
    def model() -> nn.Module:
        return Recurrent(kind, layers=2, dropout=dropout)

    chunks = trace(model, zoo.regression, zoo.vectors(2, 0), 2).outline.chunks
    assert [chunk.random for chunk in chunks] == [random, False]


@pytest.mark.parametrize("strategy", [PP2_DP2, ZERO_BUBBLE], ids=["pp", "zero-bubble"])
def test_spectral_norm(strategy: list[Directive]) -> None:
    """Its vectors change in every forward, so once for each microbatch, as BatchNorm's do."""

    def model() -> nn.Module:
        return Two(lambda m: (parametrizations.spectral_norm(m.a), parametrizations.spectral_norm(m.b)))

    assert difference(model, zoo.regression, zoo.vectors, strategy, microbatches=MICROBATCHES) < EXACT


def test_a_buffer_that_is_only_overwritten() -> None:
    """The older spectral_norm never reads one of its vectors before it writes it."""

    def model() -> nn.Module:
        return Two(lambda m: nn.utils.spectral_norm(m.a))

    assert difference(model, zoo.regression, zoo.vectors, microbatches=MICROBATCHES) < EXACT


@pytest.mark.parametrize("kind", ["householder", "matrix_exp", "cayley"])
def test_orthogonal(kind: str) -> None:
    def model() -> nn.Module:
        return Two(
            lambda m: (
                parametrizations.orthogonal(m.a, orthogonal_map=kind),
                parametrizations.orthogonal(m.b, orthogonal_map=kind),
            )
        )

    assert difference(model, zoo.regression, zoo.vectors) < EXACT


def test_weight_norm() -> None:
    def model() -> nn.Module:
        return Two(lambda m: (parametrizations.weight_norm(m.a), parametrizations.weight_norm(m.b)))

    assert difference(model, zoo.regression, zoo.vectors) < EXACT


class Spectrum(nn.Module):
    """A complex parameter, as it is or as pairs of real numbers."""

    turn: Tensor

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        w = torch.randn(16, 16, dtype=torch.complex64)
        self.w = nn.Parameter(torch.view_as_real(w) if real else w)
        self.head = nn.Linear(16, 4)
        self.register_buffer("turn", torch.polar(torch.ones(16), torch.arange(16.0)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w if self.w.is_complex() else torch.view_as_complex(self.w)
        with annotate("PP"):
            h = (x.to(w.dtype) @ w) * self.turn
        with annotate("PP"):
            result: Tensor = self.head(h.abs())
        return result


def test_complex_parameters_are_refused() -> None:
    message = refusal(CaptureError, lambda: Spectrum(real=False), zoo.regression, zoo.vectors)
    assert message == (
        "model (test_modules.py:155): the parameter w is complex\n"
        "  type: complex64\n"
        "  but:  complex parameters cannot be trained here\n"
        "  hint: hold it as real numbers: nn.Parameter(torch.view_as_real(w)), and use "
        "torch.view_as_complex(self.w) in the forward; a complex buffer may stay"
    )


def test_complex_numbers_made_of_real_parameters() -> None:
    assert difference(lambda: Spectrum(real=True), zoo.regression, zoo.vectors) < EXACT


class TiedBuffers(nn.Module):
    """Buffers under several names: read, unread, and saved under one name only."""

    scale: Tensor
    again: Tensor
    unread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.register_buffer("again", self.scale)
        self.register_buffer("unread", torch.ones(2))
        self.register_buffer("unread_too", self.unread)
        passing = torch.full((16,), 0.5)
        self.a.register_buffer("passing", passing, persistent=False)
        self.b.register_buffer("saved", passing)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = torch.tanh(self.a(x) * self.scale * self.a.get_buffer("passing"))
        with annotate("PP"):
            result: Tensor = self.b(h * self.again * self.b.get_buffer("saved"))
        return result


def test_tied_buffers_have_all_their_names(tmp_path: Path) -> None:
    assert difference(TiedBuffers, zoo.regression, zoo.vectors) < EXACT
    with launch_inline(program(TiedBuffers, zoo.regression, zoo.vectors)) as run:
        assert sorted(run.state_dict()) == [
            *("a.bias", "a.weight", "again", "b.bias", "b.saved", "b.weight"),
            *("scale", "unread", "unread_too"),
        ]
        run.save(tmp_path / "saved")
        run.load(tmp_path / "saved")
        TiedBuffers().load_state_dict(run.state_dict())


def ones(rows: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 1, generator=rng), "y": torch.randn(rows, 1, generator=rng)}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("devices", [3, 5])
def test_a_shard_of_padding_only(zero: int, devices: int, tmp_path: Path) -> None:
    """Two numbers on three and five devices: the last ones hold nothing to train."""
    strategy = [replicate(at(), [*range(devices)], zero=zero), split(at(), parts=2)]

    def model() -> nn.Module:
        return nn.Linear(1, 1)

    assert difference(model, zoo.regression, ones, strategy, optimizer=adamw, rows=30) < EXACT
    compiled = program(model, zoo.regression, ones, strategy, adamw, 30)
    with launch_inline(compiled) as run:
        run.step(ones(30, 0))
        run.save(tmp_path / "saved")
        run.step(ones(30, 1))
        after = run.state_dict()
    with launch_inline(compiled) as run:
        assert run.load(tmp_path / "saved").step == 1
        run.step(ones(30, 1))
        assert plain.largest_difference(after, run.state_dict()) == 0.0


def sizes(first: int, second: int) -> list[Directive]:
    """Two stages on sets of devices of different sizes."""
    return [
        replicate(at(PP=0), [*range(first)], zero=3),
        replicate(at(PP=1), [*range(first, first + second)], zero=2),
        split(at(), parts=2),
    ]


class Crossing(nn.Module):
    """A value without samples that one stage makes and the other reads."""

    def __init__(self, make: Callable[["Crossing", Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.scalar, self.vector = nn.Parameter(torch.tensor(-0.5)), nn.Parameter(torch.zeros(16))
        self.register_buffer("table", torch.arange(16.0) / 16)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = torch.tanh(self.a(x))
            made = self.make(self, h)
            h = h + made
        with annotate("PP"):
            result: Tensor = self.b(h * made)
        return result


WITHOUT_SAMPLES = {
    "scalar": lambda m, h: m.scalar.exp(),
    "vector": lambda m, h: m.vector.exp() * m.scalar,
    "frozen": lambda m, h: m.vector.exp().detach(),
    "table": lambda m, h: m.table.cos(),
    "filled": lambda m, h: h.new_ones(16).cumsum(0) / 16,
}


@pytest.mark.parametrize("kind", WITHOUT_SAMPLES)
@pytest.mark.parametrize("devices", [(4, 2), (2, 4)], ids=str)
def test_values_without_samples_between_sets_of_devices(kind: str, devices: tuple[int, int]) -> None:
    def model() -> nn.Module:
        return Crossing(WITHOUT_SAMPLES[kind])

    assert difference(model, zoo.regression, zoo.vectors, sizes(*devices)) < EXACT


@pytest.mark.parametrize(
    "make", [lambda m, h: h.mean(0), lambda m, h: h.mean(0).detach(), lambda m, h: h.mean()]
)
def test_values_of_one_slice_are_refused_between_sets_of_different_sizes(
    make: Callable[[Crossing, Tensor], Tensor],
) -> None:
    message = refusal(ScheduleError, lambda: Crossing(make), zoo.regression, zoo.vectors, sizes(4, 2))
    assert message.splitlines()[0].endswith("PP=0.out0 cannot be resliced by samples")


def test_a_value_of_parameters_is_made_where_it_is_read() -> None:
    def model() -> nn.Module:
        return Crossing(lambda m, h: m.scalar.exp())

    chunks = trace(model, zoo.regression, zoo.vectors(2, 0), 2).outline.chunks
    assert [(chunk.name, chunk.params, len(chunk.outputs)) for chunk in chunks] == [
        ("PP=0", ("a.weight", "a.bias", "scalar"), 1),
        ("PP=1", ("scalar", "b.weight", "b.bias"), 1),
    ]


def called_with_other_parameters(model: nn.Module, batch: plain.Batch) -> Tensor:
    """A student that follows the model itself with halved, detached parameters."""
    x = batch["x"].to(next(model.parameters()).dtype)
    halved = {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}
    wanted: Tensor = torch.func.functional_call(model, halved, (x,))
    result: Tensor = model(x)
    return (result - wanted).square().mean()


def called_with_its_own(model: nn.Module, batch: plain.Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    state: list[dict[str, Tensor]] = [dict(model.named_parameters()), dict(model.named_buffers())]
    result: Tensor = torch.func.functional_call(model, state, (batch["x"].to(dtype),))
    return (result - batch["y"].to(dtype)).square().mean()


@pytest.mark.parametrize("loss", [called_with_other_parameters, called_with_its_own])
def test_functional_call_of_the_whole_model(loss: plain.Loss) -> None:
    """It puts other tensors into the modules, and then the parameters back: nothing is replaced for good."""
    strategy = [replicate(at(), [0, 1], zero=3), split(at(), parts=2)]
    assert difference(lambda: Two(lambda _: None), loss, zoo.vectors, strategy) < EXACT


class Forces(nn.Module):
    """Returns the gradient of an energy of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            forces: Tensor = torch.func.grad(lambda at: torch.tanh(self.a(at)).square().sum())(x)
        with annotate("PP"):
            result: Tensor = self.b(forces)
        return result


def test_a_gradient_inside_the_forward() -> None:
    assert difference(Forces, zoo.regression, zoo.vectors) < EXACT
