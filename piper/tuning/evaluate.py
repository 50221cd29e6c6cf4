"""Evaluates a candidate: compiles it with the shared recordings, proves it, and simulates a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from piper.directives import Directive
from piper.errors import PiperError
from piper.plan.plan import Plans
from piper.process.gc_pause import no_collection
from piper.runtime.memory_release import predicted_peak
from piper.schedules.grid import Grid
from piper.simulate.memory import communicators_of
from piper.simulate.simulate import Simulation, simulate
from piper.tuning.choice import GIVEN, StrategyChoice, directives_of
from piper.tuning.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A candidate that was compiled, proven and simulated."""

    choice: StrategyChoice
    strategy: tuple[Directive, ...]
    step: float  # seconds
    peak: int  # bytes of the fullest device
    held: tuple[int, ...]  # bytes of each rank at its peak, with its communicators
    busy: float  # seconds a device computes, on average
    exposed: float  # seconds a device waits for communication that nothing hides, on average
    bound: float  # the step was known to be at least this long

    @property
    def needs(self) -> int:
        """Return the bytes of the fullest device with its communicators."""
        return max(self.held)

    @property
    def bubble(self) -> float:
        """Return the fraction of the step in which a device computes nothing, on average."""
        return 1 - self.busy / self.step if self.step else 0.0

    @property
    def idle(self) -> float:
        """Return the seconds in which a device neither computes nor waits for exposed communication."""
        return max(0.0, self.step - self.busy - self.exposed)


def evaluate(model: Model, choice: StrategyChoice, grid: Grid | None, bound: float = 0.0) -> Evaluation:
    """Compile, prove and simulate a candidate."""
    strategy = directives_of(choice, grid, model.tag, model.divide, routed=model.experts > 0)
    return evaluate_strategy(model, choice, strategy, bound)


def evaluate_strategy(
    model: Model, choice: StrategyChoice, strategy: Sequence[Directive], bound: float = 0.0
) -> Evaluation:
    """Compile, prove and simulate a strategy."""
    with no_collection():
        program = model.compile(list(strategy))
        found = simulate(program.plans, program.outline, model.costs)
        busy, exposed = averages(found)
        peaks = [
            max(memory.peak, predicted_peak(plan))  # by the simulated times, and as the runtime frees
            for memory, plan in zip(found.memories, program.plans, strict=True)
        ]
    return Evaluation(
        choice=choice,
        strategy=tuple(strategy),
        step=found.step,
        peak=max(peaks),
        held=held_by_rank(model, choice, program.plans, peaks),
        busy=busy,
        exposed=exposed,
        bound=bound,
    )


def held_by_rank(model: Model, choice: StrategyChoice, plans: Plans, peaks: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of the fullest device of each rank, with its communicators. peaks: of each plan."""
    if choice.schedule == GIVEN:
        groups = [plan.devices for plan in plans]
    else:
        groups = [choice.devices_of(rank) for rank in range(choice.ranks)]
    held = dict.fromkeys(range(len(groups)), 0)
    rank_of = {device: rank for rank, group in enumerate(groups) for device in group}
    for peak, plan in zip(peaks, plans, strict=True):
        rank = rank_of[plan.devices[0]]
        held[rank] = max(held[rank], peak + int(model.communicator * communicators_of(plan)))
    return tuple(held.values())


def attempt(model: Model, choice: StrategyChoice, grid: Grid | None) -> Evaluation | str:
    """Evaluate a candidate. Return why the compiler refuses it, if it does."""
    try:
        return evaluate(model, choice, grid)
    except PiperError as error:
        return str(error).splitlines()[0]


def averages(found: Simulation) -> tuple[float, float]:
    """Return how long a device computes and waits for exposed communication, on average over all devices."""
    weights = [len(one.devices) for one in found.timelines]
    devices = sum(weights)
    busy = sum(n * account.busy for n, account in zip(weights, found.accounts, strict=True))
    exposed = sum(
        n * sum(account.exposed.values()) for n, account in zip(weights, found.accounts, strict=True)
    )
    return busy / devices, exposed / devices
