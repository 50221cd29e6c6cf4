"""Finds the minimum cut between the source and the sink of a network."""

from collections import deque
from collections.abc import Iterable

from piper.capture.trace.graph_walks import reached

INFINITE = 1 << 62


class Network:
    """A directed network of numbered places, with a capacity on each edge."""

    def __init__(self) -> None:
        self.edges: list[list[int]] = []  # of each place, the numbers of its edges, both ways
        self.ends: list[int] = []
        self.left: list[
            int
        ] = []  # what an edge can still take; the edge with the last bit flipped is its way back
        self.source, self.sink = self.place(), self.place()

    def place(self) -> int:
        """Add a place."""
        self.edges.append([])
        return len(self.edges) - 1

    def join(self, start: int, end: int, capacity: int = INFINITE) -> None:
        """Add an edge."""
        for here, there, left in ((start, end, capacity), (end, start, 0)):
            self.edges[here].append(len(self.ends))
            self.ends.append(there)
            self.left.append(left)

    def behind_cut(self) -> set[int]:
        """Return the places behind the minimum cut.

        Of several minimum cuts, take the one nearest to the sink.
        """
        while (levels := self._levels())[self.sink] >= 0:
            self._fill(levels)

        def before(place: int) -> Iterable[int]:
            return (self.ends[edge] for edge in self.edges[place] if self.left[edge ^ 1])

        return reached([self.sink], before)

    def _levels(self) -> list[int]:
        """Return each place's distance from the source along edges with capacity left. -1: unreachable."""
        levels = [-1] * len(self.edges)
        levels[self.source] = 0
        queue = deque([self.source])
        while queue:
            here = queue.popleft()
            for edge in self.edges[here]:
                there = self.ends[edge]
                if levels[there] < 0 and self.left[edge]:
                    levels[there] = levels[here] + 1
                    queue.append(there)
        return levels

    def _fill(self, levels: list[int]) -> None:
        """Send as much as fits along the shortest ways."""
        tried = [0] * len(self.edges)
        path: list[int] = []
        while True:
            here = self.ends[path[-1]] if path else self.source
            if here == self.sink:
                least = min(self.left[edge] for edge in path)
                for edge in path:
                    self.left[edge] -= least
                    self.left[edge ^ 1] += least
                full = next(i for i, edge in enumerate(path) if not self.left[edge])
                del path[full:]
                continue
            edges = self.edges[here]
            while tried[here] < len(edges):
                edge = edges[tried[here]]
                if self.left[edge] and levels[self.ends[edge]] == levels[here] + 1:
                    path.append(edge)
                    break
                tried[here] += 1
            else:
                if not path:
                    return
                tried[self.ends[path.pop() ^ 1]] += 1
