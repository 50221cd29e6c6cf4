"""Records what every chunk returned in a step, so that two runs can be compared where they first differ."""

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
        collects = ins.op in ("collect", "slice")
        if not collects and (ins.op != "compute" or ins.again):
            return run
        by = ins.collects.run if collects else ins.computes
        written = [slot for slot in ins.writes if collects or slot.kind in ("output", "input_gradient")]
        marks = [((by, slot.base), self.env.at(slot)) for slot in written]

        def watched() -> None:
            run()
            for mark, slot in marks:
                value = self.env.slots[slot]
                if isinstance(value, Tensor):
                    self.kept[mark] = value.clone()

        return watched
