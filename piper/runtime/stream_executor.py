"""Runs one device's plan on streams of an accelerator, issued by one host thread in the order of the plan."""

from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic, sleep

import torch

from piper.ir.ids import SlotId
from piper.plan.ops import OPS
from piper.plan.plan import Plan
from piper.runtime.accelerator import module
from piper.runtime.comm.base import CommError
from piper.runtime.context import Bound
from piper.runtime.memory_release import releases

Step = tuple[
    int,  # place
    Bound,
    torch.Stream,
    tuple[torch.Event, ...],  # waits
    tuple[int, ...],  # parked slots to drop first
    tuple[int, ...],  # slots it frees
    tuple[int, ...],  # slots it parks
    tuple[int, ...],  # residents that it may replace
    torch.Event | None,  # signal
    torch.Event | None,  # the host waits for this one before it issues the instruction
]

Show = Callable[[Mapping[str, int]], None]  # takes the place that each stream is at
GLANCE = 5e-5  # seconds between looks at whether the step is over, at least
LOOKS = 400  # a look comes after the 400th part of the time waited so far: communication needs the cores too
POLL = 0.2  # seconds between looks at whether anything moves
# A collective is issued when the computation that signals so many signals before it is over, not earlier:
# from then on until it can begin, threads of NCCL look for its data and take cores from those that send.
# Transfers between two devices are issued at once: a host that is late with one makes the next stage wait.
AHEAD = 3


