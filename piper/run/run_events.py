"""Events of a run: what happened to its workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from piper.errors import LaunchError, WorkerError
from piper.workers.agent_versions import ShortMachine
from piper.workers.agent_watch import WarmAgent
from piper.workers.results import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run's workers.

    failure: a worker was lost, and the step ended. recovery: all workers run again. mismatch: a repeated step
    gave another result than before. resize: the run goes on with another number of devices. warm: the agent
    of a spare can start a worker at once. skipped: a spare could not be used.
    """

    event: Literal["failure", "recovery", "mismatch", "straggler", "preemption", "resize", "warm", "skipped"]
    step: int
    device: int | None = None
    who: str | None = None
    what: str | None = None
    instruction: str | None = None
    version: int | None = None  # the step whose state was taken
    source: str | None = None  # where it was taken from
    replayed: int | None = None  # steps that were repeated
    seconds: float | None = None  # from the failure, once it had a name; of an agent, since it was started
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of each
    left: int | None = None  # retries


Notify = Callable[[Event], None]


def failure_event(error: WorkerError | LaunchError, step: int, left: int) -> Event:
    """Return the event of a failure."""
    return Event(
        event="failure",
        step=step,
        device=error.device if isinstance(error, WorkerError) else None,
        who=error.by,
        what=error.what,
        instruction=error.facts.get("at"),
        left=left,
    )


def mismatch(step: int, before: StepResult, again: StepResult) -> Event:
    """Return the event of a step that gave another result when it was repeated."""
    return Event(
        event="mismatch",
        step=step,
        what=f"loss {before.loss!r} and gradient norm {before.grad_norm!r} at first, "
        f"{again.loss!r} and {again.grad_norm!r} when repeated",
    )


def recovery(
    step: int,
    version: int,
    source: str,
    replayed: int,
    seconds: float,
    phases: Mapping[str, float],
    left: int,
) -> Event:
    """Return the event of a run whose workers run again, with the fields of `Event`."""
    return Event(
        event="recovery",
        step=step,
        version=version,
        source=source,
        replayed=replayed,
        seconds=round(seconds, 3),
        phases={name: round(took, 3) for name, took in phases.items()},
        left=left,
    )


def warm(agent: WarmAgent, step: int) -> Event:
    """Return the event of an agent that can start a worker at once."""
    return Event(event="warm", step=step, who=f"agent on {agent.address}", seconds=round(agent.seconds, 3))


def skipped(machine: ShortMachine, step: int) -> Event:
    """Return the event of a spare that was not used, because its machine is short of memory."""
    return Event(event="skipped", step=step, who=f"machine {machine.address}", what=machine.why)
