"""A checkpoint goes on in a job that trains other parameters of the same model: frozen parts, and turns."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piper import at
from piper.checkpoint.load import Values
from piper.compiler import Program, compile
from piper.directives import Directive, replicate, split
from piper.ir.dtypes import JobPrecision
from piper.job import Job
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from piper.workers.transport.versions import Versions
from tests import zoo

GIVEN = [zoo.vectors(8, seed) for seed in range(7)]
ZERO0 = [replicate(at(), [0, 1], zero=0)]
ZERO3 = [replicate(at(), [0, 1], zero=3)]
STAGES = [
    replicate(at(PP=[0, 1]), [0, 1], zero=3),
    replicate(at(PP=[2, 3]), [2, 3], zero=1),
    split(at(), parts=2),
]
FROZEN = ("layers.0", "layers.2.bias", "layers.3")


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def square(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    error: Tensor = model(batch["x"]) - batch["y"]
    return error.square().mean()


def program(strategy: Sequence[Directive], *frozen: str, precision: JobPrecision = "fp64") -> Program:
    return compile(
        Job(
            model=lambda: zoo.freeze(zoo.MLP(4), *frozen) if frozen else zoo.MLP(4),
            loss=square,
            data=lambda: GIVEN,
            strategy=strategy,
            optimizer=adamw,
            precision=precision,
        )
    )


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One step of plain PyTorch. A frozen parameter has no gradient, so AdamW leaves it and its state."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def in_turns(
    turns: Iterable[tuple[Program, int, int]], alone: nn.Module, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """Train programs, each from a step to a step and on from the checkpoint of the one before.

    Return all losses and the last state. alone: a model that gets the values of the beginning.
    """
    losses, state = list[float](), dict[str, Tensor]()
    for turn, (made, begin, end) in enumerate(turns):
        with launch_inline(made, Options(blank=turn > 0)) as run:
            if turn:
                assert run.load(folder / f"{turn - 1}").step == begin
            else:
                alone.load_state_dict(run.state_dict())
            losses += [run.step(batch).loss for batch in GIVEN[begin:end]]
            run.save(folder / f"{turn}")
            state = run.state_dict()
    return losses, state


def in_float64(batch: zoo.Batch) -> zoo.Batch:
    return {name: value.double() for name, value in batch.items()}


@pytest.mark.parametrize(
    ("first", "then", "last"), [(ZERO0, ZERO3, STAGES), (ZERO3, STAGES, ZERO0)], ids=["zero0", "zero3"]
)
def test_a_part_is_frozen_for_a_while(
    first: Sequence[Directive],
    then: Sequence[Directive],
    last: Sequence[Directive],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with one AdamW in a plain loop, where parts lose and regain `requires_grad`."""
    alone = zoo.MLP(4).double()
    jobs = [(program(first), 0, 3), (program(then, *FROZEN), 3, 5), (program(last), 5, 7)]
    losses, state = in_turns(jobs, alone, tmp_path)
    optimizer, expected = adamw(alone.parameters()), list[float]()
    for step, batch in enumerate(map(in_float64, GIVEN)):
        zoo.freeze(alone, *(FROZEN if 3 <= step < 5 else ("none of them",)))
        expected.append(step_alone(alone, optimizer, square(alone, batch)))
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-13)
    was = "was saved with other parameters trained"
    named = "(layers.0.weight, layers.0.bias, layers.2.bias, and 2 more)"
    assert [record.getMessage() for record in caplog.records if record.name == "piper"] == [
        f"{tmp_path / '0'} {was}: 5 are frozen, and later checkpoints keep their state {named}",
        f"{tmp_path / '1'} {was}: 5 go on with the state they had when they were frozen {named}",
    ]


