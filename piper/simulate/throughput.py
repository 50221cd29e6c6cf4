"""The throughput of a step: tokens or samples a second, and how much of the devices' peak the model uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.format import percent
from piper.plan.plan import Plans

TOKENS = ("tokens", "input_ids")  # the fields whose elements are tokens, where a batch has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What a step trains on and computes, and what all devices together could compute."""

    amount: int  # of a global batch
    unit: str  # "tokens", or "samples" of a batch without tokens
    flops: float  # of the model
    peak: float | None = None  # FLOP/s of all devices. None: not known

    def mfu(self, step: float) -> float | None:
        """Return the model FLOP/s utilisation of a step of so many seconds. None: the peak is not known."""
        return None if self.peak is None or not step else self.flops / (self.peak * step)

    def text(self, step: float) -> str:
        """Return the throughput for people: `52,000 tokens/s, MFU 41 %`."""
        rate = f"{self.amount / step:,.0f} {self.unit}/s"
        mfu = self.mfu(step)
        return rate if mfu is None else f"{rate}, MFU {percent(mfu, 1)}"


def amount_of(shapes: Mapping[str, Sequence[int]]) -> tuple[int, str]:
    """Return how much a global batch holds, and of what, from the shapes of its fields."""
    tokens = next((prod(shapes[name]) for name in TOKENS if name in shapes), None)
    if tokens is not None:
        return tokens, "tokens"
    return next((shape[0] for shape in shapes.values()), 0), "samples"


def model_flops(plans: Plans, outline: CapturedModel) -> float:
    """Return the FLOPs of the model in a step, over all devices. Recomputation does not count."""
    known = {chunk.name: float(flops_of(chunk)) for chunk in outline.chunks}
    return sum(
        known[ins.computes.chunk] * len(plan.devices)
        for plan in plans
        for ins in plan.instrs
        if ins.op == "compute" and ins.computes.phase == "F" and not ins.computes.again
    )


def flops_of(chunk: Chunk) -> int:
    """Return the FLOPs of a chunk on one microbatch: a backward takes at most twice those of the forward.

    What it takes beyond that are activations that it computes a second time.
    """
    forward = chunk.phases["F"].flops if "F" in chunk.phases else 0
    halves: tuple[Phase, ...] = ("B",) if "B" in chunk.phases else ("BI", "BW")
    return forward + min(sum(chunk.phases[p].flops for p in halves if p in chunk.phases), 2 * forward)
