"""Small programs of every kind of plan, and the numbers that two steps of one give."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from piper import schedules
from piper.compiler import Program, compile
from piper.directives import Directive, remat, replicate, shard, split
from piper.ir.select import at
from piper.job import Job
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests.proof import models
from tests.runtime.as_compiled import as_compiled

TIMEOUT = 20.0  # seconds that a wait of a spoilt plan may take; a busy machine may stall a thread for a few


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


def program(
    model: Callable[[], nn.Module],
    strategy: Sequence[Directive],
    *,
    samples: int = 16,
    clip: float | None = None,
    loss: models.Loss = models.mean_loss,
    adding: bool = False,
) -> Program:
    """Compile a tiny model under a strategy, in fp64. adding: backwards add gradients, as compiled ones do."""
    made = compile(
        Job(
            model=model,
            loss=loss,
            data=lambda: [models.batch(samples)],
            strategy=strategy,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            precision="fp64",
            clip_norm=clip,
        ),
        device="cpu",
        compile=adding,
    )
    if adding:
        as_compiled(made)
    return made


def stages(*sets: Sequence[int], zero: int = 0, parts: int = 2) -> list[Directive]:
    """Each stage on a set of devices, in microbatches."""
    placed = [replicate(at(PP=i), devices, zero=zero) for i, devices in enumerate(sets)]
    return [*placed, split(at(), parts=parts)]


def in_pairs(zero: int = 0) -> list[Directive]:
    """Two stages of two devices, two microbatches, 1F1B."""
    return [*stages([0, 1], [2, 3], zero=zero), *schedules.one_f_one_b(2, 2)]


def experts() -> list[Directive]:
    """Experts divided over the pair of devices of each stage."""
    divided = [shard(at(PP=i, EP="*"), [2 * i, 2 * i + 1], ways=2) for i in range(2)]
    return [*stages([0, 1], [2, 3], zero=1), *divided, *schedules.one_f_one_b(2, 2)]


def both_ways(zero: int = 0) -> list[Directive]:
    """Two stages of two devices, each on both pairs: two microbatches go down, two up."""
    placed = [
        replicate(at(PP=stage, MB=[2 * way, 2 * way + 1]), [2 * rank, 2 * rank + 1], zero=zero)
        for stage in range(2)
        for way, rank in ((0, stage), (1, 1 - stage))
    ]
    return [split(at(), parts=4), *placed, *schedules.dualpipe(2, 4)]


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "1f1b": lambda: program(models.Dense, in_pairs()),
    "zero-bubble": lambda: program(
        lambda: models.Dense(3), [*stages([0], [1], [2], parts=4), *schedules.zero_bubble(3, 4)]
    ),
    "dualpipe-v": lambda: program(
        lambda: models.Dense(4), [*stages([0], [1], [1], [0], parts=4), *schedules.dualpipe_v(2, 4)]
    ),
    "zero 1, clipped": lambda: program(models.Dense, in_pairs(zero=1), clip=0.1),
    "zero 2": lambda: program(models.Dense, in_pairs(zero=2)),
    "zero 3": lambda: program(models.Dense, in_pairs(zero=3)),
    "experts": lambda: program(models.Routed, experts()),
    "tied": lambda: program(models.Tied, in_pairs(zero=2)),
    "tied over sets of two sizes": lambda: program(models.Tied, stages([0], [0, 1])),
    "weighted loss": lambda: program(models.Dense, in_pairs(), loss=models.weighted_loss),
    "weighted loss, clipped": lambda: program(
        models.Dense, stages([0, 1], [2], zero=1), loss=models.weighted_loss, clip=0.1
    ),
    "buffers": lambda: program(models.Normed, in_pairs()),
    "two readers": lambda: program(models.Skipping, stages([0, 1], [2, 3], [4, 5])),
    "run again": lambda: program(models.Layered, [*in_pairs(zero=3), remat(at(), 0, across="PP")]),
    "sets of two sizes": lambda: program(
        models.Skipping, [*stages([0], [1, 2], [3], zero=1), *schedules.one_f_one_b(3, 2)]
    ),
    "uneven sets": lambda: program(models.Dense, stages([0, 1], [2, 3, 4]), samples=24),
    "zero 1, added": lambda: program(models.Dense, in_pairs(zero=1), adding=True),
    "zero 3, added": lambda: program(
        models.Dense, [*stages([0, 1], [2, 3], zero=3), *schedules.gpipe(2, 2)], adding=True
    ),
    "tied on one set, added": lambda: program(models.Tied, stages([0, 1], [0, 1]), adding=True),
    "both ways": lambda: program(models.Tied, both_ways(), clip=0.1),
    "both ways, zero 3": lambda: program(models.Dense, both_ways(zero=3)),
}


@cache
def program_of(name: str) -> Program:
    """Return a program, compiled once."""
    return PROGRAMS[name]()


def batches(found: Program) -> list[Mapping[str, Tensor]]:
    first = next(iter(found.job.data()))
    return [first, {name: value.flip(0) for name, value in first.items()}]


def numbers(found: Program, plans: Plans) -> Numbers:
    """Run two steps of plans on threads."""
    options = Options(timeout=TIMEOUT, keep_gradients=True)
    with launch_inline(replace(found, plans=plans), options) as run:
        results = [run.step(batch) for batch in batches(found)]
        return Numbers(
            losses=tuple(result.loss for result in results),
            norms=tuple(result.grad_norm for result in results),
            state=run.state_dict(),
            gradients=run.gradients(),
        )


@cache
def right_numbers(name: str) -> Numbers:
    """Return what the plans of a program give as they were compiled."""
    return numbers(program_of(name), program_of(name).plans)
