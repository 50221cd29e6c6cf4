"""Schedules by the names that the command line knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from piper.errors import ScheduleError
from piper.schedules.dualpipe import dualpipe_v_grid
from piper.schedules.gpipe import gpipe_grid
from piper.schedules.grid import Grid, need_whole
from piper.schedules.one_forward_one_backward import interleaved_1f1b_grid, one_f_one_b_grid
from piper.schedules.v_memory import v_half_grid, v_min_grid
from piper.schedules.zbv import zbv_grid
from piper.schedules.zero_bubbles import interleaved_zero_bubble_grid, zero_bubble_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A schedule with a fixed number of stages per rank."""

    build: Callable[[int, int], Grid]
    stages_per_rank: int
    instead: str  # a schedule that takes another number of stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    """A schedule with any number of stages per rank."""

    build: Callable[[int, int, int], Grid]
    stages_per_rank: int = 2  # unless asked otherwise


NAMES: Mapping[str, Fixed | Interleaved] = MappingProxyType(
    {
        "gpipe": Fixed(build=gpipe_grid, stages_per_rank=1, instead="interleaved-1f1b"),
        "1f1b": Fixed(build=one_f_one_b_grid, stages_per_rank=1, instead="interleaved-1f1b"),
        "interleaved-1f1b": Interleaved(build=interleaved_1f1b_grid),
        "zero-bubble": Fixed(build=zero_bubble_grid, stages_per_rank=1, instead="interleaved-zero-bubble"),
        "interleaved-zero-bubble": Interleaved(build=interleaved_zero_bubble_grid),
        "zbv": Fixed(build=zbv_grid, stages_per_rank=2, instead="interleaved-zero-bubble"),
        "v-half": Fixed(build=v_half_grid, stages_per_rank=2, instead="synthesised"),
        "v-min": Fixed(build=v_min_grid, stages_per_rank=2, instead="synthesised"),
        "dualpipe-v": Fixed(build=dualpipe_v_grid, stages_per_rank=2, instead="interleaved-zero-bubble"),
    }
)
SYNTHESISED = "synthesised"  # has no grid of its own: the command line searches for one
KNOWN = (*NAMES, SYNTHESISED)


def grid_for(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Grid:
    """Build a schedule by name. Without `stages_per_rank`, as many as the schedule usually has."""
    if name not in NAMES:
        close = get_close_matches(name.lower().replace("_", "-"), KNOWN, n=1)
        raise ScheduleError(
            f"there is no schedule {name!r}",
            by="schedule",
            facts={"known": ", ".join(KNOWN)},
            hint=f"did you mean {close[0]}?" if close else "use one of the known names",
        )
    entry = NAMES[name]
    stages_per_rank = entry.stages_per_rank if stages_per_rank is None else stages_per_rank
    need_whole(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    match entry:
        case Interleaved():
            return entry.build(ranks, microbatches, stages_per_rank)
        case Fixed():
            if stages_per_rank != entry.stages_per_rank:
                raise ScheduleError(
                    f"stages_per_rank={stages_per_rank}",
                    by=name,
                    facts={"needs": f"stages_per_rank={entry.stages_per_rank}"},
                    hint=f"leave stages_per_rank out, or use {entry.instead}",
                )
            return entry.build(ranks, microbatches)
