"""`check` notices what is silently wrong.

Each test puts a defect in where nothing refuses it at compile time: capture sees a model without the hook, a
weight without its gradient, a program whose optimizer was never probed. Without the defect the check passes.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.autodiff import code, remat
from piper.capture.cost import aliases
from piper.capture.trace import assemble, cut, effects
from piper.capture.trace.annotate import annotate
from piper.check.check import Report, check
from piper.compiler import Program, compile
from piper.directives import Directive, place, replicate, split
from piper.directives import remat as remat_directive
from piper.ir.select import at
from piper.job import Job
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from piper.run.run import Run
from piper.runtime import compute
from piper.runtime.context import Env
from tests import zoo

pytestmark = pytest.mark.usefixtures("own_captures")
Batch = Mapping[str, Tensor]
DP = [replicate(at(), [0, 1])]
PARTS = [split(at(), parts=2)]


class Stages(nn.Module):
    """Two stages, with something after each layer."""

    def __init__(self, after: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), after()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            with annotate("PP"):
                x = stage(x)
        result: Tensor = self.head(x)
        return result


def job(strategy: Sequence[Directive] = (), **changes: Any) -> Job:  # noqa: ANN401
    fields: dict[str, Any] = {
        "model": Stages,
        "loss": zoo.regression,
        "data": lambda: [zoo.vectors(8, seed) for seed in range(2)],
        "strategy": [*strategy],
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "precision": "fp64",
    }
    return Job(**(fields | changes))


def checked(program: Program) -> Report:
    return check(program, launch_inline, [*program.job.data()])


def twice(gradient: Tensor) -> Tensor:
    return 2.0 * gradient


def doubled_input(module: nn.Module, given: Any, out: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    return (given[0] * 2.0,)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2.0


# Hooks on parameters, which a run drops.


class Hooked(Stages):
    """Registers its hooks only in plain PyTorch: capture sees a model without them, and so drops them."""

    hooks = True
    after = False

    def __init__(self) -> None:
        super().__init__()
        if not self.hooks or torch._guards.detect_fake_mode(self.head.weight) is not None:
            return
        if self.after:
            self.head.weight.register_post_accumulate_grad_hook(double)
        else:
            self.head.weight.register_hook(twice)


class HookedAfter(Hooked):
    after = True


@pytest.mark.parametrize("model", [Hooked, HookedAfter])
@pytest.mark.parametrize("strategy", [[], DP], ids=["one", "replicas"])
def test_a_dropped_hook_on_a_parameter(
    model: type[Hooked], strategy: list[Directive], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = checked(compile(job(strategy, model=model), device="cpu"))
    assert not report.ok
    assert "head.weight" in str(report.first_bad) or "norm" in str(report.first_bad)
    assert report.max_grad_diff == pytest.approx(0.5)
    monkeypatch.setattr(model, "hooks", False)
    assert checked(compile(job(strategy, model=model), device="cpu")).ok


def test_a_dropped_backward_hook_on_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Stages):
        hooks = True

        def __init__(self) -> None:
            super().__init__()
            if self.hooks and torch._guards.detect_fake_mode(self.head.weight) is None:
                self.head.register_full_backward_hook(doubled_input)

    assert not checked(compile(job(DP, model=Scaled), device="cpu")).ok
    monkeypatch.setattr(Scaled, "hooks", False)
    assert checked(compile(job(DP, model=Scaled), device="cpu")).ok


# A weight that depends on parameters, whose gradient a run drops.


@pytest.mark.parametrize("strategy", [[], [*DP, *PARTS]], ids=["one", "slices"])
def test_a_weight_whose_gradient_is_dropped(strategy: list[Directive]) -> None:
    keeps = False

    def weighed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        out = model(batch["x"])
        weight = out.sigmoid().sum()
        fake = torch.compiler.is_compiling()  # capture drops the gradient; plain PyTorch keeps it
        return F.mse_loss(out, batch["y"], reduction="sum"), weight.detach() if fake or keeps else weight

    program = compile(job(strategy, loss=weighed), device="cpu")
    report = checked(program)
    assert not report.ok
    assert report.max_loss_diff < 1 < 1e9 * report.max_grad_diff, "the loss of the first step is right"
    keeps = True
    assert checked(program).ok


# An optimizer that looks across tensors.


class ByNorm(torch.optim.Optimizer):
    """Scales its steps by the norm of all the gradients it sees."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm() if held else 1.0
        for parameter in held:
            parameter -= 0.1 * parameter.grad / norm


class ByPlace(torch.optim.Optimizer):
    """Steps further for later parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        for place_, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter -= 0.1 * (place_ + 1) * parameter.grad


@pytest.mark.parametrize("optimizer", [ByNorm, ByPlace])
def test_an_optimizer_that_looks_across_tensors(
    optimizer: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [place(at(PP=0), [0]), place(at(PP=1), [1])]
    pipeline = compile(job(stages), device="cpu")
    other = replace(pipeline, job=replace(pipeline.job, optimizer=optimizer))  # past the probe
    report = checked(other)
    assert not report.ok
    assert max(report.max_loss_diff, report.max_grad_diff) < 1e-14, "only the parameters show it"
    assert report.max_param_diff > 1e-3
    single = compile(job(), device="cpu")
    assert checked(replace(single, job=replace(single.job, optimizer=optimizer))).ok


# A mean of uneven slices is in test_check.py. Slices, weights and random numbers.


def sum_and_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    each = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")
    weights = batch["y"][:, :1].abs()
    return (each * weights).sum(), weights.sum()


def test_wrong_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile(job(PARTS), device="cpu")
    right = compute.slices

    def first_only(plans: Plans, samples: int, position: int, count: int, part: Any) -> Any:  # noqa: ANN401
        return right(plans, samples, position, count, tuple((axis, 0) for axis, _ in part))

    assert checked(program).ok
    monkeypatch.setattr(compute, "slices", first_only)
    assert not checked(program).ok


def test_two_axes_cut_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples in all, so that only what mixes them shows it: a sum with its weight does not."""
    strategy = [split(at(), axis="OUTER", parts=2), split(at(), axis="MB", parts=2)]
    program = compile(job(strategy, model=lambda: Stages(lambda: nn.BatchNorm1d(16))), device="cpu")

    def swapped(plans: Plans, samples: int, position: int, count: int, part: Any) -> Any:  # noqa: ANN401
        piece = samples // 4
        index = dict(part)
        number = index["MB"] * 2 + index["OUTER"]
        return [(number * piece, (number + 1) * piece)]

    assert checked(program).ok
    monkeypatch.setattr(compute, "slices", swapped)
    assert not checked(program).ok, "the running statistics see the parts in another order"


