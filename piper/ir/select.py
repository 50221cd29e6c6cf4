"""`at`: the filter by which a directive selects nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from piper.errors import ScheduleError
from piper.ir.chunk import Phase
from piper.ir.numbers import is_whole

One = int | Literal["*"] | None  # one index; any index of the tag; without the tag
Index = One | tuple[int, ...]  # several indices: at least two, each once, in ascending order
Asked = One | Sequence[int]  # as users write it: a range or a list selects several indices
PASSES = (*get_args(Phase), "*")
WAY_OUT = (
    'an index is a whole number from 0, several as a range or a list, "*" for any, '
    "or None for nodes without the tag"
)


@dataclass(frozen=True, slots=True, repr=False)
class At:
    """Selects nodes by tag and phase. Tags that the filter does not name may have any index."""

    tags: tuple[tuple[str, Index], ...] = ()
    phase: Phase | None = None  # None: any

    def __repr__(self) -> str:
        """Return the call of `at` that makes this filter."""
        shown = [f"{tag}={show_index(index)}" for tag, index in self.tags]
        return "at(" + ", ".join([*shown, *([f'PASS="{self.phase}"'] if self.phase else [])]) + ")"

    def narrowed(self, phase: Phase, **tags: Index) -> "At":
        """Return a filter that also asks for a phase and for tags that this one does not name."""
        return At(tuple(sorted((*self.tags, *tags.items()), key=lambda pair: pair[0])), phase)


def show_index(index: Index) -> str:
    """Write what a filter asks of a tag as Python: `0`, `"*"`, `None`, `[0, 2]`, `range(0, 4)`."""
    if not isinstance(index, tuple):
        return '"*"' if index == "*" else str(index)
    whole = range(index[0], index[-1] + 1)
    return f"range({whole.start}, {whole.stop})" if len(index) > 2 and index == (*whole,) else f"{[*index]}"


def at(PASS: str | None = None, **tags: Asked) -> At:  # noqa: N803  the contract spells it so
    """Select nodes: `at(PP=0, EP="*", LAYER=range(0, 4), PASS="F")`. "*": any index, None: without that tag.

    A range or a list selects several indices.
    """
    if PASS is not None and PASS not in PASSES:
        raise ScheduleError(
            f"there is no pass {PASS!r}",
            by="at",
            hint="PASS is F, B, BI (input gradients), BW (weight gradients) or *",
        )
    phase = None if PASS in (None, "*") else cast(Phase, PASS)
    return At(tuple((tag, _given_index(tag, tags[tag])) for tag in sorted(tags)), phase)


def _given_index(tag: str, asked: Asked) -> Index:
    """Check the index of a tag that a user gives, and return it. Several indices become a tuple."""
    if isinstance(asked, range | list | tuple):
        if asked and all(is_whole(index, 0) for index in asked):
            several = tuple(sorted(set(asked)))
            return several if len(several) > 1 else several[0]
    elif asked is None or asked == "*" or is_whole(asked, 0):
        return asked
    raise ScheduleError(f"{tag}={asked!r} selects nothing", by="at", hint=WAY_OUT)
