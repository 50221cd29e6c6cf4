"""One candidate of the search: integers and names from which a strategy is made, or a given strategy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from piper.directives import Directive, place, remat, replicate, shard, split
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.shard import ShardAxis
from piper.directives.split import Split
from piper.errors import ConfigError
from piper.ir.select import At, at
from piper.job import Job, directives_for, strategy_of
from piper.schedules.grid import Grid, orders
from piper.schedules.timing import Placement

Shape = Literal["loop", "v"]
Neighbours = Literal["replicas", "ranks"]  # which devices have neighbouring numbers
SYNTHESISED = "synthesised"
GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Recompute:
    """What is recomputed in the backward. budget=1 without `across`: nothing is."""

    budget: float = 1.0
    across: bool = False  # each layer saves only its inputs

    @property
    def label(self) -> str:
        """Return a few words for tables. Empty: nothing is recomputed."""
        if self.across:
            return "recompute layers"
        return "" if self.budget == 1 else f"recompute to {self.budget:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide:
    """How tensor and context parallelism divide a model, where it allows them."""

    weights: tuple[tuple[str, int], ...] = ()
    fields: tuple[tuple[str, int], ...] = ()
    attention: str = "gather"  # how a divided sequence attends
    balance: str | None = None  # which pieces of the sequence a device has


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A candidate: everything that a strategy is made of, but for the order of a synthesised schedule."""

    ranks: int  # of the pipeline
    replicas: int  # groups of devices in a rank that divide the samples
    rows: int  # samples of a microbatch on one replica
    microbatches: int
    sizes: tuple[int, ...]  # layers of each stage
    schedule: str = ""  # a name, synthesised, or given; empty: one stage, ordered by the compiler
    shape: Shape = "loop"  # how the stages are dealt to the ranks
    tensor: int = 1
    between: bool = False  # sequence parallelism between the regions that tensor parallelism divides
    context: int = 1
    experts: int = 1
    neighbours: Neighbours = "replicas"
    zeros: tuple[int, ...] = (0,)  # the ZeRO level of each rank
    recompute: Recompute = Recompute()

    @property
    def stages_per_rank(self) -> int:
        return len(self.sizes) // self.ranks

    @property
    def width(self) -> int:
        """Return the devices of one rank."""
        return self.replicas * self.tensor * self.context

    @property
    def devices(self) -> int:
        return self.ranks * self.width

    @property
    def divided(self) -> bool:
        """Return whether tensor or context parallelism divides the model."""
        return self.tensor * self.context > 1

    @cached_property  # bounds ask for it many times
    def placement(self) -> Placement:
        """Return which rank runs each stage."""
        kind = Placement.v if self.shape == "v" else Placement.loop
        return kind(self.ranks, self.stages_per_rank)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """Return the layers of each stage."""
        return tuple(range(first, last) for first, last in pairwise(accumulate(self.sizes, initial=0)))

    def devices_of(self, rank: int) -> tuple[int, ...]:
        """Return the devices of a rank: groups of `tensor * context` neighbours, one for each replica."""
        group = self.tensor * self.context
        if self.neighbours == "replicas":
            return tuple(range(rank * self.width, (rank + 1) * self.width))
        firsts = ((replica * self.ranks + rank) * group for replica in range(self.replicas))
        return tuple(first + place for first in firsts for place in range(group))

    @property
    def label(self) -> str:
        """Return the candidate in a few words: `PP8 DP8 zero 1, 16 microbatches of 1, zbv, stages 5 4`."""
        if self.schedule == GIVEN:
            return "the given strategy"
        degrees = {"PP": self.ranks, "DP": self.replicas, "TP": self.tensor, "CP": self.context}
        degrees |= {"EP": self.experts}
        parallel = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        if self.width > 1:
            levels = self.zeros if len(set(self.zeros)) > 1 else self.zeros[:1]
            parallel.append("zero " + "/".join(map(str, levels)))
        microbatches = "microbatch" if self.microbatches == 1 else "microbatches"
        words = [" ".join(parallel) or "one device", f"{self.microbatches} {microbatches} of {self.rows}"]
        if self.ranks > 1:
            words.append(self.schedule + (f" {self.shape}" if self.schedule == SYNTHESISED else ""))
            words.append("stages " + " ".join(map(str, self.sizes)))
        if self.between:
            words.append("sequence parallel")
        if self.ranks > 1 and self.replicas > 1 and self.neighbours == "ranks":
            words.append("ranks are neighbours")
        if self.recompute.label:
            words.append(self.recompute.label)
        return ", ".join(words)

    @property
    def captured_for(self) -> tuple[object, ...]:
        """Return what decides how a model is captured for it."""
        divided = (self.tensor, self.context, self.between, self.ranks, self.sizes)
        plain = (self.rows, self.recompute, self.experts)
        return (*plain, *divided) if self.tensor * self.context > 1 else plain

    @property
    def key(self) -> tuple[object, ...]:
        """Return what orders candidates of one bound: plain ones first."""
        return (
            self.tensor * self.context,
            self.ranks,
            len(self.sizes),
            self.schedule == SYNTHESISED,
            len(set(self.zeros)),
            self.between,
            self.recompute != Recompute(),
            self.neighbours == "ranks",
            self.label,
        )


