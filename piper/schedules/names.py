"""Schedules by the names that the command line knows."""

from difflib import get_close_matches

from piper.errors import ScheduleError
from piper.schedules.grid import Grid, need_whole
from piper.schedules.named import NAMES as NAMES
from piper.schedules.named import Fixed, Interleaved
from piper.schedules.synthesis.synthesise import synthesised

SYNTHESISED = "synthesised"
KNOWN = (*NAMES, SYNTHESISED)
DEFAULT_STAGES_PER_RANK = 2


def grid_for(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Grid:
    """Build a schedule by name. Without `stages_per_rank`, as many as the schedule usually has."""
    if name == SYNTHESISED:
        return synthesised(ranks, microbatches, stages_per_rank or DEFAULT_STAGES_PER_RANK).grid
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
