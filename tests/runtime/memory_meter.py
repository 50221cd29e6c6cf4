"""Measures the bytes that live slots really hold, to compare with what the plan predicts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from torch import Tensor

from piper.plan.instr import Instr
from piper.plan.memory_timeline import timeline
from piper.runtime.bucket_layout import Flat
from piper.runtime.context import BatchField, Bound, Env
from piper.runtime.cuda.graphs import GraphExecutor
from piper.runtime.executor import Executor
from piper.runtime.expert_exchange import Blocks, Splits
from piper.runtime.stream_executor import StreamExecutor
from piper.runtime.worker import Options, Sums, Worker
from piper.workers import inline, single_rank


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

    def watch(self, ins: Instr, run: Bound) -> Bound:
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
            return [value.counts]
        case Blocks():
            return [value.source, value.fills, value.target, value.order, value.home]
        case list() | tuple():
            return [item for item in value if isinstance(item, Tensor)]
    return []


class MeasuredWorker(Worker):
    """A worker that runs its plan in the order of issue, with a meter."""

    meter: MemoryMeter

    def _executor(
        self, bound: Sequence[Bound], options: Options
    ) -> Executor | StreamExecutor | GraphExecutor:
        self.meter = MemoryMeter(self.env)
        watched = [self.meter.watch(ins, run) for ins, run in zip(self.env.plan.instrs, bound, strict=True)]
        return super()._executor(watched, replace(options, streams=False))

    def run(self, batch: Mapping[str, BatchField]) -> Sums:
        self.meter.begin()
        return super().run(batch)


@contextmanager
def measured() -> Iterator[None]:
    """Let workers that are started inside, in this process, measure the bytes of live slots."""
    with patch.object(inline, "Worker", MeasuredWorker), patch.object(single_rank, "Worker", MeasuredWorker):
        yield


def meter_of(worker: Worker) -> MemoryMeter:
    """Return the meter of a worker that was started inside `measured`."""
    assert isinstance(worker, MeasuredWorker)
    return worker.meter


def planned_bytes(worker: Worker) -> list[int]:
    """Return the bytes of live slots at each instruction that a worker's plan predicts."""
    plan = worker.env.plan
    foreseen = timeline(plan)
    pairs = zip(foreseen.live, plan.instrs, strict=True)
    return [live - foreseen.resident - ins.workspace for live, ins in pairs]
