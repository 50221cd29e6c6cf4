"""Schedules by the names that the command line knows. A schedule registers its grid with its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from piper.errors import ScheduleError
from piper.schedules.grid import Grid, need_whole

FixedBuild = TypeVar("FixedBuild", bound=Callable[[int, int], Grid])
InterleavedBuild = TypeVar("InterleavedBuild", bound=Callable[[int, int, int], Grid])


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """A schedule that the command line knows."""

    build: Callable[[int, int, int], Grid]  # ranks, microbatches, stages per rank
    stages_per_rank: int  # unless asked otherwise
    instead: str = (
        ""  # where it has no other number of stages: a schedule that takes one. Empty: it takes any
    )


_KNOWN: dict[str, NamedSchedule] = {}  # filled where schedules are defined, and never changed after
_RANKS: dict[str, int] = {}
NAMES: Mapping[str, NamedSchedule] = MappingProxyType(_KNOWN)  # in the order of their ranks
SYNTHESISED = "synthesised"  # has no grid of its own: the command line searches for one


def fixed(name: str, rank: int, *, stages_per_rank: int, instead: str) -> Callable[[FixedBuild], FixedBuild]:
    """Register the grid of a schedule with a fixed number of stages per rank, at `rank` in every list."""

    def register(build: FixedBuild) -> FixedBuild:
        def of_ranks(ranks: int, microbatches: int, _: int) -> Grid:
            return build(ranks, microbatches)

        _register(name, rank, NamedSchedule(build=of_ranks, stages_per_rank=stages_per_rank, instead=instead))
        return build

    return register


def interleaved(name: str, rank: int) -> Callable[[InterleavedBuild], InterleavedBuild]:
    """Register the grid of a schedule with any number of stages per rank, at `rank` in every list."""

    def register(build: InterleavedBuild) -> InterleavedBuild:
        _register(name, rank, NamedSchedule(build=build, stages_per_rank=2))
        return build

    return register


def _register(name: str, rank: int, entry: NamedSchedule) -> None:
    _RANKS[name], _KNOWN[name] = rank, entry
    for other in sorted(_KNOWN, key=_RANKS.__getitem__):  # the order of imports must not show
        _KNOWN[other] = _KNOWN.pop(other)


def known() -> tuple[str, ...]:
    """Return every name that the command line knows."""
    return (*NAMES, SYNTHESISED)


@lru_cache(maxsize=256)  # some take a second for many ranks, and a search asks for each many times
def grid_for(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Grid:
    """Build a schedule by name. Without `stages_per_rank`, as many as the schedule usually has."""
    if name not in NAMES:
        close = get_close_matches(name.lower().replace("_", "-"), known(), n=1)
        raise ScheduleError(
            f"there is no schedule {name!r}",
            by="schedule",
            facts={"known": ", ".join(known())},
            hint=f"did you mean {close[0]}?" if close else "use one of the known names",
        )
    entry = NAMES[name]
    stages_per_rank = entry.stages_per_rank if stages_per_rank is None else stages_per_rank
    need_whole(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    if entry.instead and stages_per_rank != entry.stages_per_rank:
        raise ScheduleError(
            f"stages_per_rank={stages_per_rank}",
            by=name,
            facts={"needs": f"stages_per_rank={entry.stages_per_rank}"},
            hint=f"leave stages_per_rank out, or use {entry.instead}",
        )
    return entry.build(ranks, microbatches, stages_per_rank)
