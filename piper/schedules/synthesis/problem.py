"""A synthesis problem in numbers: every pass of every stage and microbatch is one numbered operation.

The search starts tens of thousands of simulated steps. It works on flat tuples indexed by operation, and only
its result becomes a grid of actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from piper.ir.chunk import Phase
from piper.schedules.action import Action
from piper.schedules.stages import Memory, Placement, StageCosts
from piper.schedules.timing import gives, needs

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
    actions = [
        Action(stage=stage, phase=phase, microbatch=microbatch)
        for stage in range(costs.stages)
        for microbatch in range(microbatches)
        for phase in PHASES
    ]
    before, after = dependencies(costs, placement, actions)
    return Problem(
        costs=costs,
        ranks=placement.count,
        stages=costs.stages,
        microbatches=microbatches,
        limits=tuple(memory.limit_of(rank) for rank in range(placement.count)) if memory else None,
        kind=tuple(PHASES.index(action.phase) for action in actions),
        stage=tuple(action.stage for action in actions),
        microbatch=tuple(action.microbatch for action in actions),
        rank=tuple(placement.ranks[action.stage] for action in actions),
        duration=tuple(costs.of(action.stage, action.phase) for action in actions),
        takes=tuple(memory.taken_by(action) if memory else 0 for action in actions),
        frees=tuple(memory.freed_by(action) if memory else 0 for action in actions),
        before=before,
        after=after,
    )


def dependencies(costs: StageCosts, placement: Placement, actions: Sequence[Action]) -> tuple[Edges, Edges]:
    """Return what each operation needs, and what needs it, with the transfer time between ranks."""
    maker = {gives(action): number for number, action in enumerate(actions)}
    before: list[tuple[tuple[int, float], ...]] = []
    after: list[list[tuple[int, float]]] = [[] for _ in actions]
    for number, action in enumerate(actions):
        needed = []
        for value in needs(action, costs.stages - 1):
            same = placement.ranks[value[1]] == placement.ranks[action.stage]
            delay = 0.0 if same else float(costs.hop_between(value[1], action.stage))
            needed.append((maker[value], delay))
            after[maker[value]].append((number, delay))
        before.append(tuple(needed))
    return tuple(before), tuple(map(tuple, after))
