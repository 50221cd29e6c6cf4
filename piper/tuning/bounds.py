"""Proven lower bounds on a candidate's step time and peak memory, without compiling it.

[Note: why the bounds hold] Each counts only a part of what a plan must do.
- Compute: a device runs its passes one after another, so a step is no shorter than the passes of one rank,
  after the first microbatch has come to it. With a named schedule the order of passes is known: they run in
  that order, each after what it needs has arrived. Everything else that a plan does only delays them.
- Communication: a device's reductions and gathers share its links.
- Memory: parameters, optimizer state and gradients, with the activations of microbatches whose forward has
  run and whose backward has not. Whatever else is live comes on top.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import add

import numpy as np

from piper.plan.ops import Op
from piper.schedules.grid import Grid, Row
from piper.schedules.synthesis.synthesise import bound as least_makespan
from piper.schedules.synthesis.synthesise import one_by_one
from piper.schedules.timing import Memory, StageCosts, makespan
from piper.tuning.choice import StrategyChoice
from piper.tuning.model_layers import ModelLayers, Stage, Walk
from piper.tuning.space import Sizes

PICO = 1e12  # loads are whole picoseconds, so that equal ones compare as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The least that the fullest rank holds at its peak, in bytes."""

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.activations

    @property
    def largest(self) -> str:
        """Return what takes the most."""
        name, _ = max(asdict(self).items(), key=lambda held: held[1])
        return "optimizer state" if name == "optimizer" else name


def loads_of(choice: StrategyChoice, layers: ModelLayers) -> Callable[[Sizes], Sizes]:
    """Return a function from sizes of stages to the time of each rank, the heaviest first, and of a stage."""
    works = [layer.work for layer in layers.layers]
    whole, halves = (
        np.array([0, *accumulate(round(one * PICO) for one in spent)])
        for spent in (
            [work["F"] + work["B"] for work in works],
            [work["F"] + work["BI"] + work["BW"] for work in works],
        )
    )
    of_rank = np.eye(choice.ranks, dtype=np.int64)[list(choice.placement.ranks)]

    def loads(sizes: Sizes) -> Sizes:
        last = np.cumsum(sizes, axis=1)
        first = last - sizes
        spent = np.minimum(whole[last] - whole[first], halves[last] - halves[first])
        ranks = -np.sort(-(spent @ of_rank), axis=1)
        return np.concatenate([ranks, spent.max(axis=1, keepdims=True)], axis=1)

    return loads


def stages_of(choice: StrategyChoice, layers: ModelLayers) -> list[Stage]:
    """Return the stages of a candidate."""
    return [layers.stage(stage) for stage in choice.stages]


def work_bound(choice: StrategyChoice, layers: ModelLayers, *, sums: bool = False) -> float:
    """Return the time of the busiest rank: the way of the first microbatch to it, and its own passes.

    sums: also count how long gradients of microbatches are added up, which the ZeRO level decides.
    """
    arrival, first = 0.0, dict[int, float]()  # of the first microbatch: at a stage, and at each rank
    busy = [0.0] * choice.ranks
    for rank, stage in zip(choice.placement.ranks, stages_of(choice, layers), strict=True):
        backward = min(stage.work["B"], stage.work["BI"] + stage.work["BW"])  # whole or in halves
        busy[rank] += choice.microbatches * (stage.work["F"] + backward)
        if sums and choice.zeros[rank] < 2:
            busy[rank] += (choice.microbatches - 1) * stage.adds
        first.setdefault(rank, arrival)
        arrival += stage.path["F"]
    costs, alone = layers.costs, max(first[rank] + spent for rank, spent in enumerate(busy))
    if not costs.cores:
        return alone
    share = min(costs.node, choice.devices)
    everyone = sum(busy) * choice.width / choice.devices * share
    return max(alone, everyone / costs.cores)


