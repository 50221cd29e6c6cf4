"""Pipeline schedules: integers in, `order` directives out. They use public directives only."""

from piper.schedules.alternating import interleaved_1f1b, interleaved_zero_bubble, one_f_one_b, zero_bubble
from piper.schedules.dualpipe import dualpipe, dualpipe_v
from piper.schedules.gpipe import gpipe
from piper.schedules.pairs import pairs
from piper.schedules.synthesis.synthesise import Synthesised, bound, synthesise
from piper.schedules.timing import Memory, Placement, StageCosts
from piper.schedules.torch_csv import from_csv
from piper.schedules.v_shaped import v_half, v_min, zbv

__all__ = [
    "Memory",
    "Placement",
    "StageCosts",
    "Synthesised",
    "bound",
    "dualpipe",
    "dualpipe_v",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "one_f_one_b",
    "pairs",
    "synthesise",
    "v_half",
    "v_min",
    "zbv",
    "zero_bubble",
]
