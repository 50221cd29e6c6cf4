"""Finds the elements that a stored piece of a tensor and a wanted one have in common."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper.checkpoint.metadata import SavedPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Runs that two pieces share. Places count the elements of a piece as they lie end to end."""

    stored: int  # where the first run begins in the stored piece
    wanted: int  # and in the wanted one
    length: int  # of one run
    count: int = 1
    stored_step: int = 0  # from one run to the next; 0: there is one run
    wanted_step: int = 0


def overlaps(stored: SavedPiece, wanted: SavedPiece) -> Iterator[Overlap]:
    """Yield what two pieces of one tensor have in common; runs at equal distances come together."""
    if not stored.elements or not wanted.elements:
        return
    if stored.count == wanted.count == 1:  # most pieces are one run, and arrays take ten times as long
        begin = max(stored.offset, wanted.offset)
        end = min(stored.offset + stored.length, wanted.offset + wanted.length)
        if begin < end:
            yield Overlap(stored=begin - stored.offset, wanted=begin - wanted.offset, length=end - begin)
        return
    have, want = stored.starts(), wanted.starts()
    if have[-1] + stored.length <= want[0] or want[-1] + wanted.length <= have[0]:
        return
    low = np.searchsorted(have + stored.length, want, side="right")  # the first stored run that ends later
    high = np.searchsorted(have, want + wanted.length, side="left")
    met = np.maximum(high - low, 0)  # stored runs that each wanted run meets
    total = int(met.sum())
    if not total:
        return
    theirs = np.repeat(np.arange(wanted.count), met)
    ours = np.arange(total) - np.repeat(np.cumsum(met) - met, met) + np.repeat(low, met)
    begin = np.maximum(have[ours], want[theirs])
    lengths = np.minimum(have[ours] + stored.length, want[theirs] + wanted.length) - begin
    sources = ours * stored.length + begin - have[ours]
    targets = theirs * wanted.length + begin - want[theirs]
    yield from together(sources, targets, lengths)


Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def together(sources: Numbers, targets: Numbers, lengths: Numbers) -> Iterator[Overlap]:
    """Yield runs, with those of one length at equal distances in both pieces as one."""
    steps = np.stack([np.diff(sources), np.diff(targets)])
    turns = np.flatnonzero((np.diff(steps) != 0).any(axis=0)) + 1  # runs after which a step differs
    breaks = np.flatnonzero(np.diff(lengths) != 0) + 1  # runs that have another length than the one before
    first, count = 0, len(sources)
    while first < count:
        later = breaks[np.searchsorted(breaks, first, side="right") :]
        last = int(later[0]) if len(later) else count
        turning = turns[np.searchsorted(turns, first, side="right") :]
        last = min(last, int(turning[0]) + 1) if len(turning) else last
        several = last - first > 1
        yield Overlap(
            stored=int(sources[first]),
            wanted=int(targets[first]),
            length=int(lengths[first]),
            count=last - first,
            stored_step=int(steps[0, first]) if several else 0,
            wanted_step=int(steps[1, first]) if several else 0,
        )
        first = last
