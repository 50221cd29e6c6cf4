"""The cost of whole passes, as schedules count them: a phase, and the sum of the gradients that it makes."""

from math import prod

from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.simulate.costs import Costs

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ADDING = 3  # a sum reads the sum so far and the gradient, and writes the sum


def pass_seconds(outline: CapturedModel, chunk: Chunk, phase: Phase, costs: Costs) -> float:
    """Return the seconds of a pass: of its phase, and of adding its gradients to those of other microbatches.

    An accumulation is an instruction of its own in a plan. It belongs to the pass whose gradients it adds: a
    schedule that leaves it out takes weight gradients for shorter than they are.
    """
    return costs.compute(chunk, phase) + accumulation_seconds(outline, chunk, phase, costs)


def accumulation_seconds(outline: CapturedModel, chunk: Chunk, phase: Phase, costs: Costs) -> float:
    """Return the seconds of adding the gradients of one pass to those of other microbatches."""
    spec = chunk.phases.get(phase)
    if spec is None or not spec.grad_params:
        return 0.0
    made = set(spec.grad_params)
    nbytes = sum(BYTES.get(p.dtype, 4) * prod(p.local_shape) for p in outline.parameters if p.name in made)
    return costs.touch("accumulate", ADDING * nbytes)
