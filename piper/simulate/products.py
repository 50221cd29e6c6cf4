"""The time of matrix products and attention on a device that divides them in tiles over its processors."""

from math import ceil
from typing import NamedTuple


class Tile(NamedTuple):
    """The part of a product that one processor computes at a time, and how fast, against the largest."""

    rows: int
    columns: int
    speed: float


# Smaller tiles read more for each number that they compute.
TILES = (
    Tile(256, 128, 1.0),
    Tile(128, 256, 1.0),
    Tile(128, 128, 0.92),
    Tile(128, 64, 0.75),
    Tile(64, 128, 0.75),
    Tile(64, 64, 0.55),
)
SPLITS = (1, 2, 4, 8)  # of the depth, so that the last round is not mostly empty
LEAST_DEPTH = 1024  # of a split
START = 100  # of the depth: a tile takes as long to begin and to end
SHORT = 550  # tokens: attention takes as long to begin and to end, and on the diagonal of a causal one


def product_seconds(flops: float, shape: tuple[int, ...], speed: float, processors: int) -> float:
    """Return the seconds of the arithmetic of a product, with the tiles that are best for it.

    shape: how many products, their rows, columns and depth. Empty: not known, and taken as even.
    speed: the FLOP/s of all processors together, for large and deep products.
    Every processor computes one tile after another. In the last round some have nothing to do.
    """
    if not processors or not shape:
        return flops / speed
    many, rows, columns, depth = shape
    best = float("inf")
    for tile in TILES:
        tiles = many * ceil(rows / tile.rows) * ceil(columns / tile.columns)
        work = 2 * tile.rows * tile.columns / tile.speed
        for split in SPLITS:
            if split > 1 and depth < split * LEAST_DEPTH:
                break
            best = min(best, ceil(tiles * split / processors) * work * (depth / split + START))
    return best * processors / speed


def attention_seconds(flops: float, shape: tuple[int, ...], speed: float, processors: int) -> float:
    """Return the seconds of the arithmetic of attention, which is less efficient for short sequences.

    shape: how many heads in all, queries, keys, and the width of a head. Empty: not known.
    """
    if not processors or not shape:
        return flops / speed
    return flops * (1 + SHORT / shape[2]) / speed
