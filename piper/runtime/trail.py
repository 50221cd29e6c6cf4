"""Keeps what every chunk returned in a step, so that two runs can be compared where they first differ."""

from torch import Tensor

from piper.plan.instr import Instr
from piper.runtime.env import Bound, Env

Mark = tuple[str, str]  # the node, and its value without the part: ("F[PP=0 MB=1]", "PP=0.out0")


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
            ((ins.node, slot.partition("[")[0]), self.env.at(slot))
            for slot in ins.writes
            if ".out" in slot or ".din" in slot
        ]

        def watched() -> None:
            run()
            for mark, slot in marks:
                value = slots[slot]
                if isinstance(value, Tensor):
                    kept[mark] = value.clone()

        return watched
