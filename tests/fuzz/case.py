"""One random model under one random strategy: what it gives, and what plain PyTorch gives.

python -m tests.fuzz.case SEED    runs one case and prints it.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor, nn

import piper
from piper.compiler import compile
from piper.errors import CompilerError, PiperError
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests.fuzz.models import Model, Spec, draw_batch, draw_spec, loss_of
from tests.fuzz.strategies import Layout, directives, draw_layout

STEPS = 2  # the second works on what the first has left
TOLERANCE = 1e-9
FLOOR = 1e-6  # of the largest tensor: below it a tensor is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a strategy, drawn from a seed."""

    seed: int
    spec: Spec
    layout: Layout

    def batches(self) -> list[dict[str, Tensor]]:
        return [draw_batch(self.spec, self.layout.rows, 100 * self.seed + step) for step in range(STEPS)]

    def __str__(self) -> str:
        strategy = "\n    + ".join(self.layout.lines) or "[]"
        return (
            f"seed {self.seed}\n{self.spec}\nstrategy = {strategy}\nrows={self.layout.rows} "
            f"clip={self.layout.clip} optimizer={self.layout.optimizer}\n"
            f"again: python -m tests.fuzz.case {self.seed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The numbers that a step leaves."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


def draw(seed: int) -> Case:
    """Draw the case of a seed."""
    rng = Random(seed)
    spec = draw_spec(rng)
    return Case(seed=seed, spec=spec, layout=draw_layout(rng, spec))


def optimizer_of(layout: Layout, params: object) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = eval(layout.optimizer, {"torch": torch, "params": params})
    return made


def plainly(case: Case) -> list[Left]:
    """Train in plain PyTorch on one device: autograd over the whole batch. Nothing here is Piper's."""
    torch.manual_seed(case.seed)
    model = Model(case.spec, plain=True).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(case.layout, trained)
    found = []
    for batch in case.batches():
        optimizer.zero_grad()
        result = loss_of(case.spec, model, batch)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        limit = float("inf") if case.layout.clip is None else case.layout.clip
        norm = nn.utils.clip_grad_norm_(trained, limit)
        optimizer.step()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        found.append(Left(loss=loss.item(), norm=norm.item(), gradients=gradients, state=state))
    return found


def program_of(case: Case) -> piper.compiler.Program:
    """Compile the case."""
    return compile(
        piper.Job(
            model=lambda: Model(case.spec, plain=False),
            loss=lambda model, batch: loss_of(case.spec, model, batch),
            data=lambda: case.batches(),
            strategy=directives(case.layout),
            optimizer=lambda params: optimizer_of(case.layout, params),
            precision="fp64",
            clip_norm=case.layout.clip,
            seed=case.seed,
        ),
        device="cpu",
    )


def run(case: Case, program: piper.compiler.Program) -> list[Left]:
    """Run the case's program."""
    found = []
    with launch_inline(program, Options(keep_gradients=True)) as running:
        for batch in case.batches():
            result = running.step(batch)
            found.append(
                Left(
                    loss=result.loss,
                    norm=result.grad_norm,
                    gradients=running.gradients(),
                    state=running.state_dict(),
                )
            )
    return found


def wrong(got: Left, wanted: Left) -> str | None:
    """Say what differs first between two steps; None: nothing."""
    for name, a, b in (("loss", got.loss, wanted.loss), ("norm", got.norm, wanted.norm)):
        if not abs(a - b) <= TOLERANCE * abs(b) + 1e-15:
            return f"{name}: {a!r}, plainly {b!r}"
    for what in ("gradients", "state"):
        mine, plain = getattr(got, what), getattr(wanted, what)
        if set(mine) != set(plain):
            return f"{what}: other names: {sorted(set(mine) ^ set(plain))}"
        largest = max((value.abs().max().item() for value in plain.values()), default=0.0)
        for name, value in plain.items():
            gap = (mine[name].double() - value).abs().max().item()
            if not gap <= TOLERANCE * max(value.abs().max().item(), FLOOR * largest):
                return f"{what} of {name}: off by {gap:.3g}"
    return None


def try_case(case: Case) -> str | None:
    """Run a case; return the refusal of its strategy, or None. Raises AssertionError on a wrong number."""
    try:
        program = program_of(case)
    except PiperError as error:
        assert not isinstance(error, CompilerError), f"{error}\n{case}"
        assert "hint:" in str(error), f"a refusal without a way out: {error}\n{case}"
        return str(error)
    for step, (got, wanted) in enumerate(zip(run(case, program), plainly(case), strict=True)):
        problem = wrong(got, wanted)
        assert problem is None, f"step {step}: {problem}\n{case}"
    return None


if __name__ == "__main__":
    chosen = draw(int(sys.argv[1]))
    sys.stdout.write(f"{chosen}\n")
    sys.stdout.write(f"{try_case(replace(chosen)) or 'the numbers of plain PyTorch'}\n")