def stage_costs(
    choice: StrategyChoice, layers: ModelLayers, *, whole: bool, sums: bool = False
) -> StageCosts | None:
    """Return the least that each pass takes from what it receives to what it passes on, and each transfer.

    whole: no backward of the schedule is split. sums: weight gradients include adding them up, so that a
    schedule is made for the times it will have. None: nothing takes time.
    """
    stages = stages_of(choice, layers)
    forward = [stage.path["F"] for stage in stages]
    if whole:
        inputs = [stage.path["B"] for stage in stages]
        weights = [0.0] * len(stages)
    else:
        inputs = [min(stage.path["BI"], stage.path["B"]) for stage in stages]
        weights = [
            max(0.0, min(stage.work["BW"], stage.work["B"] - inward))
            for stage, inward in zip(stages, inputs, strict=True)
        ]
    if sums:
        levels = (choice.zeros[rank] for rank in choice.placement.ranks)
        added = (stage.adds if level < 2 else 0.0 for stage, level in zip(stages, levels, strict=True))
        weights = [*map(add, weights, added)]
    if not any(map(sum, (forward, inputs, weights))):
        return None
    hop = [hop_seconds(choice, layers, number) for number in range(len(stages) - 1)]
    return StageCosts(forward=forward, inputs=inputs, weights=weights, hop=hop)


def hop_seconds(choice: StrategyChoice, layers: ModelLayers, stage: int) -> float:
    """Return the time of the transfer from a stage to the next; 0 within a rank."""
    source, target = choice.placement.ranks[stage : stage + 2]
    nbytes = layers.layers[choice.stages[stage][-1]].sends
    if source == target or not nbytes:
        return 0.0
    talk = layers.costs.talk("send", nbytes, (choice.devices_of(source)[0], choice.devices_of(target)[0]))
    return talk.latency + talk.seconds


def order_bound(choice: StrategyChoice, layers: ModelLayers, grid: Grid | None) -> float:
    """Return the time of a schedule's passes and transfers alone. grid: None: no order can beat that time."""
    whole = grid is not None and all(action.phase in ("F", "B") for _, action in grid.actions())
    seconds = stage_costs(choice, layers, whole=whole)
    if seconds is None:
        return 0.0
    if grid is None or any(len(group) > 1 for row in grid.rows for group in row):
        return least_makespan(seconds, choice.placement, choice.microbatches)  # members may interleave
    return makespan(grid, seconds)


def time_bound(choice: StrategyChoice, layers: ModelLayers, grid: Grid | None) -> float:
    """Return the least time of a candidate. grid: the order of its pipeline, where it is known."""
    least = link_bound(choice, layers)
    if choice.ranks > 1:
        key = replace(choice, zeros=())  # ZeRO levels do not change the time of passes and transfers
        if key not in layers.orders:
            layers.orders[key] = order_bound(choice, layers, grid)
        least = max(least, layers.orders[key])
    return least if choice.divided else max(least, work_bound(choice, layers, sums=True))


def link_bound(choice: StrategyChoice, layers: ModelLayers) -> float:
    """Return the time for which a device's links are busy with parameters and gradients."""
    if choice.width == 1:
        return 0.0
    placement = choice.placement
    worst = 0.0
    for rank in range(choice.ranks):
        mine = [layers.stage(choice.stages[number]) for number in placement.stages_of(rank)]
        levels: dict[int, float] = {}
        group = choice.devices_of(rank)[:: choice.tensor * choice.context]  # that hold the same slice
        for (op, nbytes), times in Counter(messages(choice, mine, choice.zeros[rank])).items():
            talk = layers.costs.talk(op, nbytes, group)
            levels[talk.level] = levels.get(talk.level, 0.0) + times * talk.seconds
        worst = max(worst, *levels.values(), 0.0)
    return worst


def messages(choice: StrategyChoice, stages: Sequence[Stage], zero: int) -> Iterator[tuple[Op, int]]:
    """Yield the least that a device of a rank sends for parameters and gradients: operations and bytes."""
    replicas = choice.replicas
    if replicas < 2 or choice.experts > 1:  # divided experts are reduced in smaller groups, and left out
        return
    times = choice.microbatches if sum(len(stage.layers) for stage in stages) > 1 else 1
    for stage in stages:
        for place, layer in enumerate(stage.layers):
            whole = layer.parameters.values()
            sums, nbytes = (
                sum(sizes) // choice.context * (replicas - 1) // replicas
                for sizes in ([p.sum_bytes for p in whole], [p.trained_bytes for p in whole])
            )
            if not nbytes:
                continue
            if zero == 0:
                yield "all_reduce", 2 * sums
                continue
            uses = times if place + 1 == len(stage.layers) else 2 * times
            yield "reduce_scatter", sums * times if zero >= 2 else sums
            yield "gather", nbytes * uses if zero == 3 else nbytes


def memory_bound(choice: StrategyChoice, layers: ModelLayers, grid: Grid | None) -> LeastMemory:
    """Return the least that the fullest rank holds."""
    ranks = (rank_memory(choice, layers, grid, rank, level) for rank, level in enumerate(choice.zeros))
    return max(ranks, key=lambda memory: memory.total)


