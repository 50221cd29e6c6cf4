"""Sums of contributions, compared without being written out.

A sum is a multiset of contributions. It is kept as the sum of their 128-bit digests modulo 2**128, so adding
and comparing take constant time whatever the number of contributions. Two different multisets agree with a
chance of about 2**-128; a multiplicity that is a multiple of 2**128 does not occur. How a sum came about is
noted too, so that a counterexample can name what is missing.
"""

from collections import Counter
from hashlib import blake2b
from heapq import heappop, heappush

MODULUS = 1 << 128
Amount = int  # the number of an interned sum; 0 is the empty one
NOTHING: Amount = 0


class Amounts:
    """Interns sums: two sums of the same contributions have the same number."""

    def __init__(self) -> None:
        self._digests: list[int] = [0]
        self._numbers: dict[int, Amount] = {0: NOTHING}
        self._made_of: list[str | tuple[Amount, Amount]] = [""]
        self._leaves: dict[str, Amount] = {}
        self._sums: dict[tuple[Amount, Amount], Amount] = {}

    def single(self, label: str) -> Amount:
        """Return the sum of one contribution, which its label identifies."""
        amount = self._leaves.get(label)
        if amount is None:
            digest = int.from_bytes(blake2b(label.encode(), digest_size=16).digest(), "big")
            amount = self._leaves[label] = self._intern(digest, label)
        return amount

    def add(self, left: Amount, right: Amount) -> Amount:
        """Return the sum of two sums."""
        if not left or not right:
            return left or right
        total = self._sums.get((left, right))
        if total is None:
            digest = (self._digests[left] + self._digests[right]) % MODULUS
            total = self._sums[left, right] = self._intern(digest, (left, right))
        return total

    def times(self, amount: Amount, count: int) -> Amount:
        """Return a sum taken several times."""
        total = NOTHING
        for _ in range(count):
            total = self.add(total, amount)
        return total

    def contributions(self, amount: Amount) -> Counter[str]:
        """Return the contributions of a sum, each with how often it is in it."""
        leaves: Counter[str] = Counter()
        counts = {amount: 1} if amount else {}
        waiting = [-amount] if amount else []
        while waiting:  # from the latest sum to the earliest: a sum is made of earlier ones
            number = -heappop(waiting)
            count, made_of = counts.pop(number), self._made_of[number]
            if isinstance(made_of, str):
                leaves[made_of] += count
                continue
            for part in made_of:
                if part not in counts:
                    heappush(waiting, -part)
                counts[part] = counts.get(part, 0) + count
        return leaves

    def _intern(self, digest: int, made_of: str | tuple[Amount, Amount]) -> Amount:
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._digests)
            self._digests.append(digest)
            self._made_of.append(made_of)
        return number
