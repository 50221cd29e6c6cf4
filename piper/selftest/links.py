"""How fast ranks communicate: each link of a ring by itself, and every collective."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from piper.runtime.comm.base import Form, Group
from piper.selftest.rank_process import Meeting, Processes, Rank
from piper.simulate.measured import Line, line_through

SIZES = {False: (2**10, 2**18, 2**21), True: (2**12, 2**22, 2**26)}  # bytes of a transfer, by `Meeting.apart`
LARGE = {False: 2**22, True: 2**28}  # bytes of the tensor of a collective, likewise
ROUNDS = 7  # and one more before, which does not count
FLOAT = torch.float32


def timed(rank: Rank, act: Callable[[], object]) -> list[float]:
    """Return the seconds of some rounds, each of which all ranks begin together."""
    group, token = rank.comms.group("all"), torch.zeros(1, device=rank.device)
    times = []
    for _ in range(ROUNDS + 1):
        group.all_reduce(token)
        rank.wait()
        begin = perf_counter()
        act()
        rank.wait()
        times.append(perf_counter() - begin)
    return times[1:]


def transfer_times(rank: Rank, source: int, nbytes: int) -> list[float]:
    """Send a tensor from a rank to the next. Return the seconds that this rank takes."""
    value = torch.zeros(nbytes, dtype=torch.uint8, device=rank.device)
    form = Form((nbytes,), torch.uint8)
    acts = {
        source: lambda: rank.comms.outgoing("ring").send(value),
        (source + 1) % rank.size: lambda: rank.comms.incoming("ring").recv(form),
    }
    return timed(rank, acts.get(rank.number, lambda: None))


def measured_links(processes: Processes, meeting: Meeting) -> Iterator[Line]:
    """Measure the way from each rank to the next: the seconds to begin, and those of each byte."""
    for source in range(meeting.size):
        points = []
        for nbytes in SIZES[meeting.apart]:
            every = processes.call(meeting, partial(transfer_times, source=source, nbytes=nbytes))
            received = cast("list[list[float]]", every)[(source + 1) % meeting.size]
            points.append((float(nbytes), min(received)))  # other work can only slow it down
        yield line_through(points)


def collective_times(rank: Rank, name: str) -> list[float]:
    """Return the seconds of a collective on a large tensor on this rank."""
    length = LARGE[rank.meeting.apart] // FLOAT.itemsize // rank.size
    whole = torch.zeros(length * rank.size, dtype=FLOAT, device=rank.device)
    group = rank.comms.group("all")
    return timed(rank, lambda: COLLECTIVES[name].act(group, whole, length))


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """A collective on a tensor of equal parts for all ranks."""

    act: Callable[[Group, Tensor, int], object]  # takes the length of a part
    share: Callable[[int], float]  # of the tensor that goes through each rank's link, by the number of ranks


def others(size: int) -> float:
    """Return the part of a tensor that belongs to other ranks."""
    return (size - 1) / size


COLLECTIVES = {
    "all_reduce": TimedCollective(
        lambda group, whole, _: group.all_reduce(whole), lambda size: 2 * others(size)
    ),
    "reduce_scatter": TimedCollective(lambda group, whole, part: group.reduce_scatter(whole, part), others),
    "all_gather": TimedCollective(
        lambda group, whole, part: group.all_gather(whole.split(part)[group.rank], whole), others
    ),
    "all_to_all": TimedCollective(
        lambda group, whole, part: group.all_to_all(whole, [part] * group.size, [part] * group.size), others
    ),
    "shift": TimedCollective(lambda group, whole, _: group.shift(whole, 1), lambda size: 1.0),
    "broadcast": TimedCollective(lambda group, whole, _: group.broadcast(whole), lambda size: 1.0),
}


def measured_collectives(processes: Processes, meeting: Meeting) -> dict[str, tuple[float, float]]:
    """Return the seconds of every collective, and the bytes per second through the link of each rank.

    These are the "bus bandwidths" of nccl-tests.
    """
    measured: dict[str, tuple[float, float]] = {}
    for name, collective in COLLECTIVES.items():
        every = cast("list[list[float]]", processes.call(meeting, partial(collective_times, name=name)))
        spent = min(map(max, zip(*every, strict=True)))
        measured[name] = spent, collective.share(meeting.size) * LARGE[meeting.apart] / spent
    return measured
