"""Measures the bytes that live slots really hold, to compare with what the plan predicts."""

from torch import Tensor

from piper.plan.instr import Instr
from piper.runtime.bucket_layout import Flat
from piper.runtime.context import Bound, Env
from piper.runtime.expert_exchange import Splits


class MemoryMeter:
    """The live bytes of the slots made within a step, storage by storage, after each instruction.

    Instructions must run in the order of issue: that is the order the plan's own count follows.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self.live: list[int] = []
        self.now = 0
        self.held: dict[int, list[Tensor]] = {}
        self.users: dict[int, int] = {}  # slots that share a storage, by its address

    def begin(self) -> None:
        """Reset the measurement for a new step."""
        assert not self.held, "a slot outlived its step"
        self.live = []

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Wrap an instruction so that it is counted: what it writes, then what it frees."""
        plan, slots = self.env.plan, self.env.slots
        writes = [self.env.at(slot) for slot in ins.writes if slot in plan.slots]
        frees = [self.env.at(slot) for slot in ins.frees]

        def counted() -> None:
            run()
            for slot in writes:
                if slot in self.held:
                    self._release(slot)
                self._hold(slot, tensors_in(slots[slot]))
            self.live.append(self.now)
            for slot in frees:
                self._release(slot)

        return counted

    def _hold(self, slot: int, tensors: list[Tensor]) -> None:
        self.held[slot] = tensors
        for tensor in tensors:
            storage = tensor.untyped_storage()
            users = self.users[storage._cdata] = self.users.get(storage._cdata, 0) + 1
            if users == 1:
                self.now += storage.nbytes()

    def _release(self, slot: int) -> None:
        for tensor in self.held.pop(slot):
            storage = tensor.untyped_storage()
            self.users[storage._cdata] -= 1
            if not self.users[storage._cdata]:
                del self.users[storage._cdata]
                self.now -= storage.nbytes()


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors that a slot holds."""
    match value:
        case Tensor():
            return [value]
        case Flat():
            return [value.whole]
        case Splits():
            return [value.given, value.taken]
        case list() | tuple():
            return [item for item in value if isinstance(item, Tensor)]
    return []
