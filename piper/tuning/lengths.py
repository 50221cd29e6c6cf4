"""`tune_lengths`: searches for a strategy for each length of batches, all over the same parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from pathlib import Path

from piper.checkpoint.moves import moving_plans, peak_while_moving
from piper.compiler import Program
from piper.compiler import compile as compile_job
from piper.data.feed import one_epoch
from piper.directives import Directive
from piper.directives.by_length import by_length
from piper.directives.json import show_strategy
from piper.errors import ConfigError, ScheduleError
from piper.ir.format import size
from piper.job import Batch, Job, length_of, limit_of
from piper.runtime.batch import bucket_batches, padded
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.simulate import simulate
from piper.tuning.choice import StrategyChoice
from piper.tuning.model import BY
from piper.tuning.result import Tuned
from piper.tuning.space import Space
from piper.tuning.tune import TRIALS, Progress, check_counts, tune

BATCHES = 64
CONTEXTS = (1, 2, 4, 8)  # degrees of context parallelism: those inside a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLengths:
    """The outcome of `tune_lengths`."""

    tuned: Mapping[int, Tuned]  # by length
    shares: Mapping[int, float]  # of the steps
    moves: float  # mean seconds before a step in which the state moves to another layout

    @property
    def strategies(self) -> dict[int, list[Directive]]:
        """Return the best strategy for each length, as `Job(strategy=)` takes them."""
        return {length: tuned.strategy for length, tuned in self.tuned.items()}

    @property
    def json(self) -> str:
        """Return them as a JSON strategy."""
        return show_strategy(by_length(self.strategies))

    @property
    def step(self) -> float:
        """Return the mean seconds of a simulated step and of the moves before it, over the lengths."""
        return mean_step(self.tuned, self.shares) + self.moves


def tune_lengths(
    job: Job,
    cluster: str | Path,
    devices: int,
    *,
    batches: int = BATCHES,
    memory: int | None = None,
    costs: str | Path | None = None,
    trials: int = TRIALS,
    space: Space | None = None,
    compile: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
) -> TunedLengths:
    """Search for a strategy for each length of a job's batches, with the shortest mean step that fits.

    batches: how many of the data are looked at, for the lengths and how often each comes. Of each length the
    first is tuned for. The others: as in `tune`, for each search.

    The best of each length may hold parameters differently. The state then moves when a step switches, which
    is simulated too: as often as two lengths follow each other that come at random. They are chosen if they
    are faster, with these moves, than strategies that all hold parameters alike.
    """
    check_counts(batches=batches)
    machine = load_cluster(cluster)
    given, shares = first_of_each_length(job, batches)
    wanted = space or Space()
    allowed = replace(
        wanted,
        mixed=False,
        stages_per_rank=(1,),
        boundaries=("even",),
        context=CONTEXTS if wanted.context is None else wanted.context,
    )

    def searched(length: int, within: Space) -> Tuned:
        """Return the outcome of a search for batches of one length."""
        alone = replace(job, data=lambda: [given[length]], strategy=(), elastic=None, buckets=None)
        return tune(
            alone, cluster, devices,
            memory=memory, costs=costs, trials=trials, space=within, front=False, compile=compile,
            progress=progress, workers=workers,
        )  # fmt: skip

    free = {length: searched(length, allowed) for length in given}
    layouts = {length: alike(allowed, tuned.best.choice) for length, tuned in free.items()}
    several = dict.fromkeys(layouts.values())
    first = next(iter(given.values()))
    best: TunedLengths | None = None
    refused = ""
    for layout in (None, *several) if len(several) > 1 else (None,):  # None: each length has its own
        try:
            tuned = {n: free[n] if layout in (None, layouts[n]) else searched(n, layout) for n in given}
            if best is not None and mean_step(tuned, shares) >= best.step:
                continue
            strategies = {length: one.strategy for length, one in tuned.items()}
            program = compile_job(
                replace(job, data=lambda: [first], strategy=strategies, elastic=None, buckets=None)
            )
            programs = {length: program.shaped(batch) for length, batch in given.items()}
            moves = simulated_moves(programs, Roofline(machine))
            check_fits(moves, memory or machine.usable(0))
        except (ConfigError, ScheduleError) as error:  # one has no such strategy, or the state cannot move
            refused = error.what
            continue
        now = TunedLengths(tuned=tuned, shares=shares, moves=mean_move(moves, shares))
        best = now if best is None else min(best, now, key=lambda each: each.step)
    if best is None:
        raise ConfigError(
            "no strategies for all lengths fit together",
            by=BY,
            facts={"lengths": ", ".join(map(str, given)), "one": refused},
            hint="allow more in `space`, more memory, or more devices",
        )
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMove:
    """A move of the state before a step of another length. Of devices it is the one with most."""

    before: int
    after: int
    nbytes: int = field(metadata={"key": "bytes"})  # that a device sends or gets
    seconds: float
    peak: int = field(metadata={"key": "peak_bytes"})  # that a device has meanwhile


def simulated_moves(programs: Mapping[int, Program], costs: Costs) -> list[SimulatedMove]:
    """Return the moves between programs by length that hold the state in different layouts."""
    moves = []
    for before, after in permutations(programs, 2):
        one, other = programs[before], programs[after]
        if other.plans.lie_in(one.plans):
            continue
        state_bytes = one.work.settings.state_bytes
        plans = moving_plans(one.plans.buckets, other.plans.buckets, one.plans.devices, state_bytes)
        moves.append(
            SimulatedMove(
                before=before,
                after=after,
                nbytes=sum(ins.nbytes for ins in plans.plans[0].instrs),
                seconds=simulate(plans, None, costs).step,
                peak=peak_while_moving(one.plans, other.plans, state_bytes),
            )
        )
    return moves


def mean_move(moves: Iterable[SimulatedMove], shares: Mapping[int, float]) -> float:
    """Return the mean seconds of the move before a step, where lengths follow each other at random."""
    return sum(shares[move.before] * shares[move.after] * move.seconds for move in moves)


def check_fits(moves: Iterable[SimulatedMove], memory: float) -> None:
    """Refuse moves during which a device would need more memory than it has."""
    for move in moves:
        if move.peak > memory:
            raise ScheduleError(
                "the state does not fit while it moves",
                by=BY,
                facts={
                    "move": f"from batches of length {move.before} to {move.after}",
                    "memory": f"a device would hold {size(move.peak)}, and has {size(memory)}",
                },
                hint="let the strategies hold parameters alike, or with more ZeRO",
            )


def programs_by_length(program: Program) -> dict[int, Program]:
    """Return a program for each length of a job: of its buckets, or the longest batch of each strategy.

    Without buckets as many batches of the data are looked at as `tune_lengths` does.
    """
    job = program.job
    first, _ = first_of_each_length(job, BATCHES)
    longest = {limit_of(job, batch): batch for batch in first.values()}
    batches = [*bucket_batches(next(iter(first.values())), job.buckets)] or [*longest.values()]
    return {length_of(batch): program.shaped(batch) for batch in batches}


def first_of_each_length(job: Job, batches: int) -> tuple[dict[int, Batch], dict[int, float]]:
    """Return the first batch of each length among those of the data, and the share of each, in order."""
    counts: dict[int, int] = {}
    first: dict[int, Batch] = {}
    for batch in islice(one_epoch(job.data, job.seed), batches):
        rows = padded(batch, job.buckets)
        length = length_of(rows)
        first.setdefault(length, rows)
        counts[length] = counts.get(length, 0) + 1
    total = sum(counts.values())
    return {n: first[n] for n in sorted(first)}, {n: counts[n] / total for n in sorted(counts)}


def alike(space: Space, choice: StrategyChoice) -> Space:
    """Return those candidates of a space that hold parameters as a choice does."""
    return replace(
        space,
        ranks=(choice.ranks,),
        zeros=tuple(dict.fromkeys(choice.zeros)),
        neighbours=(choice.neighbours,),
        tensor=(choice.tensor,),
        between=(choice.between,),
        experts=(choice.experts,),
    )


def mean_step(tuned: Mapping[int, Tuned], shares: Mapping[int, float]) -> float:
    """Return the mean step over lengths."""
    return sum(share * tuned[length].best.step for length, share in shares.items())
