"""What tests of several ranks on one GPU share."""

from collections.abc import Iterator, Mapping

import pytest

from piper.workers.transport.fork_server import ForkServer
from tests.gpu import mps
from tests.gpu.ranks import ON_GPU, rank_forks


@pytest.fixture(scope="session")
def clients() -> Iterator[Mapping[str, str]]:
    """The environment in which processes run on the GPU at once, while tests last. Empty: they take turns."""
    if not ON_GPU:
        yield {}
        return
    with mps.shared_service() as environment:
        yield environment


@pytest.fixture(scope="session")
def forks(clients: Mapping[str, str]) -> Iterator[ForkServer]:
    """A warm process from which the ranks of all tests are forked."""
    with rank_forks(clients) as made:
        yield made
