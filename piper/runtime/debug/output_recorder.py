"""Records what every chunk returned in a step, so that two runs can be compared where they first differ."""

from typing import cast

from torch import Tensor

from piper.ir.ids import Pass, SlotId
from piper.plan.instr import Instr
from piper.runtime.context import Bound, Env

OutputKey = tuple[Pass, SlotId]  # a pass and one of its results, whatever the microbatch: `SlotId.base`


class OutputRecorder:
    """The outputs and input gradients of a device's chunks, in the order they were made."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.kept: dict[OutputKey, Tensor] = {}

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Return an instruction that records its results, if it is a chunk's or a collective."""
        if ins.op in ("collect", "slice"):
            return self._collective(ins, run)
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

    def _collective(self, ins: Instr, run: Bound) -> Bound:
        """Return a collective that records the value it read and the value it wrote."""
        slots, kept, at = self.env.slots, self.kept, ins.collects.run
        read, written = self.env.at(ins.reads[0]), self.env.at(ins.writes[0])

        def watched() -> None:
            kept[at, ins.reads[0].base] = cast(Tensor, slots[read]).clone()
            run()
            kept[at, ins.writes[0].base] = cast(Tensor, slots[written]).clone()

        return watched
