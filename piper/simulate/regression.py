"""Fits lines to measured points: a time is a base, plus a slope times the amount of work."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds as a function of size. Base and slope are at least 0."""

    base: float
    slope: float

    def at(self, size: float) -> float:
        """Return the seconds of a size."""
        return self.base + self.slope * size


NOTHING = Line(base=0.0, slope=0.0)


def line_through(points: Sequence[tuple[float, float]], like: Line = NOTHING) -> Line:
    """Fit a line to points (size, seconds) with the least relative error.

    like: the prior where all points have one size. Its slope is kept and the base fitted if the base
    dominates at that size, otherwise its base is kept and the slope fitted. Without points it is the result.
    Points of one size count once, by their median, so that frequent sizes do not outweigh rare ones.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    joined = [(size, median(found)) for size, found in sorted(by_size.items())]
    joined = [(size, seconds) for size, seconds in joined if seconds > 0]
    if not joined:
        return like
    if len(joined) == 1:
        size, seconds = joined[0]
        if not size or like.slope * size < like.base:
            return Line(base=max(0.0, seconds - like.slope * size), slope=like.slope)
        base = min(like.base, seconds)
        return Line(base=base, slope=(seconds - base) / size)
    fitted = two_features([(1.0, size, seconds) for size, seconds in joined])
    return Line(base=fitted[0], slope=fitted[1])


def two_features(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a, b >= 0 so that a * x + b * y has the least relative error to z, over points (x, y, z)."""
    scaled = [(x / z, y / z) for x, y, z in points if z > 0]
    if not scaled:
        return 0.0, 0.0
    xx, yy = sum(x * x for x, _ in scaled), sum(y * y for _, y in scaled)
    xy, sx, sy = sum(x * y for x, y in scaled), sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (sx * yy - sy * xy) / determinant, (sy * xx - sx * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone = [(sx / xx if xx else 0.0, 0.0), (0.0, sy / yy if yy else 0.0)]
    return min(alone, key=lambda ab: sum((ab[0] * x + ab[1] * y - 1) ** 2 for x, y in scaled))
