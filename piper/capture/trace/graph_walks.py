"""Walks over graphs: what values are computed from, in which order they can run, and runs that repeat."""

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import fx

K = TypeVar("K", bound=Hashable)


def reached(roots: Iterable[K], follow: Callable[[K], Iterable[K]]) -> set[K]:
    """Return the roots and what is reached from them, step by step."""
    stack, seen = list(roots), set[K]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += follow(node)
    return seen


def upstream(roots: Iterable[fx.Node], within: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """Return the roots and the nodes that they are computed from. within: which nodes count and lead on."""
    return reached(filter(within, roots), lambda node: filter(within, node.all_input_nodes))


def downstream(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the roots and the nodes that are computed from them."""
    return reached(roots, lambda node: node.users)


def ready_first(awaited: Mapping[K, Collection[K]]) -> list[K]:
    """Return the keys that can run, each as early as its place in the mapping and what it awaits allow."""
    keys = list(awaited)
    place = {key: position for position, key in enumerate(keys)}
    readers: dict[K, list[K]] = {key: [] for key in keys}
    for key, sources in awaited.items():
        for source in sources:
            readers[source].append(key)
    missing = {key: len(sources) for key, sources in awaited.items()}
    ready = [place[key] for key in keys if not missing[key]]
    ordered: list[K] = []
    while ready:
        key = keys[heapq.heappop(ready)]
        ordered.append(key)
        for reader in readers[key]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, place[reader])
    return ordered


def interval_sums(length: int, intervals: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return for each of `length` positions, and one more, the sum of the intervals that hold it.

    intervals: the first and the last position, and what each adds. An empty one ends before it begins.

    >>> interval_sums(3, [(0, 1, 5), (1, 2, 2)])
    [5, 7, 2, 0]
    """
    change = [0] * (length + 1)
    for first, last, weight in intervals:
        if first <= last:
            change[first] += weight
            change[last + 1] -= weight
    return [*accumulate(change)]


def repeated_runs(labels: Sequence[Hashable], periods: Iterable[int]) -> Iterator[range]:
    """Yield the longest runs of labels in which each equals the one a period later, of two periods or more.

    >>> [*repeated_runs("abcbcbd", [2])]
    [range(1, 6, 2)]
    """
    for period in periods:
        start = 0
        for place in range(len(labels) - period + 1):
            if place < len(labels) - period and labels[place] == labels[place + period]:
                continue
            if place - start >= period:
                yield range(start, place + period, period)
            start = place + 1
