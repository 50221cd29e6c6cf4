"""Evaluates candidates in forked processes, some of them before the search comes to them.

[Note: candidates evaluated ahead] While the search waits for a candidate, other processes evaluate those that
come next in its queue, and it computes their bounds. Results wait until the search comes to them, so it takes
the same decisions, in the same order, with any number of processes.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from piper.tuning.candidates import CandidateKey, Leaf
from piper.tuning.evaluate import Evaluation, attempt
from piper.tuning.forked_calls import ForkedCall, wait_for_any
from piper.tuning.model import Model

SPARE = 1  # results that may wait beside a process for each worker: more might be ruled out meanwhile
Attempt = Evaluation | str  # or why the compiler refuses a candidate


@dataclass(slots=True, kw_only=True)
class EvaluationsAhead:
    """Candidates under way in other processes, and results that the search has not come to."""

    model: Model
    evaluated: Container[CandidateKey]  # that the search has taken
    running: dict[CandidateKey, ForkedCall[Attempt]] = field(default_factory=dict)
    waiting: dict[CandidateKey, Attempt] = field(default_factory=dict)
    prepared: dict[CandidateKey, Attempt] = field(default_factory=dict)  # that others have evaluated
    captured: set[tuple[object, ...]] = field(default_factory=set)  # what candidates so far were captured for

    def take(self, leaf: Leaf, following: Callable[[], Iterable[Leaf]], workers: int) -> Attempt:
        """Return the evaluation of a candidate, or why the compiler refuses it.

        following: returns the candidates that may be next.
        """
        made = self.waiting.pop(leaf.key, None) or self.prepared.pop(leaf.key, None)
        if made is None and leaf.key not in self.running:
            asked = leaf.choice.captured_for
            divides = leaf.choice.divided and asked not in self.captured  # what a fork captures is lost
            self.captured.add(asked)
            alone = workers == 1 or not (self.running or any(self.able(following(), leaf)))
            if divides and not alone:
                self.fill(following, leaf, workers - 1)
            if divides or alone:
                return attempt(self.model, leaf.choice, leaf.grid)
            self.start(leaf)
        while made is None:
            self.fill(following, leaf, workers)
            self.collect()
            if leaf.key not in self.running:  # None: it raised an exception, and will here
                made = self.waiting.pop(leaf.key, None) or attempt(self.model, leaf.choice, leaf.grid)
        return made

    def fill(self, following: Callable[[], Iterable[Leaf]], first: Leaf, workers: int) -> None:
        """Start candidates that may be next while processes are free."""
        for leaf in self.able(following(), first):
            if len(self.running) >= workers or len(self.running) + len(self.waiting) > workers + SPARE:
                return
            self.start(leaf)

    def able(self, following: Iterable[Leaf], first: Leaf) -> Iterator[Leaf]:
        """Yield the candidates that can be evaluated while another, the first, is.

        Their sizes must be recorded: that may change the order of candidates. A division of the model that is
        not captured yet is captured in the forked process, unless it is also that of the first.
        """
        recorded = self.model.recorded
        for leaf in following:
            known = (self.evaluated, self.running, self.waiting, self.prepared)
            if leaf.open or leaf.choice.rows not in recorded or any(leaf.key in some for some in known):
                continue
            asked = leaf.choice.captured_for
            if leaf.key != first.key and (
                not leaf.choice.divided or asked in self.captured or asked != first.choice.captured_for
            ):
                yield leaf

    def start(self, leaf: Leaf) -> None:
        """Evaluate a candidate in a forked process."""
        self.model.capture(leaf.choice)  # what a forked process captures is lost with it
        self.running[leaf.key] = ForkedCall(partial(attempt, self.model, leaf.choice, leaf.grid))

    def collect(self) -> None:
        """Wait for a process, and keep its result."""
        for call in wait_for_any(self.running.values()):
            key = next(key for key, one in self.running.items() if one is call)
            made = call.result()
            del self.running[key]
            if made is not None:
                self.waiting[key] = made

    def end(self) -> None:
        """End all processes."""
        while self.running:
            self.running.popitem()[1].end()