def test_a_weight_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile(job([*DP, *PARTS], loss=sum_and_weight), device="cpu")
    assert checked(program).ok
    plans = program.plans
    unweighted = replace(plans, weighted=False, seed=1 / 4)
    report = checked(replace(program, plans=unweighted))
    assert not report.ok


def dropped(p: float = 0.3) -> Callable[[], nn.Module]:
    return lambda: Stages(lambda: nn.Dropout(p))


DRAWS = {
    "every microbatch": lambda chunk, part, replica: f"{chunk}//{replica}",
    "every replica": lambda chunk, part, replica: f"{chunk}/{','.join(f'{a}={i}' for a, i in part)}/0",
    "every region": lambda chunk, part, replica: f"/{','.join(f'{a}={i}' for a, i in part)}/{replica}",
}


@pytest.mark.parametrize("same", DRAWS)
def test_the_same_mask(same: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile(job([*DP, *PARTS], model=dropped()), device="cpu")
    monkeypatch.setattr(compute, "draw_place", DRAWS[same])
    assert not checked(program).ok


def test_the_same_mask_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def still(seed: int, step: int, where: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{seed}/0/{where}".encode(), digest_size=8).digest()) >> 1

    program = compile(job(DP, model=dropped()), device="cpu")
    monkeypatch.setattr(compute, "draw_seed", still)
    report = checked(program)
    assert not report.ok
    assert "step 1" in str(report.first_bad)


def test_a_mask_that_is_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unscaled(nn.Module):
        """Scales as dropout does in plain PyTorch, and not in a capture."""

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.bernoulli(torch.full_like(x, 0.7))
            return x * kept if torch.compiler.is_compiling() else x * kept / 0.7

    assert not checked(compile(job(DP, model=lambda: Stages(Unscaled)), device="cpu")).ok


class Attends(nn.Module):
    """Attention with dropout, and nothing else that is random."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).view(-1, 4, 3, 4).unbind(2)
        out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.3)
        return out.flatten(1)


def test_attention_dropout_taken_for_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job([*DP, *PARTS], model=lambda: Stages(Attends))
    report = checked(compile(made, device="cpu"))
    assert report.ok, report
    assert report.notes == ()
    for module in (effects, assemble, cut, aliases, code, remat):
        monkeypatch.setattr(module, "draws", lambda node: False)
    assert not checked(compile(made, device="cpu")).ok


def test_a_recompute_with_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job([*PARTS, remat_directive(at(PP=0), 1.0, across="PP")], model=dropped())
    program = compile(made, device="cpu")
    assert any(ins.again for plan in program.plans for ins in plan.instrs), "there is a second run"
    report = checked(program)
    assert report.ok, report
    right = compute.seeded

    def other(env: Env, ins: Any, chunk: Any, run: Any) -> Any:  # noqa: ANN401
        return run if ins.again else right(env, ins, chunk, run)

    monkeypatch.setattr(compute, "seeded", other)
    report = checked(program)
    assert not report.ok
    assert str(report.first_bad).startswith("step 0: the gradient's norm differs by"), "not yet the loss"
    assert report.max_grad_diff > 0.1


def test_a_lost_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.compiler.is_compiling() else F.dropout(x, 0.3)

    report = checked(compile(job(DP, model=lambda: Stages(Lost)), device="cpu"))
    assert not report.ok
    assert "plain PyTorch draws random numbers at test_check_notices.py:" in str(report.first_bad)


def test_a_model_that_is_another_one_under_compile() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2 if torch.compiler.is_compiling() else x

    report = checked(compile(job(DP, model=lambda: Stages(Halved)), device="cpu"))
    assert not report.ok
    assert re.search(
        r"; the model itself has the loss \d\S+ in plain PyTorch and \d\S+ under torch.compile, "
        r"which is what Piper captures: look for what it does only where torch.compiler.is_compiling\(\)$",
        str(report.first_bad),
    ), report.first_bad


class Single(nn.Module):
    """Computes in float32, whatever the job's type."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().tanh().to(x.dtype)


@pytest.mark.parametrize("after", [Single, nn.Tanh])
def test_a_difference_that_may_be_rounding(
    after: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is smaller than the rounding of plain PyTorch itself is no difference, and nothing else."""
    gradients = Run.gradients
    made = compile(job(DP, model=lambda: Stages(after)), device="cpu")
    monkeypatch.setattr(
        Run, "gradients", lambda run: {name: g * (1 + 5e-6) for name, g in gradients(run).items()}
    )
    assert not checked(made).ok
    monkeypatch.setattr(
        Run, "gradients", lambda run: {name: g * (1 + 1e-8) for name, g in gradients(run).items()}
    )
    assert checked(made).ok is (after is Single)
