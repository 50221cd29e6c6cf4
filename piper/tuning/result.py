"""The outcome of a search: the best strategy, all that was evaluated, and one reason for each loser."""

from collections import Counter
from dataclasses import dataclass

from piper.directives import Directive
from piper.directives.json import show_strategy
from piper.errors import ConfigError
from piper.ir.format import percent, seconds, size
from piper.simulate.simulate import Throughput
from piper.tuning.evaluate import Discard, Evaluation
from piper.tuning.strategy_search import StrategySearch
from piper.tuning.trial_runs import TrialRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of `tune`."""

    best: Evaluation
    evaluated: tuple[Evaluation, ...]
    discarded: tuple[Discard, ...]
    limit: int  # bytes of a device
    machine: str
    devices: int
    lowest: float  # the lowest bound left where trials ran out; infinite: the search is complete
    recorded: tuple[int, ...]  # microbatch sizes that were traced
    interrupted: bool
    seconds: float
    throughput: Throughput | None = None  # of the best. None: not known
    trial: TrialRuns | None = None  # on this machine. None: the best is the best by simulation

    @property
    def strategy(self) -> list[Directive]:
        """Return the best strategy as a list of directives."""
        return list(self.best.strategy)

    @property
    def json(self) -> str:
        """Return the best strategy as an ordinary JSON strategy."""
        return show_strategy(self.best.strategy)

    @property
    def python(self) -> str:
        """Return the best strategy as Python source."""
        lines = "\n".join(f"    {directive!r}," for directive in self.best.strategy)
        verbs = sorted({directive.verb for directive in self.best.strategy})
        return (
            f'"""{self.best.choice.label}: {self.step_text} a step on {self.devices} devices of '
            f'{self.machine}, at most {size(self.best.peak)} each."""\n\n'
            f"from piper import at, {', '.join(verbs)}\n\n"
            f"STRATEGY = [\n{lines}\n]\n"
        )

    @property
    def step_text(self) -> str:
        """Return the step of the best strategy for people: `23.8 ms`, or as measured and as predicted."""
        measured = self.measured(self.best)
        if measured is None:
            return seconds(self.best.step)
        return f"{seconds(measured)} (measured; {seconds(self.best.step)} predicted)"

    def measured(self, candidate: Evaluation) -> float | None:
        """Return the median step of a candidate on this machine. None: it was not measured."""
        run = None if self.trial is None else self.trial.of(candidate)
        return run.step if run is not None and run.times else None

    @property
    def complete(self) -> bool:
        """Return whether every candidate was evaluated or has a bound that rules it out."""
        return self.lowest == float("inf") and not self.interrupted

    @property
    def ranked(self) -> list[Evaluation]:
        """Return those that fit first, of these those measured, as `trial` has them, then the shortest."""
        runs = () if self.trial is None else self.trial.runs
        places = {id(run.candidate): place for place, run in enumerate(runs) if run.times}

        def rank(one: Evaluation) -> tuple[object, ...]:
            place = places.get(id(one))
            by = (True, one.step) if place is None else (False, place)
            return (one.needs > self.limit, *by, one.choice.label)

        return sorted(self.evaluated, key=rank)

    @property
    def front(self) -> list[Evaluation]:
        """Return the time-memory Pareto front: each is the shortest of all that need no more memory."""
        front: list[Evaluation] = []
        for one in sorted(self.evaluated, key=lambda one: (one.step, one.peak, one.choice.label)):
            if not front or one.peak < front[-1].peak:
                front.append(one)
        return front

    def reason(self, loser: Evaluation) -> str:
        """Return why a candidate that was evaluated lost."""
        run, shortest = (None if self.trial is None else self.trial.of(loser)), self.measured(self.best)
        equals = () if self.trial is None else self.trial.equals
        if loser is self.best:
            if len(equals) > 1:
                return f"best by prediction of {len(equals)} that are equally fast"
            return "best" if shortest is None else "best, measured"
        if run is not None and run.failed:
            return f"failed when it was measured: {run.failed}"
        if run is not None and run.times and shortest:
            equal = ": equally fast, as far as starts tell" if run in equals else ""
            return f"measured {run.step / shortest:.3f} of the best{equal}"
        if loser.needs > self.limit:
            return f"does not fit: {size(loser.needs)} of {size(self.limit)}"
        if self.trial is not None and loser.step <= self.best.step:
            return "not measured"
        busier = loser.busy - self.best.busy
        more = {  # seconds, by what there is more of
            f"bubble {percent(loser.idle, loser.step)}": loser.idle - self.best.idle,
            f"exposed communication {percent(loser.exposed, loser.step)}": loser.exposed - self.best.exposed,
            f"computes {seconds(busier)} longer": busier,
        }
        return max(more, key=lambda reason: more[reason])

    def reason_discarded(self, one: Discard) -> str:
        """Return why a candidate was discarded without compiling it."""
        if one.refused:
            return f"cannot be compiled: {one.refused}"
        if one.memory is not None:
            return f"does not fit: at least {size(one.memory.total)}, most of it {one.memory.largest}"
        return f"bound above best: at least {seconds(one.bound)}, against {seconds(self.best.step)}"

    @property
    def tally(self) -> dict[str, int]:
        """Return how many were discarded for each kind of reason, the most frequent first."""
        kinds = Counter(
            f"do not fit: most of it {one.memory.largest}"
            if one.memory is not None
            else ("cannot be compiled" if one.refused else "bound above best")
            for one in self.discarded
        )
        return dict(kinds.most_common())


def none_fits(search: StrategySearch, limit: int, machine: str) -> ConfigError:
    """Return the error of a search in which nothing fits: the least memory found, and what would do."""
    needed = [
        (one.memory.total, one.choice.label, f", most of it {one.memory.largest}")
        for one in search.discarded
        if one.memory is not None
    ]
    needed += [(one.needs, one.choice.label, "") for one in search.evaluated.values()]
    if not needed:
        return ConfigError(
            "no candidate can be compiled",
            by="tune",
            facts={"refused": search.discarded[0].refused if search.discarded else "the space is empty"},
            hint="change the model or the batch as the message says, or allow more in `space`",
        )
    least, label, most = min(needed, key=lambda one: one[:2])
    return ConfigError(
        "no strategy fits",
        by="tune",
        facts={
            "limit": f"{size(limit)} on each device of {machine}",
            "least": f"{size(least)}{most}: {label}",
            "missing": size(least - limit) if least > limit else "found none within the trials",
        },
        hint=f"give at least {size(least)} with --memory, use more devices, or a smaller model or batch",
    )