class StreamExecutor:
    """The instructions of a plan, bound to their kernels, on streams that run side by side.

    The host issues everything in the order of the plan, and waits only for the end of the step, for numbers
    that an instruction needs on the host, and where it is too far ahead of the device. The proof of the plans
    covers these waits: devices that run one instruction after another never wait in a circle. Streams wait
    for each other by events, made once and recorded again in each step. With `streams=False` all is issued on
    the stream that is current.
    """

    def __init__(
        self,
        plan: Plan,
        bound: Sequence[Bound],
        slots: list[object],
        index: Mapping[SlotId, int],
        device: int,
        on_failure: Callable[[], None] = lambda: None,
        outro: Bound = lambda: None,  # issued last, when all streams are joined: brings results to the host
        *,
        accelerator: torch.device,
        streams: bool = True,
        timeout: float = 60.0,
        home: torch.Stream | None = None,  # that steps begin and end on. None: where the state is changed
        show: Show = lambda places: None,  # takes the place of each stream while the host waits for the end
    ) -> None:
        self.plan, self.slots, self.device, self.accelerator = plan, slots, device, accelerator
        self.timeout, self.on_failure, self.outro, self.show = timeout, on_failure, outro, show
        self.alone = all(ins.comm is None for ins in plan.instrs)  # no other device can block a step
        self.parked: list[object] = [None] * len(slots)
        self.replaced: list[object] = []
        self.module = module(accelerator)
        self.begin, self.done = self.module.Event(), self.module.Event()
        self.events: dict[int, torch.Event] = {}  # by the place that signals
        with self.module.device(accelerator):
            self.streams = self._streams() if streams else {}
            self.ends = {name: self.module.Event() for name in self.streams}
            self.home = self.module.default_stream() if home is None else home
        self.steps = self._bind(bound, index)

    def _streams(self) -> dict[str, torch.Stream]:
        """Return a stream for each of the plan's; communication has priority over computation."""
        talking = {ins.stream for ins in self.plan.instrs if OPS[ins.op].communicates}
        names = dict.fromkeys(ins.stream for ins in self.plan.instrs)
        return {name: self.module.Stream(priority=-1 if name in talking else 0) for name in names}

    def _bind(self, bound: Sequence[Bound], index: Mapping[SlotId, int]) -> list[Step]:
        plan = self.plan
        handlings = releases(plan)
        signalled = plan.signallers
        awaited = {*signalled.values(), *(place for handling in handlings for place in handling.waits)}
        self.events = {place: self.module.Event() for place in sorted(awaited | before_waits(plan))}
        steps: list[Step] = []
        computed: list[torch.Event] = []
        for place, (ins, run, handling) in enumerate(zip(plan.instrs, bound, handlings, strict=True)):
            replaces = tuple(index[slot] for slot in ins.writes if slot.kind == "buffer")
            signal = self.events.get(place)
            if not self.streams:
                frees = tuple(index[slot] for slot in ins.frees)
                steps.append((place, run, self.home, (), (), frees, (), (), signal, None))
                continue
            collective = ins.comm is not None and OPS[ins.op].pattern != "pair"
            pace = computed[-AHEAD] if collective and len(computed) >= AHEAD else None
            if signal is not None and place in awaited and ins.comm is None:
                computed.append(signal)
            places = dict.fromkeys([*(signalled[event] for event in ins.waits), *handling.waits])
            steps.append(
                (
                    place,
                    run,
                    self.streams[ins.stream],
                    tuple(self.events[other] for other in places),
                    tuple(index[slot] for slot in handling.drops),
                    tuple(index[slot] for slot in handling.frees),
                    tuple(index[slot] for slot in handling.parks),
                    replaces,
                    signal,
                    pace,
                )
            )
        return steps

    def run(self) -> None:
        """Run the plan once; returns when every stream is at its end."""
        with self.module.device(self.accelerator), torch.no_grad():
            self.enqueue(paced=True)
            with self.module.stream(self.home):
                self.outro()
            self.done.record(self.home)
            if self.alone:
                self.done.synchronize()
            else:
                self._wait(self.done, len(self.steps))
            self.drop()

    issue = run  # there is no graph to do without

    def enqueue(self, *, paced: bool = False) -> None:
        """Run the plan once: every stream begins after the home stream, which goes on after all of them.

        paced: the host never is far ahead of the device.
        """
        home = self.home
        self.begin.record(home)  # what was done to the state between steps was done here
        for stream in self.streams.values():
            stream.wait_event(self.begin)
        self._issue(paced)
        for name, stream in self.streams.items():
            self.ends[name].record(stream)
            home.wait_event(self.ends[name])

    def drop(self) -> None:
        """Let go of what was held until the end of the step."""
        self.parked = [None] * len(self.slots)
        self.replaced.clear()

    def _issue(self, paced: bool) -> None:
        before = now = self.module.current_stream()
        try:
            for step in self.steps:
                place, stream, pace = step[0], step[2], step[-1]
                if paced and pace is not None:
                    self._wait(pace, place)
                if stream is not now:
                    self.module.set_stream(stream)
                    now = stream
                try:
                    self._issue_one(step)
                except Exception as error:
                    error.add_note(f"on device {self.device}, at the arrow:\n{self.plan.around(place)}")
                    self.on_failure()
                    raise
        finally:
            self.module.set_stream(before)

    def _issue_one(self, step: Step) -> None:
        _, run, stream, waits, drops, frees, parks, replaces, signal, _ = step
        slots, parked = self.slots, self.parked
        for event in waits:
            stream.wait_event(event)
        for slot in drops:
            parked[slot] = None
        for slot in replaces:  # another stream may have taken its memory, and this one still reads it
            self.replaced.append(slots[slot])
        run()
        for slot in frees:
            slots[slot] = None
        for slot in parks:
            parked[slot], slots[slot] = slots[slot], None
        if signal is not None:
            signal.record(stream)

    def _wait(self, awaited: torch.Event, issued: int) -> None:
        """Wait for an event as long as anything moves of the first instructions, which have been issued."""
        begin = now = moved = looked = monotonic()
        seen = -1
        while not awaited.query():
            now = pause(now - begin)
            if now - looked < POLL:
                continue
            events = [(place, event) for place, event in self.events.items() if place < issued]
            looked, over = now, {place for place, event in events if event.query()}
            if len(over) != seen:
                seen, moved = len(over), now
                self.show(self.running(over, issued))
            elif now - moved > self.timeout:
                error = CommError(f"nothing has moved for {self.timeout:g} s")
                place = self.stuck(issued)
                error.add_note(f"on device {self.device}, at the arrow:\n{self.plan.around(place)}")
                self.on_failure()
                raise error
        if seen >= 0:
            self.show({})

    def running(self, over: Collection[int], issued: int) -> dict[str, int]:
        """Return the place that each stream is at; `over`: those whose events have come."""
        if not self.streams:
            place = self.stuck(issued)
            return {self.plan.instrs[place].stream: place}
        at_end = issued == len(self.steps)
        ended = {name for name, end in self.ends.items() if end.query()} if at_end else ()
        return places_of_streams(self.plan, over, ended)

    def stuck(self, issued: int) -> int:
        """Return the place of the first instruction that is known not to be over."""
        waiting = [place for place, event in self.events.items() if place < issued and not event.query()]
        return min(waiting, default=issued - 1)

    def close(self) -> None:
        """Do nothing: the streams are at their end after each step, so nothing is left running."""


def pause(waited: float) -> float:
    """Wait for the next look at a step, which has been waited for so many seconds. Return the time."""
    sleep(max(GLANCE, waited / LOOKS))
    return monotonic()


def before_waits(plan: Plan) -> set[int]:
    """Return the places after which their stream waits: an event there tells if it runs still, or waits."""
    before: dict[str, int] = {}
    found: set[int] = set()
    for place, ins in enumerate(plan.instrs):
        if ins.waits and ins.stream in before:
            found.add(before[ins.stream])
        before[ins.stream] = place
    return found


def places_of_streams(plan: Plan, over: Collection[int], ended: Collection[str]) -> dict[str, int]:
    """Return the place that each stream is at: its first that is not over, if all that this waits for is.

    over: the places whose events have come. ended: the streams that have run all of their instructions.
    """
    signalled = plan.signallers
    last = {plan.instrs[place].stream: place for place in sorted(over)}
    first: dict[str, int] = {}
    for place, ins in enumerate(plan.instrs):
        if ins.stream not in ended and place > last.get(ins.stream, -1):
            first.setdefault(ins.stream, place)
    return {
        stream: place
        for stream, place in first.items()
        if all(signalled[event] in over for event in plan.instrs[place].waits)
    }