class Gan(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def frozen_gan(part: str) -> nn.Module:
    return zoo.freeze(Gan(), part)


def deceive(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.softplus(-model.d(model.g(batch["x"]))).mean()  # type: ignore[operator]


def discern(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    made, real = model.d(model.g(batch["x"])), model.d(batch["y"])  # type: ignore[operator]
    return (nn.functional.softplus(made) + nn.functional.softplus(-real)).mean()


def two_rates(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    pairs = [*named]
    rates = {"g.": 0.01, "d.": 0.03}
    groups = [
        {"params": [value for name, value in pairs if name.startswith(part)], "lr": rate}
        for part, rate in rates.items()
    ]
    return torch.optim.AdamW(groups)


def test_two_parts_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with an optimizer for each part in a plain loop: neither loses what the other's turns do not use."""
    generator, discriminator = (
        compile(
            Job(
                model=partial(frozen_gan, frozen),
                loss=loss,
                data=lambda: GIVEN,
                strategy=strategy,
                optimizer=two_rates,  # type: ignore[arg-type]  # its argument's name asks for pairs
                precision="fp64",
            )
        )
        for frozen, loss, strategy in (("d.", deceive, ZERO3), ("g.", discern, ZERO0))
    )
    alone = Gan().double()
    turns = [(generator, 0, 2), (discriminator, 2, 4), (generator, 4, 5), (discriminator, 5, 7)]
    losses, state = in_turns(turns, alone, tmp_path)
    own = {"g.": torch.optim.AdamW(alone.g.parameters(), lr=0.01)}
    own["d."] = torch.optim.AdamW(alone.d.parameters(), lr=0.03)
    expected = list[float]()
    for batch, part in zip(map(in_float64, GIVEN), ("g.", "g.", "d.", "d.", "g.", "d.", "d."), strict=True):
        loss = (deceive if part == "g." else discern)(alone, batch)
        expected.append(step_alone(alone, own[part], loss))
        alone.zero_grad(set_to_none=True)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-13)
    first = next(record.getMessage() for record in caplog.records if record.name == "piper")
    assert first == (
        f"{tmp_path / '0'} was saved with other parameters trained: 4 begin with a fresh state of the optimizer "
        "(d.0.weight, d.0.bias, d.2.weight, and 1 more); 4 are frozen, and later checkpoints keep their state "
        "(g.0.weight, g.0.bias, g.2.weight, and 1 more)"
    )


def test_types_follow_what_is_trained(tmp_path: Path) -> None:
    """Under bf16 a trained parameter is saved in float32, and a frozen one in bf16: each loads as the other."""
    whole, part = program(ZERO3, precision="bf16"), program(ZERO0, *FROZEN, precision="bf16")
    with launch_inline(whole) as run:
        run.step(GIVEN[0])
        run.save(tmp_path / "a")
        exact = run.state_dict()
    with launch_inline(part, Options(blank=True)) as run:
        run.load(tmp_path / "a")
        frozen = run.state_dict()
        run.save(tmp_path / "b")
    assert torch.equal(frozen["layers.0.weight"], exact["layers.0.weight"].bfloat16())
    assert torch.equal(frozen["layers.1.weight"], exact["layers.1.weight"])
    with launch_inline(whole, Options(blank=True)) as run:
        run.load(tmp_path / "b")
        assert torch.equal(run.state_dict()["layers.0.weight"], frozen["layers.0.weight"].float())


def test_the_state_of_frozen_parameters_survives_a_recovery(tmp_path: Path) -> None:
    """It is part of the versions in memory from which lost workers go on."""
    part = program(ZERO3, *FROZEN)
    with launch_inline(program(ZERO0)) as run:
        run.step(GIVEN[0])
        run.save(tmp_path / "a")
    versions = Versions(part.plans)
    with launch_inline(part, Options(blank=True), versions.files) as run:
        run.load(tmp_path / "a")
        run.session.protect()
        unread = dict(run.session.unread)
    with launch_inline(part, Options(), versions.files) as run:
        run.session.restore(1, unread)
        run.save(tmp_path / "b")
    versions.close()
    saved, again = (Values(tmp_path / name) for name in ("a", "b"))
    assert again.record.moments == saved.record.moments
    shape = saved.record.model["layers.0.weight"].shape
    kept = (one.tensor("optimizer.layers.0.weight.exp_avg", shape, torch.float64) for one in (saved, again))
    assert torch.equal(*kept)
