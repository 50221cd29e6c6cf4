"""A synthesis problem in numbers: every pass of every stage and microbatch is one numbered operation.

The search starts tens of thousands of simulated steps. It works on flat tuples indexed by operation, and only
its result becomes a grid of actions.
"""

from dataclasses import dataclass, replace
from typing import Self

from piper.ir.chunk import Phase
from piper.schedules.action import Action
from piper.schedules.stages import Memory, Placement, StageCosts

F, I, W = 0, 1, 2  # kinds of operations  # noqa: E741
PHASES: tuple[Phase, ...] = ("F", "BI", "BW")
Edges = tuple[tuple[tuple[int, float], ...], ...]  # of each operation: its neighbours, with the delay between


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operations with their ranks, times, memory and dependencies, indexed by operation number."""

    costs: StageCosts
    ranks: int
    stages: int
    microbatches: int
    limits: tuple[int, ...] | None  # bytes of each rank; None: no limit
    kind: tuple[int, ...]
    stage: tuple[int, ...]
    microbatch: tuple[int, ...]
    rank: tuple[int, ...]
    duration: tuple[float, ...]
    takes: tuple[int, ...]  # bytes added when the operation starts
    frees: tuple[int, ...]  # bytes freed when it ends
    before: Edges  # the operations whose results it needs
    after: Edges  # the operations that need its result; BW is last among those of a BI

    @property
    def size(self) -> int:
        """Return the number of operations."""
        return len(self.kind)

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of an operation."""
        return (stage * self.microbatches + microbatch) * 3 + kind

    def action(self, operation: int) -> Action:
        """Return the action that an operation stands for."""
        return Action(
            stage=self.stage[operation],
            phase=PHASES[self.kind[operation]],
            microbatch=self.microbatch[operation],
        )

    def backwards_in_time(self) -> Self:
        """Return the same problem with time reversed: its schedules, read from their ends, solve this one."""
        last = self.microbatches - 1
        return replace(
            self,
            microbatch=tuple(last - microbatch for microbatch in self.microbatch),
            takes=self.frees,
            frees=self.takes,
            before=self.after,
            after=self.before,
        )


def problem_of(
    costs: StageCosts, placement: Placement, microbatches: int, memory: Memory | None = None
) -> Problem:
    """Number the operations of a pipeline, and collect what each takes and needs."""
    numbering = [
        (kind, stage, microbatch)
        for stage in range(costs.stages)
        for microbatch in range(microbatches)
        for kind in (F, I, W)
    ]
    actions = [Action(stage=s, phase=PHASES[k], microbatch=m) for k, s, m in numbering]
    before, after = dependencies(costs, placement, microbatches)
    return Problem(
        costs=costs,
        ranks=placement.count,
        stages=costs.stages,
        microbatches=microbatches,
        limits=tuple(memory.limit_of(rank) for rank in range(placement.count)) if memory else None,
        kind=tuple(kind for kind, _, _ in numbering),
        stage=tuple(stage for _, stage, _ in numbering),
        microbatch=tuple(microbatch for _, _, microbatch in numbering),
        rank=tuple(placement.ranks[stage] for _, stage, _ in numbering),
        duration=tuple(costs.of(action.stage, action.phase) for action in actions),
        takes=tuple(memory.taken_by(action) if memory else 0 for action in actions),
        frees=tuple(memory.freed_by(action) if memory else 0 for action in actions),
        before=before,
        after=after,
    )


def dependencies(costs: StageCosts, placement: Placement, microbatches: int) -> tuple[Edges, Edges]:
    """Return what each operation needs, and what needs it, with the transfer time between ranks."""
    last = costs.stages - 1

    def delay(stage: int, other: int) -> float:
        same = placement.ranks[stage] == placement.ranks[other]
        return 0.0 if same else float(costs.hop_between(stage, other))

    before: list[tuple[tuple[int, float], ...]] = []
    after: list[tuple[tuple[int, float], ...]] = []
    for stage in range(costs.stages):
        down = delay(stage, stage + 1) if stage < last else 0.0
        up = delay(stage, stage - 1) if stage else 0.0
        for microbatch in range(microbatches):
            forward = (stage * microbatches + microbatch) * 3
            inputs, weights = forward + I, forward + W
            deeper, shallower = forward + 3 * microbatches, forward - 3 * microbatches
            before += [
                ((shallower, up),) if stage else (),
                ((forward, 0.0), (deeper + I, down)) if stage < last else ((forward, 0.0),),
                ((inputs, 0.0),),
            ]
            after += [
                ((deeper, down), (inputs, 0.0)) if stage < last else ((inputs, 0.0),),
                ((shallower + I, up), (weights, 0.0)) if stage else ((weights, 0.0),),
                (),
            ]
    return tuple(before), tuple(after)
