"""Lets `flex_attention` compute gradients on the host, by the operations that it has there.

Works around: torch 2.13. It refuses a gradient on a CPU because no compiled kernel has one. Its operator has
one that is not compiled, which is what runs there.
Not needed from: no version yet.
"""

from contextlib import AbstractContextManager

from torch.nn.attention import flex_attention

from piper.process.attributes import replaced


def flex_gradients_on_host() -> AbstractContextManager[None]:
    """Let attention inside the block have a gradient on any device."""
    return replaced(flex_attention, "_validate_device", lambda query, key, value: None)
