"""Calls of agents on other machines, through actors of Ray or through channels to ranks of torchrun."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piper.workers.timeouts import TIMEOUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent, and where it runs.

    actor: has the methods of `MachineAgent`; `actor.look.remote()` begins a call and returns it. A call may
    be an argument of another one, which then gets its answer.
    """

    actor: Any
    node: str
    address: str
    local: int = 0  # the number of its accelerator, where it sees those of other agents too


class AgentCalls(ABC):
    """Waits for calls of agents."""

    lost: tuple[type[Exception], ...]  # what the answer of a lost agent raises
    crowded = False  # workers have to share accelerators

    @property
    @abstractmethod
    def own(self) -> str:
        """Return the address of the driver's machine."""

    @abstractmethod
    def get(self, call: Any, timeout: float = TIMEOUTS.meeting) -> Any:  # noqa: ANN401  calls have no type in common
        """Return the answer to a call."""

    @abstractmethod
    def wait(self, calls: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Wait until all calls have ended, at most `timeout` seconds. Return those, and the others."""

    @abstractmethod
    def put(self, value: Any) -> Any:  # noqa: ANN401
        """Return a value as an argument of several calls."""

    @abstractmethod
    def keys(self) -> tuple[bytes, bytes]:
        """Return the key that workers prove to know, and what agents are sent for it."""

    def answers(self, calls: Mapping[int, Any], timeout: float = TIMEOUTS.agent_answers) -> dict[int, object]:
        """Return what calls return, without those whose agent is lost or does not answer in time."""
        self.wait([*calls.values()], timeout)
        answers: dict[int, object] = {}
        for name, call in calls.items():
            try:
                answers[name] = self.get(call, TIMEOUTS.agent_poll_soon)
            except self.lost:
                continue
        return answers

    def finished(self, calls: Sequence[Any], timeout: float = 0.0) -> bool:
        """Return whether all of these calls have ended. A call that was lost has ended too."""
        return not self.wait(calls, timeout)[1]
