"""The progress of the other streams that each stream knows of, by the events it has waited for."""

from collections.abc import Iterable


class StreamClock:
    """Follows a plan in issue order and keeps what each stream knows of the others' progress.

    The proof in `plan/prove.py` keeps a clock of its own: it must not trust the one that plans are made with.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        """Start before the first instruction. `streams`: the stream of each instruction, in issue order."""
        order = list(streams)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(order))}
        self.stream_of = [numbers[name] for name in order]  # by place: the number of its stream
        self.count = len(numbers)
        self._known = [[-1] * self.count for _ in numbers]  # by stream: the last place of each that is over
        self._after: list[tuple[int, ...]] = []  # by place: what its stream knows when it is over

    def knows(self, stream: int, place: int) -> bool:
        """Return whether a stream knows that an instruction is over."""
        return self._known[stream][self.stream_of[place]] >= place

    def learn(self, stream: int, place: int) -> None:
        """Let a stream wait for an instruction, and so know what the instruction's stream knew then."""
        mine = self._known[stream]
        for other, reached in enumerate(self._after[place]):
            if reached > mine[other]:
                mine[other] = reached

    def issue(self, place: int) -> None:
        """Record that the next instruction is issued."""
        mine = self._known[self.stream_of[place]]
        mine[self.stream_of[place]] = place
        self._after.append(tuple(mine))
