"""Small programs of every kind of plan, and the numbers that two steps of one give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from piper.api import Program, compile
from piper.directives import Directive, remat, replicate, split
from piper.ir.select import at
from piper.job import Job
from piper.launchers.inline import launch_inline
from piper.plan.plan import Plans
from piper.runtime.worker import Options
from piper.schedules import one_f_one_b
from tests import zoo
from tests.runtime.grid import Cell, compiled

TIMEOUT = 5.0  # seconds that a wait of a spoilt plan may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What two steps give."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def equals(self, other: "Numbers") -> bool:
        """Return whether all numbers agree up to the order of fp64 sums."""
        for mine, theirs in ((self.losses, other.losses), (self.norms, other.norms)):
            if not torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=1e-10, atol=1e-12):
                return False
        for left, right in ((self.state, other.state), (self.gradients, other.gradients)):
            if left.keys() != right.keys():
                return False
            if not all(torch.allclose(left[name], right[name], rtol=1e-9, atol=1e-11) for name in left):
                return False
        return True


def job_of(name: str, strategy: list[Directive], samples: int, clip: float | None = None) -> Program:
    """Compile a case of the zoo under a strategy of its own."""
    case = zoo.case(name)
    return compile(
        Job(
            model=case.model,
            loss=case.loss,
            data=lambda: [case.batch(samples, 0)],
            strategy=strategy,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            precision="fp64",
            clip_norm=clip,
        ),
        device="cpu",
    )


def in_cell(**fields: object) -> Callable[[], Program]:
    return lambda: compiled(Cell(**fields))  # type: ignore[arg-type]


def stages_of_two_sizes() -> Program:
    """One device before two: values are sliced again on their way."""
    strategy = [replicate(at(PP=0), [0]), replicate(at(PP=1), [1, 2], zero=1), split(at(), parts=2)]
    return job_of("mlp", [*strategy, *one_f_one_b(2, 2)], 8)


def uneven_sets() -> Program:
    """Two devices before three, without a schedule: slices are cut and joined across device boundaries."""
    strategy = [replicate(at(PP=0), [0, 1]), replicate(at(PP=1), [2, 3, 4]), split(at(), parts=2)]
    return job_of("mlp", strategy, 12)


def run_again() -> Program:
    """Each stage keeps only what comes into it."""
    stages = [replicate(at(PP=i), [2 * i, 2 * i + 1], zero=3) for i in range(2)]
    strategy = [*stages, split(at(), parts=2), remat(at(), 0, across="PP")]
    return job_of("decoder_untied", [*strategy, *one_f_one_b(2, 2)], 8)


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "1f1b": in_cell(case="mlp", dp=2),
    "zero-bubble": in_cell(case="mlp", schedule="zero-bubble"),
    "dualpipe-v": in_cell(case="mlp", schedule="dualpipe-v", parts=4),
    "zero 1, clipped": in_cell(case="mlp", dp=2, zero=1, clip=0.1),
    "zero 2": in_cell(case="mlp", dp=2, zero=2),
    "zero 3": in_cell(case="mlp", dp=2, zero=3),
    "experts": in_cell(case="moe", dp=2, ways=2, zero=1),
    "tied": in_cell(case="decoder", dp=2, zero=2),
    "weighted loss": in_cell(case="sum_weight", dp=2),
    "buffers": in_cell(case="convnet", dp=2),
    "two readers": in_cell(case="encoder_decoder"),
    "run again": run_again,
    "sets of two sizes": stages_of_two_sizes,
    "uneven sets": uneven_sets,
}


@cache
def program_of(name: str) -> Program:
    """Return a program, compiled once."""
    return PROGRAMS[name]()


def batches(program: Program) -> list[Mapping[str, Tensor]]:
    first = next(iter(program.job.data()))
    return [first, {name: value.flip(0) for name, value in first.items()}]


def numbers(program: Program, plans: Plans) -> Numbers:
    """Run two steps of plans on threads."""
    options = Options(timeout=TIMEOUT, keep_gradients=True)
    with launch_inline(replace(program, plans=plans), options) as run:
        results = [run.step(batch) for batch in batches(program)]
        return Numbers(
            losses=tuple(result.loss for result in results),
            norms=tuple(result.grad_norm for result in results),
            state=run.state_dict(),
            gradients=run.gradients(),
        )


@cache
def right_numbers(name: str) -> Numbers:
    """Return what the plans of a program give as they were compiled."""
    program = program_of(name)
    return numbers(program, program.plans)
