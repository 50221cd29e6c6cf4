"""The process of a rank in the suite of communicators."""

from collections.abc import Sequence

from tests.gpu.rank_process import become_rank
from tests.runtime import comm_process


def main(descriptors: Sequence[int]) -> int:
    """Run the tasks of the suite."""
    become_rank()
    return comm_process.main(descriptors)
