"""`at`: which nodes a directive speaks of."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from piper.errors import ScheduleError
from piper.ir.chunk import Phase

Index = int | Literal["*"] | None  # one index; any index of the tag; without the tag
PASSES = (*get_args(Phase), "*")


@dataclass(frozen=True, slots=True)
class At:
    """Selects nodes by tag and phase. A tag that is not named does not matter."""

    tags: tuple[tuple[str, Index], ...] = ()
    phase: Phase | None = None  # None: any

    def __str__(self) -> str:
        shown = [f"{tag}={'-' if index is None else index}" for tag, index in self.tags]
        return "at(" + ", ".join([*shown, *([f"PASS={self.phase}"] if self.phase else [])]) + ")"


def at(PASS: str | None = None, **tags: Index) -> At:  # noqa: N803  the contract spells it so
    """Select nodes: `at(PP=0, EP="*", MB=1, PASS="F")`. "*": any index, None: without that tag."""
    if PASS is not None and PASS not in PASSES:
        raise ScheduleError(
            f"there is no pass {PASS!r}",
            by="at",
            hint="PASS is F, B, BI (input gradients), BW (weight gradients) or *",
        )
    for tag, index in tags.items():
        whole = isinstance(index, int) and not isinstance(index, bool) and index >= 0
        if not (whole or index is None or index == "*"):
            raise ScheduleError(
                f"{tag}={index!r} selects nothing",
                by="at",
                hint='an index is a whole number from 0, "*" for any, or None for nodes without the tag',
            )
    phase = None if PASS in (None, "*") else cast(Phase, PASS)
    return At(tuple(sorted(tags.items())), phase)
