"""Best-first search: the candidate with the lowest bound next, until no bound is below the best step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product

from piper.directives import Directive
from piper.schedules.grid import Grid
from piper.schedules.synthesis.synthesise import synthesise
from piper.schedules.timing import Memory, Placement, StageCosts
from piper.tuning.bounds import (
    loads_of,
    memory_bound,
    order_bound,
    rank_memory,
    stage_costs,
    synthesis_memory,
    time_bound,
    work_bound,
)
from piper.tuning.choice import SYNTHESISED, StrategyChoice, given_choice
from piper.tuning.evaluate import (
    CandidateGroup,
    CandidateKey,
    Discard,
    Evaluation,
    EvaluationsAhead,
    Leaf,
    Queue,
    discarded,
    evaluate_strategy,
)
from piper.tuning.forked_calls import run_together
from piper.tuning.model import Model
from piper.tuning.space import Space, balanced, even, exists, grid_of, late, meshes, schedules_of

FULL = 0.98  # of the limit: what a ZeRO level for each rank may fill by the bound, which is a little low
REFINED = 2  # candidates whose orders are searched for longer at the end
AGAIN = 3  # syntheses of a candidate whose plan does not fit, each with less memory where it lacks
SYNTHESES = 4  # for each candidate that may be evaluated
Asked = tuple[StageCosts, Placement, int, Memory, int]  # of a synthesis


@dataclass(slots=True, kw_only=True)
class StrategySearch:
    """The state of a search. `run` may be called again with another limit; nothing is evaluated twice."""

    model: Model
    space: Space
    gap: float  # a candidate must promise to be shorter by this fraction
    synthesis_trials: int
    report: Callable[["StrategySearch", Evaluation], None]
    workers: int = 1  # processes that evaluate candidates
    evaluated: dict[CandidateKey, Evaluation] = field(default_factory=dict)
    discarded: list[Discard] = field(default_factory=list)
    sizes: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # to try
    expanded: dict[CandidateGroup, tuple[list[Leaf], list[Discard]]] = field(default_factory=dict)
    grids: dict[Asked, Grid] = field(default_factory=dict)  # that were synthesised
    listed: dict[bool, list[CandidateGroup]] = field(default_factory=dict)  # divided or not: all groups
    lowest: float = float("inf")  # the lowest bound that is left, where trials ran out
    wanted: int = 1  # how many of the shortest are searched for
    measuring: int = 0  # how many run on this machine now
    shortest: list[Evaluation] = field(default_factory=list)  # as many that fit, of the last or present run
    ahead: EvaluationsAhead = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = EvaluationsAhead(model=self.model, evaluated=self.evaluated)

    @property
    def best(self) -> Evaluation | None:
        """Return the shortest step so far that fits. None: none fits."""
        return self.shortest[0] if self.shortest else None

    def is_beaten(self, bound: float, gap: float) -> bool:
        """Return whether a step of `bound` is not shorter, by the fraction `gap`, than the wanted ones."""
        return len(self.shortest) == self.wanted and bound >= self.shortest[-1].step * (1 - gap)

    def keep(self, fitting: Evaluation) -> None:
        """Keep an evaluation that fits if it is among the shortest strategies that are wanted."""
        if all(fitting.strategy != one.strategy for one in self.shortest):
            self.shortest = sorted([*self.shortest, fitting], key=lambda one: one.step)[: self.wanted]

    def run(
        self, limit: int, trials: int, *, divided: bool = False, further: bool = False
    ) -> Evaluation | None:
        """Return the shortest step that fits; at most `trials` candidates are evaluated. None: none fits.

        divided: only candidates with tensor or context parallelism, else only those without.
        further: go on from the shortest so far, and from what was discarded.
        """
        if not further:
            self.discarded, self.lowest, self.shortest = [], float("inf"), []
        self.expanded.clear()
        queue = Queue(self.gap, self.model.capturing.recordings.recorded.__contains__)
        queue.extend(self.groups(divided=divided))
        try:
            self.empty(queue, limit, trials)
        finally:
            self.ahead.end()
        return self.best

    def empty(self, queue: Queue, limit: int, trials: int) -> None:
        """Expand, evaluate or discard all that is in a queue."""
        syntheses = SYNTHESES * trials
        while queue.entries:
            entry = queue.pop()
            if self.is_beaten(entry.bound, self.gap):
                self.discarded.append(discarded(entry))
            elif isinstance(entry, CandidateGroup):
                leaves, unfit = self.leaves(entry, limit)
                self.discarded += unfit
                queue.extend(leaves)
            elif entry.open:
                if syntheses > 0:
                    following = self.following(queue, limit)
                    queue.extend(self.synthesised(entry, limit, following=following))
                else:
                    self.lowest = min(self.lowest, entry.bound)
                    self.discarded.append(discarded(entry))
                syntheses -= 1
            else:
                evaluation = self.evaluated.get(entry.key)
                if evaluation is None and trials <= 0:
                    left = [entry, *queue.rest()]
                    self.lowest = min(self.lowest, *(one.bound for one in left))
                    self.discarded += map(discarded, left)
                    break
                if evaluation is None:
                    trials -= 1
                    evaluation = self.evaluate(entry, partial(self.following, queue, limit, trials))
                if evaluation is not None:
                    queue.extend(self.take(entry, evaluation, limit))

    def refine(self, limit: int, trials: int) -> None:
        """Search longer for the orders of the shortest synthesised candidates, and keep what is shorter."""
        shortest = [one for one in self.evaluated.values() if one.choice.schedule == SYNTHESISED]
        shortest.sort(key=lambda one: (one.needs > limit, one.step, one.choice.label))
        for choice in list(dict.fromkeys(one.choice for one in shortest))[:REFINED]:
            layers = self.model.layers(choice)
            bound = max(work_bound(choice, layers), order_bound(choice, layers, None))
            memory = memory_bound(choice, layers, None)
            queue = list(self.synthesised(Leaf(choice=choice, bound=bound, memory=memory), limit, trials))
            while queue:
                leaf = queue.pop()
                if self.is_beaten(leaf.bound, 0.0):
                    continue
                evaluation = None if leaf.key in self.evaluated else self.evaluate(leaf)
                if evaluation is not None:
                    queue += self.take(leaf, evaluation, limit, trials)

    def take(
        self, leaf: Leaf, evaluation: Evaluation, limit: int, trials: int | None = None
    ) -> Iterator[Leaf]:
        """Keep an evaluation if it fits. Yield a schedule that holds less if it does not fit."""
        if evaluation.needs <= limit:
            self.keep(evaluation)
        elif leaf.choice.schedule == SYNTHESISED and leaf.tries <= AGAIN:
            before = leaf.beyond or (0,) * len(evaluation.rank_peaks)
            # An order for less memory may need more elsewhere.
            all_ranks = (leaf.tries - 1) * (evaluation.needs - limit)
            beyond = [
                known + max(all_ranks, leaf.tries * (peak - limit), 0)
                for known, peak in zip(before, evaluation.rank_peaks, strict=True)
            ]
            yield from self.synthesised(replace(leaf, beyond=tuple(beyond)), limit, trials)

    def begin(self, strategy: Sequence[Directive], limit: int) -> None:
        """Evaluate a given strategy."""
        shapes = self.model.shapes
        choice = given_choice(strategy, shapes.devices, shapes.samples, shapes.layers)
        evaluation = evaluate_strategy(self.model, choice, strategy)
        self.evaluated[choice, None] = evaluation
        if evaluation.needs <= limit:
            self.keep(evaluation)
        self.report(self, evaluation)

    def evaluate(self, leaf: Leaf, following: Callable[[], Iterable[Leaf]] = tuple) -> Evaluation | None:
        """Evaluate a candidate. None: it is refused. following: see [Note: candidates evaluated ahead]."""
        if leaf.choice.rows not in self.model.recorded:
            self.model.record(leaf.choice.rows)
            self.expanded.clear()  # bounds for this size, which were estimated from other sizes
        result = self.ahead.take(leaf, following, self.workers)
        if isinstance(result, str):
            self.discarded.append(Discard(choice=leaf.choice, bound=leaf.bound, refused=result))
            return None
        evaluation = self.evaluated[leaf.key] = replace(result, bound=leaf.bound)
        self.report(self, evaluation)
        return evaluation

    def following(self, queue: Queue, limit: int, most: int | None = None) -> Iterator[Leaf]:
        """Return the candidates that the search comes to next, unless what it finds meanwhile rules them out.

        Groups are expanded on the way, once for this and for the search. most: of them. None: all.
        """
        until = self.shortest[-1].step * (1 - self.gap) if len(self.shortest) == self.wanted else float("inf")
        return islice(queue.upcoming(until, lambda group: self.leaves(group, limit)[0]), most)

    def groups(self, *, divided: bool = False) -> list[CandidateGroup]:
        """Return every group of candidates, with the time of its busiest rank."""
        if divided not in self.listed:
            every = (mesh for mesh in meshes(self.space, self.model.shapes) if mesh.divided == divided)
            self.listed[divided] = [group for mesh in every for group in self._groups(mesh)]
        return self.listed[divided]

    def _groups(self, mesh: StrategyChoice) -> Iterator[CandidateGroup]:
        kinds = dict.fromkeys((count, shape) for _, count, shape in schedules_of(self.space, mesh.ranks))
        possible = [kind for kind in kinds if mesh.ranks * kind[0] <= self.model.shapes.layers]
        for (count, shape), recompute in product(possible, self.space.recompute):
            choice = replace(mesh, recompute=recompute, shape=shape)
            for sizes in self.boundaries(choice, mesh.ranks * count):
                sized = replace(choice, sizes=sizes)
                yield CandidateGroup(choice=sized, bound=work_bound(sized, self.model.layers(sized)))

    def boundaries(self, choice: StrategyChoice, stages: int) -> list[tuple[int, ...]]:
        """Return the sizes of stages to try: even, balanced by cost, and balanced with more layers late."""
        plain = even(self.model.shapes.layers, stages)
        if stages == 1:
            return [plain]
        key = (choice.rows, choice.recompute, choice.experts, stages, choice.shape, choice.ranks)
        if key not in self.sizes:
            open_choice = replace(choice, sizes=plain)
            loads = loads_of(open_choice, self.model.layers(choice))
            best = balanced(plain, loads)
            sizes = {"even": plain, "balanced": best, "late": late(best, open_choice.placement.ranks, loads)}
            self.sizes[key] = tuple(dict.fromkeys(sizes[name] for name in self.space.boundaries))
        return list(self.sizes[key])

    def leaves(self, group: CandidateGroup, limit: int) -> tuple[list[Leaf], list[Discard]]:
        """Return the candidates of a group that may fit, each with its bounds, and the others."""
        if group not in self.expanded:
            fitting: list[Leaf] = []
            unfit: list[Discard] = []
            for choice in self.choices(group.choice, limit):
                layers, grid = self.model.layers(choice), grid_of(choice)
                memory = memory_bound(choice, layers, grid)
                if memory.total > limit:
                    unfit.append(Discard(choice=choice, bound=group.bound, memory=memory))
                else:
                    bound = max(group.bound, time_bound(choice, layers, grid))
                    fitting.append(Leaf(choice=choice, bound=bound, memory=memory, grid=grid))
            self.expanded[group] = fitting, unfit
        return self.expanded[group]

    def choices(self, plain: StrategyChoice, limit: int) -> Iterator[StrategyChoice]:
        """Yield every candidate of a group."""
        count, space = plain.stages_per_rank, self.space
        names = [
            name
            for name, stages, shape in schedules_of(space, plain.ranks)
            if (stages, shape) == (count, plain.shape)
            if name in ("", SYNTHESISED) or exists(name, plain.ranks, plain.microbatches, count)
        ]
        neighbours = space.neighbours if plain.ranks > 1 and plain.width > 1 else space.neighbours[:1]
        between = space.between if plain.tensor > 1 else (False,)
        for name in names:
            levels = self.levels(replace(plain, schedule=name), limit)
            for near, wide, zeros in product(neighbours, between, levels):
                yield replace(plain, schedule=name, neighbours=near, between=wide, zeros=zeros)

    def levels(self, choice: StrategyChoice, limit: int) -> list[tuple[int, ...]]:
        """Return the ZeRO levels to try: one for all ranks, or for each rank the lowest that fits."""
        if choice.replicas * choice.context == 1:  # no other device holds the same
            return [(0,) * choice.ranks]
        levels = [(level,) * choice.ranks for level in self.space.zeros]
        if self.space.mixed and choice.ranks > 1 and len(self.space.zeros) > 1:
            layers, grid = self.model.layers(choice), grid_of(choice)

            def fits(rank: int, level: int) -> bool:
                return rank_memory(choice, layers, grid, rank, level).total <= FULL * limit

            *below, most = sorted(self.space.zeros)
            lowest = (next((n for n in below if fits(rank, n)), most) for rank in range(choice.ranks))
            levels.append(tuple(lowest))
        return list(dict.fromkeys(levels))

    def synthesised(
        self, leaf: Leaf, limit: int, trials: int | None = None, following: Iterable[Leaf] = ()
    ) -> Iterator[Leaf]:
        """Yield a candidate with an order within the memory that its ranks have left, if there is one."""
        asked = self.asked(leaf, limit, trials)
        if asked is None:
            self.discarded.append(Discard(choice=leaf.choice, bound=leaf.bound, memory=leaf.memory))
            return
        if asked not in self.grids:
            # Other processes search for the orders of candidates that may be next meanwhile.
            wanted = (self.asked(one, limit, trials) for one in following if one.open)
            others = (one for one in wanted if one is not None and one != asked and one not in self.grids)
            every = [asked, *dict.fromkeys(islice(others, self.workers - 1))]
            calls = [partial(synthesise, *one[:4], trials=one[4]) for one in every]
            made = zip(every, run_together(calls), strict=True)
            self.grids |= {one: found.grid for one, found in made if found is not None}
        choice, grid = leaf.choice, self.grids[asked]
        bound = max(leaf.bound, order_bound(choice, self.model.layers(choice), grid))
        yield replace(leaf, grid=grid, bound=bound, tries=leaf.tries + 1)

    def asked(self, leaf: Leaf, limit: int, trials: int | None) -> Asked | None:
        """Return what a synthesis is asked for a candidate. None: a rank cannot hold one microbatch."""
        choice, layers = leaf.choice, self.model.layers(leaf.choice)
        memory = synthesis_memory(choice, layers, limit, leaf.beyond)
        costs = stage_costs(choice, layers, whole=False, sums=True)
        if memory is None or costs is None:
            return None
        trials = self.synthesis_trials if trials is None else trials
        return costs, choice.placement, choice.microbatches, memory, trials
