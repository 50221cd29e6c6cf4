"""Lets torch's Transformer use a mask as it is.

Works around: torch 2.11. The Transformer compares a mask with a causal one, to choose a faster kernel for the
same values, and no trace can branch on that.
Not needed from: no version yet.
"""

from contextlib import AbstractContextManager

from torch.nn.modules import transformer

from piper.process.attributes import replaced


def masks_as_given() -> AbstractContextManager[None]:
    """Use masks inside the block as their callers describe them: as causal only where these say so."""

    def said_to_be_causal(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return replaced(transformer, "_detect_is_causal_mask", said_to_be_causal)
