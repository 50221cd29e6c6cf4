"""The process of a rank in the suite of communicators."""

from collections.abc import Sequence

from piper.selftest import rank_process
from tests.gpu.rank_process import become_rank


def main(descriptors: Sequence[int]) -> int:
    """Run the tasks of the suite."""
    become_rank()
    return rank_process.main(descriptors)
