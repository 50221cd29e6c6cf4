"""The cheapest cut of a network, against trying every cut."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from piper.capture.autodiff.remat import INFINITE, Network

INNER = 5
EDGES = st.lists(
    st.tuples(st.integers(0, INNER + 1), st.integers(0, INNER + 1), st.integers(0, 9)), max_size=14
)


@settings(deadline=None)  # the machine may have other work
@given(EDGES)
def test_no_cut_is_cheaper(edges: list[tuple[int, int, int]]) -> None:
    network = Network()
    for _ in range(INNER):
        network.place()
    for start, end, capacity in edges:
        network.join(start, end, capacity)
    behind = network.behind_cut()

    def cost(after: set[int]) -> int:
        return sum(c for start, end, c in edges if start not in after and end in after)

    every = [
        {network.sink, *(2 + i for i, inside in enumerate(chosen) if inside)}
        for chosen in product((False, True), repeat=INNER)
    ]
    assert network.source not in behind
    assert cost(behind) == min(map(cost, every))
    assert all(behind <= after for after in every if cost(after) == cost(behind))  # the nearest to the sink


def test_edges_without_bounds_are_never_cut() -> None:
    network = Network()
    first, second = network.place(), network.place()
    network.join(network.source, first)
    network.join(first, second, 3)
    network.join(second, network.sink, INFINITE)
    assert network.behind_cut() == {network.sink, second}
