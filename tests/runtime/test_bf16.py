"""In bf16 a strategy is as exact as one device is: their errors, seen from fp64, are of one size.

Both round the same numbers 2**-9 at a time, in sums of another order, so the two differ by about what each is
off. A fixed tolerance would have to be wide enough for the worst model; this one is the model's own.
SGD, because AdamW turns the rounding of a gradient near zero into a step of full length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from piper.check.check import numbers
from piper.check.reference import Reference
from piper.compiler import Program
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import zoo
from tests.runtime.grid import SHAPES, Cell, batches
from tests.runtime.sharing import Shared, one_core
from tests.runtime.test_matrix import parts

STEPS = 2  # the second works on what the first has left
TOGETHER, EACH = 1.5, 2.0  # how much larger the error may be: of all tensors, and of any one
NAMES = (
    *("moe", "llama_hf", "qwen3_hf", "qwen3_moe_hf"),
    *("decoder", "dropout", "convnet", "frozen"),
    *("encoder_decoder", "frozen_stage", "sum_weight", "decoder_untied"),
)
ROUNDING = 2**-8  # of a number in bf16: an error below it, on either side, is luck


def sgd(params: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def errors(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor is from the exact one."""
    return {
        name: (got[name].double() - value).norm().item()
        for name, value in exact.items()
        if value.is_floating_point()
    }


def assert_each(got: Mapping[str, Tensor], single: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """No tensor is much further off than on one device."""
    assert got.keys() == single.keys() == exact.keys()
    mine, theirs = errors(got, exact), errors(single, exact)
    for name, error in mine.items():
        usual = max(theirs[name], ROUNDING * exact[name].norm().item())
        assert error <= EACH * usual, (name, error, theirs[name])


def assert_together(
    got: Mapping[str, Tensor], single: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> None:
    """All tensors, as one vector, are no further off than on one device."""
    mine, theirs = error_together(got, exact), error_together(single, exact)
    assert mine <= TOGETHER * theirs, (mine, theirs)


def error_together(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """How far all tensors are from the exact ones, as one vector."""
    return float(sum(error**2 for error in errors(got, exact).values()) ** 0.5)


def assert_number(got: float, exact: float, usual: float) -> None:
    assert abs(got - exact) <= EACH * max(usual, ROUNDING * abs(exact)), (got, exact, usual)


def in_fp64(program: Program, shared: Shared, cell: Cell) -> Program:
    """A program that a reference can run in fp64: only random numbers come from what was captured."""
    if any(chunk.random for chunk in program.outline.chunks):
        return shared.compile(cell, precision="fp64", optimizer=sgd)
    return replace(program, job=replace(program.job, precision="fp64"))


def assert_rounds_alike(cell: Cell) -> None:
    shared, given = Shared(), batches(cell, STEPS)
    program = shared.compile(cell, precision="bf16", optimizer=sgd)
    exact = numbers(Reference(in_fp64(program, shared, cell), sliced=True), given)
    single = numbers(Reference(program, sliced=True), given)
    with launch_inline(program, Options(keep_gradients=True)) as run:
        for step, (batch, one, true) in enumerate(zip(given, single, exact, strict=True)):
            result, gradients, state = run.step(batch), run.gradients(), run.state_dict()
            assert_number(result.loss, true.loss, abs(one.loss - true.loss))
            # Errors of gradients may cancel in their norm on one device and not on several, or the reverse.
            assert_number(result.grad_norm, true.grad_norm, error_together(one.gradients, true.gradients))
            held = sum(gradient.double().square().sum().item() for gradient in gradients.values()) ** 0.5
            assert result.grad_norm == pytest.approx(held, rel=1e-4)  # what is kept is rounded once more
            if step == 0:  # later ones begin from other parameters, and a router may choose other experts
                assert_each(gradients, one.gradients, true.gradients)
            assert_together(gradients, one.gradients, true.gradients)
            assert_together(state, one.state, true.state)
            assert all(state[name].dtype == torch.float32 for name in gradients), "masters are exact"


def test_as_exact_as_one_device() -> None:
    assert_rounds_alike(Cell(case="dropout", schedule="zero-bubble", dp=4, zero=1, parts=2, rows=1))


def every_schedule() -> list[Cell]:
    """Every model once, every schedule and kind of ZeRO; sums of gradients travel in either type.

    Models that take long to capture have a schedule of two stages.
    """
    found = []
    for i, case in enumerate(NAMES):
        schedule = list(SHAPES)[i % len(SHAPES)]
        dp = 2 + i % 3
        ways = 2 if zoo.case(case).experts and dp % 2 == 0 else 1
        found.append(
            Cell(
                case=case,
                schedule=schedule,
                dp=dp,
                zero=i % 4,
                parts=parts(schedule, dp),
                rows=2,
                ways=ways,
                reduce="bf16" if i % 2 else "fp32",
            )
        )
    return found


@pytest.mark.matrix
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cell", every_schedule(), ids=str)
def test_every_model(cell: Cell) -> None:
    with one_core():
        assert_rounds_alike(cell)
