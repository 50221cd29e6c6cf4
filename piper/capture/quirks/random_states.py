"""Leaves out the states of random generators that AOTAutograd would make and throw away.

Works around: torch 2.11. Each trace of a forward and backward makes them twice, twelve tensors, which takes a
twentieth of the time of a small trace. Only its setting `functionalize_rng_ops` needs them.
Not needed from: no version yet.
"""

from contextlib import AbstractContextManager

from torch._decomp.decompositions_for_rng import PhiloxState

from piper.process.attributes import replaced


def no_random_states() -> AbstractContextManager[None]:
    """Make no tensors for the states of generators inside the block."""

    def without_tensors(state: PhiloxState) -> None:
        state.relative_offset, state.offset_advanced_at_least_once = 0, False

    return replaced(PhiloxState, "reset", without_tensors)
