"""A permutation that is computed index by index instead of stored."""

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
Words = NDArray[np.uint64]
ROUNDS = 6


class Shuffle:
    """A permutation of 0 ... size - 1 that a seed and an epoch decide.

    A Feistel network: each round swaps and mixes the two halves of a number's bits and can be inverted, so
    no two numbers map to one. It permutes the next power of four. A number that lands outside the range is
    permuted again until it lands inside (cycle walking), which it does because it started inside.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self.half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self.mask = np.uint64((1 << int(self.half)) - 1)
        state = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
        self.keys: Words = state.astype(np.uint64)

    def __call__(self, places: Places) -> Places:
        """Return the entries of the permutation at these places."""
        found = self._rounds(places.astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._rounds(found[outside])
        return found.astype(np.int64)

    def _rounds(self, numbers: Words) -> Words:
        left, right = numbers >> self.half, numbers & self.mask
        for key in self.keys:
            left, right = right, left ^ (mixed(right + key) & self.mask)
        return (left << self.half) | right


def mixed(words: Words) -> Words:
    """Spread every bit of each word over the whole word; overflow is meant."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
