"""Slots for tests that draw their plans by hand."""

from piper.ir.ids import SlotId, read_slot

AXES = ("MB", "K")


def slot(text: str) -> SlotId:
    """Return the slot of a text such as `PP=0.out0[MB=1]`; a single word is the first output of that chunk."""
    return SlotId("output", text) if text.isalpha() else read_slot(text, AXES)


def slots(*texts: str) -> tuple[SlotId, ...]:
    """Return several slots."""
    return tuple(map(slot, texts))
