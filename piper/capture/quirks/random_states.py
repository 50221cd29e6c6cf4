"""Leaves out the states of random generators that AOTAutograd would make and throw away.

Works around: torch 2.11. Each trace of a forward and backward makes them twice, twelve tensors, which takes a
twentieth of the time of a small trace. Only its setting `functionalize_rng_ops` needs them.
Not needed from: no version yet.
"""

from contextlib import AbstractContextManager, nullcontext

from torch._decomp.decompositions_for_rng import PhiloxState
from torch._functorch import config

from piper.process.attributes import replaced


def no_random_states() -> AbstractContextManager[None]:
    """Make no tensors for the states of generators inside the block, unless they are needed."""
    if config.functionalize_rng_ops:
        return nullcontext()
    return replaced(PhiloxState, "reset", lambda state: None)
