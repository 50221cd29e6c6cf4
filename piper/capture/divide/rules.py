"""The table of rules: for every operation how it divides, and which collectives its operands need."""

from piper.capture.divide import attention, compute, losses, shapes
from piper.capture.divide.divider import Rule

RULES: dict[object, Rule] = {**shapes.RULES, **compute.RULES, **losses.RULES, **attention.RULES}
