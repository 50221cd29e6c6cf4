"""Runs one device's plan. Nothing here knows what a pipeline or a shard is."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from time import monotonic

import torch

from piper.ir.ids import SlotId
from piper.plan.plan import Plan
from piper.runtime.comm.base import CommError, StoppedError
from piper.runtime.context import Bound

Step = tuple[
    int, Bound, "tuple[Lock, ...]", "Lock | None", tuple[int, ...]
]  # place, kernel, waits, signal, frees

POLL = 0.05  # seconds between looks at whether another lane has failed: a recovery begins so much later


class Executor:
    """The instructions of a plan, bound to their kernels, on lanes that each run in order.

    A stream is a lane: a thread that runs its instructions first to last and waits for events of the others.
    With `streams=False` the whole plan is one lane in the order of issue, which needs no events: the proof of
    a plan covers it, because no device issues out of the global order.
    """

    def __init__(
        self,
        plan: Plan,
        bound: Sequence[Bound],
        slots: list[object],
        index: Mapping[SlotId, int],
        device: int,
        on_failure: Callable[[], None] = lambda: None,
        outro: Bound = lambda: None,  # runs when all lanes are at their end
        *,
        streams: bool = True,
        timeout: float = 60.0,
    ) -> None:
        self.plan, self.slots, self.device = plan, slots, device
        self.timeout, self.on_failure, self.outro = timeout, on_failure, outro
        self.events: list[Lock] = []
        self.failed = False
        signals = [ins.signals for ins in plan.instrs if ins.signals is not None]
        if streams:
            self.events = [Lock() for _ in range(max(signals, default=-1) + 1)]
        lanes: dict[str, list[Step]] = {}
        for place, (ins, run) in enumerate(zip(plan.instrs, bound, strict=True)):
            waits = tuple(self.events[event] for event in ins.waits) if streams else ()
            signal = self.events[ins.signals] if streams and ins.signals is not None else None
            frees = tuple(index[slot] for slot in ins.frees)
            lanes.setdefault(ins.stream if streams else "", []).append((place, run, waits, signal, frees))
        self.lanes = list(lanes.values())
        self.threads = ThreadPoolExecutor(len(self.lanes), "stream") if len(self.lanes) > 1 else None

    def run(self) -> None:
        """Run the plan once; returns when every lane is at its end."""
        for event in self.events:
            event.acquire(blocking=False)  # held: not yet signalled
        if self.threads is None:
            for lane in self.lanes:
                self.run_lane(lane)
        else:
            futures = [self.threads.submit(self.run_lane, lane) for lane in self.lanes]
            wait(futures)
            errors = [error for future in futures if (error := future.exception()) is not None]
            errors.sort(key=lambda error: isinstance(error, StoppedError))  # the cause of the others is first
            if errors:
                raise errors[0]
        self.outro()

    issue = run  # there is no graph to do without

    def run_lane(self, lane: Sequence[Step]) -> None:
        """Run the instructions of one lane in order."""
        slots, place = self.slots, 0
        try:
            with torch.no_grad():
                for place, run, waits, signal, frees in lane:  # noqa: B007  the handler names the place
                    for event in waits:
                        if not event.acquire(timeout=POLL):
                            self.wait_on(event)
                        event.release()
                    run()
                    for slot in frees:
                        slots[slot] = None
                    if signal is not None:
                        signal.release()
        except Exception as error:
            error.add_note(f"on device {self.device}, at the arrow:\n{self.plan.around(place)}")
            self.failed = True
            self.on_failure()
            raise

    def wait_on(self, event: Lock) -> None:
        """Wait for an event that takes its time, unless another lane fails."""
        until = monotonic() + self.timeout
        while not self.failed:
            if event.acquire(timeout=POLL):
                return
            if monotonic() > until:
                raise CommError(f"waited {self.timeout:g} s for another stream")
        raise StoppedError("another stream of this device has failed")

    def close(self) -> None:
        """End the threads."""
        if self.threads is not None:
            self.threads.shutdown()
