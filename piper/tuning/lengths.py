"""`tune_lengths`: searches for a strategy for each length of batches, all over the same parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from piper.compiler import compile as compile_job
from piper.data.taking import begin, call_data, take
from piper.directives import Directive
from piper.directives.by_length import by_length
from piper.directives.json import show_strategy
from piper.errors import ConfigError
from piper.job import Batch, Job, length_of
from piper.runtime.batch import padded
from piper.tuning.choice import StrategyChoice
from piper.tuning.model import BY
from piper.tuning.result import Tuned
from piper.tuning.space import Space
from piper.tuning.tune import TRIALS, check_counts, tune

BATCHES = 64
CONTEXTS = (1, 2, 4, 8)  # degrees of context parallelism: those inside a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLengths:
    """The outcome of `tune_lengths`."""

    tuned: Mapping[int, Tuned]  # by length
    shares: Mapping[int, float]  # of the steps

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
        """Return the mean seconds of a simulated step, over the lengths of the batches."""
        return mean_step(self.tuned, self.shares)


def tune_lengths(
    job: Job,
    cluster: str | Path,
    devices: int,
    *,
    batches: int = BATCHES,
    memory: int | None = None,
    trials: int = TRIALS,
    space: Space | None = None,
    workers: int | None = None,
) -> TunedLengths:
    """Search for a strategy for each length of a job's batches, with the shortest mean step that fits.

    batches: how many of the data are looked at, for the lengths and how often each comes. Of each length the
    first is tuned for. memory, trials, space, workers: as in `tune`, for each search.

    All strategies hold every parameter alike, so a step may switch without moving any: the best of each
    length says how parameters lie, the other lengths are tuned for that, and the best of these is chosen.
    """
    check_counts(batches=batches)
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
            memory=memory, trials=trials, space=within, front=False, workers=workers,
        )  # fmt: skip

    best = TunedLengths(tuned=best_together(given, shares, allowed, searched), shares=shares)
    prove_together(job, given, best.strategies)
    return best


def best_together(
    given: Mapping[int, Batch],
    shares: Mapping[int, float],
    allowed: Space,
    searched: Callable[[int, Space], Tuned],
) -> dict[int, Tuned]:
    """Return the best of each length among strategies that hold parameters alike."""
    free = {length: searched(length, allowed) for length in given}
    layouts = {length: alike(allowed, tuned.best.choice) for length, tuned in free.items()}
    fitting: list[dict[int, Tuned]] = []
    refused: ConfigError | None = None
    for layout in dict.fromkeys(layouts.values()):
        try:
            fitting.append({n: free[n] if layouts[n] == layout else searched(n, layout) for n in given})
        except ConfigError as error:  # of one length no strategy fits
            refused = error
    if not fitting:
        raise ConfigError(
            "no strategies for all lengths hold parameters alike and fit",
            by=BY,
            facts={"lengths": ", ".join(map(str, given)), "one": refused.what if refused else ""},
            hint="allow more in `space`, more memory, or more devices",
        )
    return min(fitting, key=lambda tuned: mean_step(tuned, shares))


def prove_together(
    job: Job, given: Mapping[int, Batch], strategies: Mapping[int, Sequence[Directive]]
) -> None:
    """Compile and prove the strategy of each length, and that all of them hold the parameters alike."""
    first, *others = given.values()
    whole = replace(job, data=lambda: [first], strategy=strategies, elastic=None, buckets=None)
    program = compile_job(whole)
    for batch in others:
        program.shaped(batch)


def first_of_each_length(job: Job, batches: int) -> tuple[dict[int, Batch], dict[int, float]]:
    """Return the first batch of each length among those of the data, and the share of each, in order."""
    counts: dict[int, int] = {}
    first: dict[int, Batch] = {}
    data = begin(call_data(job.data), job.data)
    for number in range(1, batches + 1):
        batch = take(data, number, job.data)
        if batch is None:
            break
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
