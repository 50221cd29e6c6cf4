"""A lower bound on the makespan, proven by relaxation: what no order of the actions can beat."""

import heapq
from collections.abc import Sequence

from piper.schedules.timing import Memory, Placement, StageCosts


def bound(costs: StageCosts, placement: Placement, microbatches: int, memory: Memory | None = None) -> float:
    """Return a time that no schedule of these stages can beat, whatever its order.

    Two relaxations, each of which only removes constraints:
    - One rank at a time, as if every other rank were free whenever it is needed. Each pass has a head (the
      shortest time before it can start) and a tail (the shortest time that must follow it). The rank may
      interrupt a pass and resume it later; running the pass with the longest tail first is then optimal.
    - Bytes times seconds: a microbatch holds a stage's bytes at least as long as its way from there to the
      loss and back, and a rank never holds more than its limit.
    """
    paths = Paths(costs, placement)
    found = 0.0
    for rank in range(placement.count):
        mine = placement.stages_of(rank)
        found = max(found, one_rank(paths, mine, microbatches))
        if memory is not None and (limit := memory.limit_of(rank)):
            volume = sum(paths.held(memory, stage) for stage in mine)
            found = max(found, min(paths.arrival[stage] for stage in mine) + microbatches * volume / limit)
    return found


class Paths:
    """The shortest time between the passes of a single microbatch that has every rank to itself."""

    def __init__(self, costs: StageCosts, placement: Placement) -> None:
        self.costs = costs
        stages = costs.stages
        hops = [
            0.0
            if placement.ranks[stage] == placement.ranks[stage + 1]
            else costs.hop_between(stage, stage + 1)
            for stage in range(stages - 1)
        ]
        self.arrival = [0.0]  # of each stage's input
        for stage in range(stages - 1):
            self.arrival.append(self.arrival[stage] + costs.forward[stage] + hops[stage])
        gradient = [0.0] * stages  # of each stage's output: when it arrives
        gradient[-1] = self.arrival[-1] + costs.forward[-1]
        for stage in reversed(range(stages - 1)):
            gradient[stage] = gradient[stage + 1] + costs.inputs[stage + 1] + hops[stage]
        self.gradient = gradient
        self.after_inputs = [0.0] * stages  # the longest chain after the end of a stage's BI
        for stage in range(stages):
            above = hops[stage - 1] + costs.inputs[stage - 1] + self.after_inputs[stage - 1] if stage else 0.0
            self.after_inputs[stage] = max(costs.weights[stage], above)
        self.after_forward = [
            gradient[stage]
            - (self.arrival[stage] + costs.forward[stage])
            + costs.inputs[stage]
            + self.after_inputs[stage]
            for stage in range(stages)
        ]

    def held(self, memory: Memory, stage: int) -> float:
        """Return the least bytes times seconds that one microbatch of a stage occupies.

        A whole backward holds `saved` where a split one holds `carried`: the smaller counts.
        """
        until_split = self.gradient[stage] + self.costs.inputs[stage] - self.arrival[stage]
        least = min(memory.saved[stage], memory.carried[stage])
        return memory.saved[stage] * until_split + least * self.costs.weights[stage]


def one_rank(paths: Paths, stages: Sequence[int], microbatches: int) -> float:
    """Return the shortest makespan of one rank's passes with their heads and tails, interruptions allowed."""
    costs = paths.costs
    # Head, tail and time of each pass. Microbatches are alike, so it is one job for all of them.
    jobs: list[tuple[float, float, float]] = []
    for stage in stages:
        gradient = paths.gradient[stage]
        jobs += [
            (paths.arrival[stage], paths.after_forward[stage], microbatches * costs.forward[stage]),
            (gradient, paths.after_inputs[stage], microbatches * costs.inputs[stage]),
            (gradient + costs.inputs[stage], 0.0, microbatches * costs.weights[stage]),
        ]
    jobs.sort()
    waiting: list[tuple[float, float]] = []  # (-tail, time left)
    now = found = 0.0
    position = 0
    while waiting or position < len(jobs):
        if not waiting:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            _, tail, left = jobs[position]
            heapq.heappush(waiting, (-tail, left))
            position += 1
        tail, left = heapq.heappop(waiting)
        pause = jobs[position][0] if position < len(jobs) else float("inf")
        if now + left > pause:
            heapq.heappush(waiting, (tail, left - (pause - now)))
            now = pause
        else:
            now += left
            found = max(found, now - tail)
    return found
