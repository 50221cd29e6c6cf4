"""Best-first search: the candidate with the lowest bound next, until no bound is below the best step."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from math import floor, log

from piper.directives import Directive
from piper.schedules.grid import Grid
from piper.schedules.synthesis.synthesise import synthesis
from piper.tuning.bounds import (
    LeastMemory,
    any_order_bound,
    collective_time,
    link_bound,
    loads_of,
    memory_bound,
    order_bound,
    rank_held,
    stage_costs,
    synthesis_memory,
    work_bound,
)
from piper.tuning.choice import SYNTHESISED, StrategyChoice
from piper.tuning.evaluate import Evaluation, attempt, evaluate_strategy
from piper.tuning.forked_calls import made_together
from piper.tuning.given import given_choice
from piper.tuning.model import Model
from piper.tuning.model_layers import ModelLayers
from piper.tuning.space import Shapes, Space, balanced, even, exists, grid_of, late, meshes, schedules_of

FULL = 0.98  # of the limit: what a ZeRO level for each rank may fill by the bound, which is a little low
REFINED = 2  # candidates whose orders are searched for longer at the end
AGAIN = 3  # syntheses of a candidate whose plan does not fit, each with less memory where it lacks
SYNTHESES = 4  # for each candidate that may be evaluated
CandidateKey = tuple[StrategyChoice, Grid | None]
AHEAD = 32  # entries of the queue among which processes find candidates to evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """Candidates that differ only in the order of passes, in ZeRO levels and in how devices are numbered."""

    choice: StrategyChoice  # the plainest of them
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One candidate with its bounds."""

    choice: StrategyChoice
    bound: float
    held: LeastMemory
    grid: Grid | None = None
    tries: int = 0  # syntheses so far
    beyond: tuple[int, ...] = ()  # by rank: bytes that its plans held beyond the limit

    @property
    def key(self) -> CandidateKey:
        """Return what tells its evaluation from others: a named schedule has one order."""
        return self.choice, self.grid if self.choice.schedule == SYNTHESISED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A candidate, or a group of them, that was discarded without compiling it."""

    choice: StrategyChoice
    bound: float
    held: LeastMemory | None = None  # it does not fit; None: its bound is above the best step
    grouped: bool = False  # a whole group, of which `choice` is the plainest
    refused: str = ""  # it cannot be compiled: why


@dataclass(slots=True)
class Queue:
    """Candidates in the order of their bounds.

    Of those whose bounds differ by less than `gap`, microbatch sizes that are recorded already come first,
    then the plainest.
    """

    gap: float
    recorded: Callable[[int], bool]
    entries: list[tuple[float, bool, bool, tuple[object, ...], int, CandidateGroup | Leaf]] = field(
        default_factory=list
    )
    pushed: int = 0

    def extend(self, entries: Iterable[CandidateGroup | Leaf]) -> None:
        """Add candidates."""
        for entry in entries:
            self.pushed += 1
            choice = entry.choice
            level = floor(log(entry.bound) / self.gap) if self.gap and entry.bound else entry.bound
            fresh = not self.recorded(choice.rows)
            item = (level, isinstance(entry, Leaf) and fresh, fresh, choice.key, self.pushed, entry)
            heapq.heappush(self.entries, item)

    def pop(self) -> CandidateGroup | Leaf:
        """Take out the next candidate."""
        return heapq.heappop(self.entries)[-1]

    def next_leaves(self) -> list[Leaf]:
        """Return candidates among the next entries, in order."""
        return [entry[-1] for entry in heapq.nsmallest(AHEAD, self.entries) if isinstance(entry[-1], Leaf)]

    def rest(self) -> list[CandidateGroup | Leaf]:
        """Return what is left, in order."""
        return [entry for *_, entry in sorted(self.entries)]


@dataclass(slots=True, kw_only=True)
class StrategySearch:
    """The state of a search. `run` may be called again with another limit; nothing is evaluated twice.

    [Note: candidates evaluated ahead] While this process evaluates a candidate, others evaluate those that
    come next in the queue. Their results wait in `ahead` until the search comes to them, so it takes the same
    decisions, in the same order, with any number of processes.
    """

    model: Model
    space: Space
    shapes: Shapes
    gap: float  # a candidate must promise to be shorter by this fraction
    synthesis_trials: int
    report: Callable[["StrategySearch", Evaluation], None]
    workers: int = 1  # processes that evaluate candidates
    ahead: dict[CandidateKey, Evaluation | str] = field(default_factory=dict)
    captured: set[tuple[object, ...]] = field(default_factory=set)  # what candidates so far were captured for
    evaluated: dict[CandidateKey, Evaluation] = field(default_factory=dict)
    discarded: list[Discard] = field(default_factory=list)
    sizes: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    holds: dict[StrategyChoice, LeastMemory] = field(default_factory=dict)
    listed: dict[bool, list[CandidateGroup]] = field(default_factory=dict)  # divided or not: all groups
    lowest: float = float("inf")  # the lowest bound that is left, where trials ran out
    wanted: int = 1  # how many of the shortest are searched for
    measuring: int = 0  # how many run on this machine now
    shortest: list[Evaluation] = field(default_factory=list)  # as many that fit, of the last or present run

    @property
    def best(self) -> Evaluation | None:
        """Return the shortest step so far that fits. None: none fits."""
        return self.shortest[0] if self.shortest else None

    def is_beaten(self, bound: float, gap: float) -> bool:
        """Return whether a candidate cannot be shorter, by the fraction `gap`, than those that are wanted."""
        return len(self.shortest) == self.wanted and bound >= self.shortest[-1].step * (1 - gap)

    def keep(self, found: Evaluation) -> None:
        """Keep an evaluation that fits if it is among the shortest strategies that are wanted."""
        if all(found.strategy != one.strategy for one in self.shortest):
            self.shortest = sorted([*self.shortest, found], key=lambda one: one.step)[: self.wanted]

    def run(
        self, limit: int, trials: int, *, divided: bool = False, further: bool = False
    ) -> Evaluation | None:
        """Return the shortest step that fits; at most `trials` candidates are evaluated. None: none fits.

        divided: only candidates with tensor or context parallelism, else only those without.
        further: begin with the shortest so far.
        """
        self.discarded, self.lowest, self.shortest = [], float("inf"), self.shortest if further else []
        queue = Queue(self.gap, self.model.capturing.recordings.recorded.__contains__)
        queue.extend(self.groups(divided=divided))
        syntheses = SYNTHESES * trials
        while queue.entries:
            entry = queue.pop()
            if self.is_beaten(entry.bound, self.gap):
                self.discarded.append(discarded(entry))
            elif isinstance(entry, CandidateGroup):
                queue.extend(self.leaves(entry, limit))
            elif entry.choice.schedule == SYNTHESISED and entry.grid is None:
                if syntheses > 0:
                    queue.extend(self.synthesised(entry, limit))
                else:
                    self.lowest = min(self.lowest, entry.bound)
                    self.discarded.append(discarded(entry))
                syntheses -= 1
            else:
                found = self.evaluated.get(entry.key)
                if found is None and trials <= 0:
                    left = [entry, *queue.rest()]
                    self.lowest = min(self.lowest, *(one.bound for one in left))
                    self.discarded += map(discarded, left)
                    break
                if found is None:
                    trials -= 1
                    found = self.evaluate(entry, queue.next_leaves()[:trials])
                if found is not None:
                    queue.extend(self.take(entry, found, limit))
        return self.best

    def refine(self, limit: int, trials: int) -> None:
        """Search longer for the orders of the shortest synthesised candidates, and keep what is shorter."""
        made = [one for one in self.evaluated.values() if one.choice.schedule == SYNTHESISED]
        made.sort(key=lambda one: (one.needs > limit, one.step, one.choice.label))
        for choice in list(dict.fromkeys(one.choice for one in made))[:REFINED]:
            layers = self.layers(choice)
            bound = max(self.least(choice), any_order_bound(choice, layers, self.model.costs))
            held = memory_bound(choice, layers, self.model.state, None)
            queue = list(self.synthesised(Leaf(choice=choice, bound=bound, held=held), limit, trials))
            while queue:
                leaf = queue.pop()
                if self.is_beaten(leaf.bound, 0.0):
                    continue
                found = None if leaf.key in self.evaluated else self.evaluate(leaf)
                if found is not None:
                    queue += self.take(leaf, found, limit, trials)

    def take(self, leaf: Leaf, found: Evaluation, limit: int, trials: int | None = None) -> Iterator[Leaf]:
        """Keep an evaluation if it fits. Yield a schedule that holds less if it does not fit."""
        if found.needs <= limit:
            self.keep(found)
        elif leaf.choice.schedule == SYNTHESISED and leaf.tries <= AGAIN:
            before = leaf.beyond or (0,) * len(found.held)
            all_ranks = (leaf.tries - 1) * (found.needs - limit)  # an order for less may need more elsewhere
            beyond = [
                known + max(all_ranks, leaf.tries * (held - limit), 0)
                for known, held in zip(before, found.held, strict=True)
            ]
            yield from self.synthesised(replace(leaf, beyond=tuple(beyond)), limit, trials)

    def begin(self, strategy: Sequence[Directive], limit: int) -> None:
        """Evaluate a given strategy."""
        shapes = self.shapes
        choice = given_choice(strategy, shapes.devices, shapes.samples, shapes.layers)
        found = evaluate_strategy(self.model, choice, strategy)
        self.evaluated[choice, None] = found
        if found.needs <= limit:
            self.keep(found)
        self.report(self, found)

    def evaluate(self, leaf: Leaf, following: Sequence[Leaf] = ()) -> Evaluation | None:
        """Evaluate a candidate. None: the compiler refuses it, for a reason that is noted.

        following: candidates that may be next, see [Note: candidates evaluated ahead].
        """
        if leaf.choice.rows not in self.model.recorded:
            self.model.record(leaf.choice.rows)
            self.holds.clear()  # some were estimated from other sizes
        if leaf.key not in self.ahead:
            leaves = [leaf, *islice(filter(self.can_be_ahead, following), self.workers - 1)]
            made = made_together([partial(attempt, self.model, one.choice, one.grid) for one in leaves])
            self.ahead |= {one.key: found for one, found in zip(leaves, made, strict=True) if found}
            self.captured.add(leaf.choice.captured_for)
        found = self.ahead.pop(leaf.key)
        if isinstance(found, str):
            self.discarded.append(Discard(choice=leaf.choice, bound=leaf.bound, refused=found))
            return None
        self.evaluated[leaf.key] = found = replace(found, bound=leaf.bound)
        self.report(self, found)
        return found

    def can_be_ahead(self, leaf: Leaf) -> bool:
        """Return whether a candidate that may be next can be evaluated before the search comes to it.

        Its capture must be known, for a trace in a forked process is lost with it.
        """
        if leaf.choice.schedule == SYNTHESISED and leaf.grid is None:
            return False
        if self.is_beaten(leaf.bound, self.gap):
            return False
        unknown = leaf.key not in self.evaluated and leaf.key not in self.ahead
        return unknown and leaf.choice.captured_for in self.captured

    def groups(self, *, divided: bool = False) -> list[CandidateGroup]:
        """Return every group of candidates, with the time of its busiest rank."""
        if divided not in self.listed:
            self.listed[divided] = list(self._groups(divided))
        return self.listed[divided]

    def _groups(self, divided: bool) -> Iterator[CandidateGroup]:
        seen: set[tuple[StrategyChoice, int, str]] = set()
        for mesh in meshes(self.space, self.shapes):
            if (mesh.tensor * mesh.context > 1) != divided:
                continue
            for _, count, shape in schedules_of(self.space, mesh.ranks):
                if mesh.ranks * count > self.shapes.layers or (mesh, count, shape) in seen:
                    continue
                seen.add((mesh, count, shape))
                for recompute in self.space.recompute:
                    choice = replace(mesh, recompute=recompute, shape=shape)
                    for sizes in self.boundaries(choice, mesh.ranks * count):
                        made = replace(choice, sizes=sizes)
                        yield CandidateGroup(
                            choice=made, bound=work_bound(made, self.layers(made), self.model.costs)
                        )

    def least(self, choice: StrategyChoice) -> float:
        """Return the time of a candidate's busiest rank."""
        layers = self.layers(choice)
        found = work_bound(choice, layers, self.model.costs)
        if choice.tensor > 1:
            found += collective_time(choice, layers, self.model.costs, self.model.divide)
        return found

    def layers(self, choice: StrategyChoice) -> ModelLayers:
        """Return the costs of the layers under a candidate."""
        degrees = choice.experts, choice.tensor, choice.context
        return self.model.layers(choice.rows, choice.recompute, *degrees)

    def boundaries(self, choice: StrategyChoice, stages: int) -> list[tuple[int, ...]]:
        """Return the sizes of stages to try: even, balanced by cost, and balanced with more layers late."""
        plain = even(self.shapes.layers, stages)
        if stages == 1:
            return [plain]
        key = (choice.rows, choice.recompute, choice.experts, stages, choice.shape, choice.ranks)
        if key not in self.sizes:
            open_choice = replace(choice, sizes=plain)
            loads = loads_of(open_choice, self.layers(choice))
            best = balanced(plain, loads)
            found = {"even": plain, "balanced": best, "late": late(best, open_choice.placement.ranks, loads)}
            self.sizes[key] = tuple(dict.fromkeys(found[name] for name in self.space.boundaries))
        return list(self.sizes[key])

    def leaves(self, group: CandidateGroup, limit: int) -> Iterator[Leaf]:
        """Yield the candidates of a group that may fit, each with its bounds; note the others."""
        for choice in self.choices(group.choice, limit):
            layers, grid = self.layers(choice), grid_of(choice)
            held = self.held(choice)
            if held.total > limit:
                self.discarded.append(Discard(choice=choice, bound=group.bound, held=held))
                continue
            time = max(group.bound, link_bound(choice, layers, self.model.costs))
            if choice.tensor * choice.context == 1:
                time = max(time, work_bound(choice, layers, self.model.costs, sums=True))
            if grid is not None:
                time = max(time, order_bound(choice, layers, self.model.costs, grid))
            elif choice.ranks > 1:
                time = max(time, any_order_bound(choice, layers, self.model.costs))
            yield Leaf(choice=choice, bound=time, held=held, grid=grid)

    def held(self, choice: StrategyChoice) -> LeastMemory:
        """Return the least that a candidate holds, which does not depend on how its devices are numbered."""
        key = replace(choice, neighbours="replicas", between=False, bucket_mb=None)
        if key not in self.holds:
            self.holds[key] = memory_bound(choice, self.layers(choice), self.model.state, grid_of(choice))
        return self.holds[key]

    def choices(self, plain: StrategyChoice, limit: int) -> Iterator[StrategyChoice]:
        """Yield every candidate of a group."""
        count, space = plain.stages_per_rank, self.space
        names = [
            name
            for name, stages, shape in schedules_of(space, plain.ranks)
            if (stages, shape) == (count, plain.shape)
            if name in ("", SYNTHESISED) or exists(name, plain.ranks, plain.microbatches, count)
        ]
        several = plain.width > 1
        neighbours = space.neighbours if plain.ranks > 1 and several else space.neighbours[:1]
        between = space.between if plain.tensor > 1 else (False,)
        for name in names:
            levels = self.levels(replace(plain, schedule=name), limit)
            for near, wide, bucket in product(neighbours, between, space.buckets if several else (None,)):
                made = replace(plain, schedule=name, neighbours=near, between=wide, bucket_mb=bucket)
                for zeros in levels:
                    yield replace(made, zeros=zeros)

    def levels(self, choice: StrategyChoice, limit: int) -> list[tuple[int, ...]]:
        """Return the ZeRO levels to try: one for all ranks, or for each rank the lowest that fits."""
        if choice.replicas == 1:
            return [(0,) * choice.ranks]
        found = [(level,) * choice.ranks for level in self.space.zeros]
        if self.space.mixed and choice.ranks > 1 and len(self.space.zeros) > 1:
            layers, grid = self.layers(choice), grid_of(choice)
            lowest = [
                next(
                    (
                        level
                        for level in sorted(self.space.zeros)
                        if rank_held(choice, layers, self.model.state, grid, rank, level) <= FULL * limit
                    ),
                    max(self.space.zeros),
                )
                for rank in range(choice.ranks)
            ]
            found.append(tuple(lowest))
        return list(dict.fromkeys(found))

    def synthesised(self, leaf: Leaf, limit: int, trials: int | None = None) -> Iterator[Leaf]:
        """Yield a candidate with an order within the memory that its ranks have left, if there is one."""
        trials = self.synthesis_trials if trials is None else trials
        choice, layers = leaf.choice, self.layers(leaf.choice)
        memory = synthesis_memory(choice, layers, self.model.state, limit, leaf.beyond)
        costs = stage_costs(choice, layers, self.model.costs, whole=False, sums=True)
        if memory is None or costs is None:
            self.discarded.append(Discard(choice=choice, bound=leaf.bound, held=leaf.held))
            return
        made = synthesis(costs, choice.placement, choice.microbatches, memory, trials=trials)
        bound = max(leaf.bound, order_bound(choice, layers, self.model.costs, made.grid))
        yield replace(leaf, grid=made.grid, bound=bound, tries=leaf.tries + 1)


def discarded(entry: CandidateGroup | Leaf) -> Discard:
    """Return the record of a candidate whose bound is above the best step."""
    return Discard(choice=entry.choice, bound=entry.bound, grouped=isinstance(entry, CandidateGroup))
