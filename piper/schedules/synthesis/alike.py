"""Synthesis for stages that are alike but for the last, from the few numbers that a command line takes."""

from dataclasses import dataclass

from piper.errors import ScheduleError
from piper.schedules.grid import need_whole
from piper.schedules.stages import Memory, Placement, StageCosts
from piper.schedules.synthesis.bound import bound
from piper.schedules.synthesis.synthesise import Synthesis, synthesis
from piper.schedules.timing import peak_bytes

BY = "synthesised"
ROUNDING = 1e-9  # of a share of memory: 0.1 of 30 forwards are 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """A pipeline of stages that are alike but for the last."""

    ranks: int
    microbatches: int
    stages_per_rank: int = 2
    memory: float = 1.0  # a share of the activations that 1F1B's first rank holds
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of F, BI and BW
    last: float = 1.0  # how much slower the last stage is

    def __post_init__(self) -> None:
        need_whole(
            BY,
            ranks=self.ranks,
            microbatches=self.microbatches,
            stages_per_rank=self.stages_per_rank,
        )
        numbers = [("costs", cost) for cost in self.costs] + [("last", self.last), ("memory", self.memory)]
        for name, number in numbers:
            if not 0 < number < float("inf"):  # NaN is not either
                raise ScheduleError(
                    f"{name}={number:g}", by=BY, hint=f"{name} takes numbers above 0, none infinite or NaN"
                )
        if self.limit < self.stages_per_rank:
            least = 1 / min(self.ranks, self.microbatches)
            raise ScheduleError(
                f"memory={self.memory:g} holds no whole microbatch",
                by=BY,
                facts={"needs": f"at least {least:.3g} of 1F1B's {self.most} forwards"},
                hint="raise the memory, or use more ranks",
            )

    @property
    def most(self) -> int:
        """Return the forwards of its stages that 1F1B's first rank would hold."""
        return self.stages_per_rank * min(self.ranks, self.microbatches)

    @property
    def limit(self) -> int:
        """Return the forwards that a rank may hold."""
        return int(self.memory * self.most + ROUNDING)


def synthesised(pipeline: Alike) -> Synthesis:
    """Synthesise a schedule over a V and over a loop, and return the shorter; of equal ones the V."""
    stages = pipeline.ranks * pipeline.stages_per_rank
    forward, inputs, weights = ([cost] * (stages - 1) + [cost * pipeline.last] for cost in pipeline.costs)
    costs = StageCosts(forward=forward, inputs=inputs, weights=weights)
    memory = held_by(pipeline)
    v = synthesis(costs, Placement.v(pipeline.ranks, pipeline.stages_per_rank), pipeline.microbatches, memory)
    loop = Placement.loop(pipeline.ranks, pipeline.stages_per_rank)
    if bound(costs, loop, pipeline.microbatches, memory) >= v.makespan:
        return v
    other = synthesis(costs, loop, pipeline.microbatches, memory)
    return other if other.makespan < v.makespan else v


def held_by(pipeline: Alike) -> Memory:
    """Return the memory of a pipeline, in forwards of one stage."""
    stages = pipeline.ranks * pipeline.stages_per_rank
    return Memory(saved=[1] * stages, carried=[1] * stages, limit=pipeline.limit)


def summary(pipeline: Alike, found: Synthesis) -> str:
    """Say how long a synthesised schedule takes, what no schedule can beat, and what it holds."""
    peak = max(peak_bytes(found.grid, held_by(pipeline)))
    where = "the bound: none is shorter" if found.makespan == found.bound else f"the bound is {found.bound:g}"
    return (
        f"makespan {found.makespan:g}, {where}; a rank holds at most {peak} forwards,"
        f" {peak / pipeline.most:.2f} of 1F1B's {pipeline.most}"
    )