def rank_memory(
    choice: StrategyChoice, layers: ModelLayers, grid: Grid | None, rank: int, level: int
) -> LeastMemory:
    """Return the least that one rank holds under a ZeRO level."""
    numbers, ranges = choice.placement.stages_of(rank), choice.stages
    mine = tuple(ranges[number] for number in numbers)
    stages = {number: layers.stage(ranges[number]) for number in numbers}
    # By stages, not by rank: those of a rank of another mesh may have the same layers under other numbers.
    key = (id(grid), *numbers, mine, min(2, choice.microbatches))
    if key not in layers.walks:
        # Without an order: one microbatch after another holds the least, and a third holds no more than two.
        row = one_by_one(numbers, min(2, choice.microbatches)) if grid is None else grid.rows[rank]
        layers.walks[key] = grid, walk(row, stages)
    return peak_of(layers.walks[key][1], stages, resident(choice, layers, mine, level))


def resident(
    choice: StrategyChoice, layers: ModelLayers, stages: tuple[range, ...], zero: int
) -> LeastMemory:
    """Return what a rank with some stages holds between steps, and the gradients it sums during one."""
    sums = layers.sums(stages)
    replicas = choice.replicas * choice.context  # ZeRO may shard over both
    alone = replicas == 1 and choice.microbatches == 1  # its gradients are added to nothing
    return LeastMemory(
        parameters=sums.nbytes // replicas if zero == 3 else sums.nbytes,
        optimizer=sums.trained * layers.optimizer_bytes // (replicas if zero else 1),
        gradients=(sums.trained_bytes if alone else sums.sum_bytes) // (replicas if zero >= 2 else 1),
    )


def walk(row: Row, stages: Mapping[int, Stage]) -> Walk:
    """Walk the passes of a rank, and return the most activations while the same stages have gradients."""
    live, most = 0, -1
    begun: tuple[int, ...] = ()
    peaks: list[tuple[tuple[int, ...], int]] = []
    for action in (action for group in row for action in group):
        stage, phase = stages[action.stage], action.phase
        if phase == "F":
            live += stage.activations
        most = max(most, live + (max(0, stage.extra[phase]) if phase == "BW" else stage.extra[phase]))
        if phase != "F":
            live -= {"B": stage.activations, "BI": stage.activations - stage.late, "BW": stage.late}[phase]
        if phase in ("B", "BW") and action.stage not in begun:
            peaks.append((begun, most))
            begun, most = (*begun, action.stage), -1
    return tuple(peaks) if most < 0 else (*peaks, (begun, most))  # no pass may follow the last gradient


def peak_of(walk: Walk, stages: Mapping[int, Stage], between_steps: LeastMemory) -> LeastMemory:
    """Return what a rank holds at the fullest moment of a walk over its passes. stages: by number."""
    total = sum(stage.trained_bytes for stage in stages.values()) or 1
    gradients = [
        sum(between_steps.gradients * stages[number].trained_bytes // total for number in begun)
        for begun, _ in walk
    ]
    summed, active = max(
        zip(gradients, (most for _, most in walk), strict=True), key=lambda moment: moment[0] + moment[1]
    )
    return replace(between_steps, gradients=summed, activations=max(0, active))


def synthesis_memory(
    choice: StrategyChoice,
    layers: ModelLayers,
    limit: int,
    beyond: Sequence[int] = (),  # bytes that each rank is known to hold beyond what is counted here
) -> Memory | None:
    """Return what the stages of a candidate hold, and what each rank has left. None: one has too little."""
    stages, ranges = stages_of(choice, layers), choice.stages
    limits = []
    for rank in range(choice.ranks):
        numbers = choice.placement.stages_of(rank)
        mine = [stages[number] for number in numbers]
        layers_of_rank = tuple(ranges[number] for number in numbers)
        kept = resident(choice, layers, layers_of_rank, choice.zeros[rank])
        transient = max(stage.extra[phase] for stage in mine for phase in ("F", "B", "BI"))
        left = limit - kept.total - max(0, transient) - (beyond[rank] if beyond else 0)
        one = sum(stage.activations for stage in mine)
        if left < one:
            return None
        limits.append(min(left, choice.microbatches * one))  # more than all of them hold makes no difference
    return Memory(
        saved=[stage.activations for stage in stages],
        carried=[stage.late for stage in stages],
        limit=limits,
    )