def directives_of(
    choice: StrategyChoice, grid: Grid | None, tag: str, divide: Divide, routed: bool
) -> list[Directive]:
    """Return the strategy of a candidate. grid: the order of its pipeline. routed: the model has experts."""
    strategy: list[Directive] = []
    single = len(choice.sizes) == 1
    placement = choice.placement
    for number, stage in enumerate(choice.stages):
        here = at() if single else at(None, **{tag: stage})
        rank = placement.ranks[number]
        strategy += placed(choice, here, rank, divide)
        if routed and choice.experts > 1:
            strategy.append(shard(here, choice.devices_of(rank), ways=choice.experts))
    if choice.microbatches > 1 or grid is not None:
        strategy.append(split(at(), axis="MB", parts=choice.microbatches))
    if grid is not None:
        strategy += orders(grid, stage=[at(None, **{tag: stage}) for stage in choice.stages])
    if choice.recompute != Recompute():
        across = tag if choice.recompute.across else None
        strategy.append(remat(at(), choice.recompute.budget, across=across))
    return strategy


def placed(choice: StrategyChoice, here: At, rank: int, divide: Divide) -> list[Directive]:
    """Return the directives that put one stage on the devices of its rank."""
    devices = choice.devices_of(rank)
    if len(devices) == 1:
        return [place(here, devices)]
    directives: list[Directive] = [replicate(here, devices, zero=choice.zeros[rank])]
    if choice.tensor > 1:
        between = 1 if choice.between else None
        weights = dict(divide.weights)
        directives.append(
            shard(here, devices, ways=choice.tensor, axis="TP", weights=weights, between=between)
        )
    if choice.context > 1:
        directives.append(
            shard(
                here,
                devices,
                ways=choice.context,
                axis="CP",
                batch=dict(divide.fields),
                attention=divide.attention,
                balance=divide.balance,
            )
        )
    return directives


def own_strategy(job: Job, devices: int) -> list[Directive] | None:
    """Return the strategy that a job has. None: it has none, or one for more devices."""
    if job.elastic is not None:
        fewest, most = job.elastic
        return list(directives_for(job, devices)) if fewest <= devices <= most else None
    strategy = strategy_of(job)
    used = {device for group in placed_on(strategy) for device in group}
    return strategy if used and max(used) < devices else None


def placed_on(strategy: Sequence[Directive]) -> set[tuple[int, ...]]:
    """Return the sets of devices on which a strategy places regions."""
    return {tuple(each.devices) for each in strategy if isinstance(each, Place | Replicate)}


def given_choice(strategy: Sequence[Directive], devices: int, samples: int, layers: int) -> StrategyChoice:
    """Return the entry of a given strategy among the candidates. Refuse one for more devices."""
    placed = placed_on(strategy)
    used = {device for group in placed for device in group}
    if not used or max(used) >= devices:
        raise ConfigError(
            "the strategy to start from does not fit the devices",
            by="tune",
            facts={"it uses": f"devices up to {max(used)}" if used else "none", "there are": str(devices)},
            hint=f"place its regions on devices 0 to {devices - 1}, or search for more devices",
        )
    whole = split_of(strategy)
    parts = 1 if whole is None else whole.parts
    replicas = max(1, devices // len(placed))
    return StrategyChoice(
        ranks=len(placed),
        replicas=replicas,
        rows=max(1, samples // (parts * replicas)),
        microbatches=parts,
        sizes=(layers,),
        schedule=GIVEN,
    )


def split_of(strategy: Sequence[Directive]) -> Split | None:
    """Return the directive that cuts the whole batch into microbatches. None: there is none, or several."""
    splits = [directive for directive in strategy if isinstance(directive, Split)]
    return splits[0] if len(splits) == 1 and splits[0].at == At() else None


def divided_as(strategy: Sequence[Directive], known: Divide) -> Divide:
    """Return how a strategy divides layers for tensor and context parallelism; `known` where it does not."""
    axes = [directive for directive in strategy if isinstance(directive, ShardAxis)]
    weights = next((axis.weights for axis in axes if axis.weights), known.weights)
    sliced = next((axis for axis in axes if axis.batch), None)
    if sliced is None:
        return Divide(weights=weights, fields=known.fields)
    return Divide(weights=weights, fields=sliced.batch, attention=sliced.attention, balance=sliced.balance)
