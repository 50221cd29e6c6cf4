"""Keeps what every chunk returned in a step, so that two runs can be compared where they first differ."""

from torch import Tensor

from piper.ids import Pass, SlotId
from piper.plan.instr import Instr
from piper.runtime.env import Bound, Env

Mark = tuple[Pass, SlotId]  # a pass and one of its results, whatever the microbatch: `SlotId.base`


class Trail:
    """The outputs and input gradients of a device's chunks, in the order they were made."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.kept: dict[Mark, Tensor] = {}

    def watch(self, ins: Instr, run: Bound) -> Bound:
        """An instruction whose results are kept, if it is a chunk's."""
        if ins.op != "compute" or ins.again:
            return run
        slots, kept = self.env.slots, self.kept
        marks = [
            ((ins.computes, slot.base), self.env.at(slot))
            for slot in ins.writes
            if slot.kind in ("output", "input_gradient")
        ]

        def watched() -> None:
            run()
            for mark, slot in marks:
                value = slots[slot]
                if isinstance(value, Tensor):
                    kept[mark] = value.clone()

        return watched
