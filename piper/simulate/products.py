"""The time of a matrix product on a device that divides it in tiles over its processors."""

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
SPLITS = (1, 2, 4, 8)  # of the depth, where there are fewer tiles than processors
SHALLOW = 64  # of the depth: what a tile takes to begin and to end


def product_seconds(flops: float, shape: tuple[int, ...], speed: float, processors: int) -> float:
    """Return the seconds of the arithmetic of a product, with the tiles that are best for it.

    shape: how many products, their rows, columns and depth. Empty: not known, and taken as even.
    speed: the FLOP/s of all processors together, for large products.
    Every processor computes one tile after another. In the last round some have nothing to do.
    """
    if not processors or not shape:
        return flops / speed
    many, rows, columns, depth = shape
    best = float("inf")
    for tile in TILES:
        tiles = many * ceil(rows / tile.rows) * ceil(columns / tile.columns)
        for split in SPLITS:
            rounds = ceil(tiles * split / processors)
            deep = depth / split + SHALLOW
            best = min(best, rounds * 2 * tile.rows * tile.columns * deep / tile.speed)
            if tiles * split >= processors:
                break
    return best * processors / speed
