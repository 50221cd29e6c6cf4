"""Waiting for descriptors, also those beyond the 1,024 that `select` can take."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from piper.launchers.nursery import Nursery
from piper.launchers.polling import readable

MANY = 1100


@contextmanager
def many_open() -> Iterator[None]:
    """Hold so many descriptors that the next ones are beyond what `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MANY + 200:
        pytest.skip("this machine allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 200), hard))
    held: list[int] = []
    try:
        held += [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_only_what_can_be_read() -> None:
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    with a, b, c, d:
        b.send(b"x")
        assert readable([a.fileno(), c.fileno()], 1.0) == {a.fileno()}
        d.close()  # an end counts as something to read
        assert readable([a.fileno(), c.fileno()]) == {a.fileno(), c.fileno()}


def test_a_wait_ends() -> None:
    a, b = socket.socketpair()
    with a, b:
        begun = monotonic()
        assert readable([a.fileno()], 0.05) == set()
        assert 0.04 < monotonic() - begun < 5.0
        assert readable([a.fileno()], 0.0) == set()


def test_descriptors_beyond_those_of_select() -> None:
    with many_open():
        a, b = socket.socketpair()
        with a, b:
            assert a.fileno() > 1024
            b.send(b"x")
            assert readable([a.fileno()], 1.0) == {a.fileno()}


def test_workers_start_and_end_beyond_those_of_select() -> None:
    with many_open():
        nursery = Nursery(module="tests.launchers.idle", preload="json")
        try:
            here, there = socket.socketpair()
            with here, there:
                pid = nursery.fork([there.fileno()])
            assert nursery.fileno() > 1024
            nursery.wait([pid], 30.0)
            assert pid in nursery.ended()
        finally:
            nursery.close()
