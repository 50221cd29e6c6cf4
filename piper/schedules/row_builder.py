"""Writes one rank's row the way the papers draw it: which stage moves next, without naming microbatches."""

from collections import Counter, deque
from dataclasses import replace
from typing import Literal

from piper.schedules.grid import Action, Group, Row


class RowWriter:
    """Numbers each move with its stage's next microbatch, and remembers the weight gradients that are left.

    In every schedule here a stage takes microbatches in turn. Moves past the last microbatch write nothing,
    so one description serves any number of them.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._taken: Counter[tuple[str, int]] = Counter()  # microbatches so far, by phase and stage
        self.owed: deque[Action] = deque()  # weight gradients that can run now
        self._groups: list[Group] = []

    def forward(self, stage: int) -> None:
        """Run the stage's next forward."""
        self._write(self._next(stage, "F"))

    def backward(self, stage: int) -> None:
        """Run the stage's next backward whole."""
        self._write(self._next(stage, "B"))

    def inputs(self, stage: int) -> None:
        """Run the input half of the stage's next backward, and leave the weight half for later."""
        for action in self._next(stage, "B"):
            self._groups.append((replace(action, phase="BI"),))
            self.owed.append(replace(action, phase="BW"))

    def weights(self) -> None:
        """Run the weight half that has waited longest, if there is one."""
        if self.owed:
            self._groups.append((self.owed.popleft(),))

    def overlap(self, forward: int, backward: int) -> None:
        """Run one stage's next forward and another's next backward as a pair that may interleave."""
        self._write(self._next(forward, "F") + self._next(backward, "B"))

    def finish(self) -> Row:
        """Write the weight gradients that are still owed, and return the row."""
        while self.owed:
            self.weights()
        return tuple(self._groups)

    def _write(self, group: Group) -> None:
        if group:
            self._groups.append(group)

    def _next(self, stage: int, phase: Literal["F", "B"]) -> Group:
        microbatch = self._taken[phase, stage]
        self._taken[phase, stage] += 1
        if microbatch >= self._microbatches:
            return ()
        return (Action(stage=stage, phase=phase, microbatch=microbatch),)
