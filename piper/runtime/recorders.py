"""Records what instructions do, next to the executor: when each ran, what chunks returned, and predictions.

On the host an instruction's span is that of its call, and the time its thread computed is recorded apart
from the time it waited. On an accelerator a span lies between two events on the instruction's stream, read
after the steps are done.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import cast

import torch
from torch import Tensor
from torch.autograd import profiler

from piper.ir.chunk import CapturedModel, Chunk, Tags
from piper.ir.ids import LOSS, Pass, SlotId
from piper.plan.instr import Instr
from piper.runtime.accelerator import capturing, is_accelerator, module
from piper.runtime.compute import slices
from piper.runtime.context import Bound, Env
from piper.runtime.setup import ProgramLike

WARM = 2  # steps that are not recorded: peers meet, memory is taken, code is loaded
Times = tuple[float, float, float]  # from, to, and seconds of computing on the host
OutputKey = tuple[Pass, SlotId]  # a pass and one of its results, whatever the microbatch: `SlotId.base`


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The recorded steps of one device, on its own clock: for each step the times of every instruction."""

    device: int
    steps: tuple[tuple[Times, ...], ...]  # from the one on that comes after `WARM` others


class Recorder:
    """Watches the instructions of one device: it skips a few steps, records the next, then stops."""

    def __init__(self, device: int, steps: int, accelerator: torch.device) -> None:
        self.device, self.most = device, WARM + steps
        self.rows: list[list[Times]] = []  # by instruction: one entry a step
        self.events = Events(accelerator) if is_accelerator(accelerator) else None

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Wrap an instruction to note when it ran, under its node's name in a trace of torch's profiler."""
        assert place == len(self.rows), "instructions are watched in order"
        row: list[Times] = []
        self.rows.append(row)
        most = self.most
        if self.events is not None:
            return labelled(ins.node, self.events.watch(row, most, run))

        def timed() -> None:
            if len(row) >= most:
                run()
                return
            begin, busy = monotonic(), thread_time()
            run()
            row.append((begin, monotonic(), thread_time() - busy))

        return labelled(ins.node, timed)

    def take(self) -> DeviceProfile:
        """Return what has been recorded, without the steps that are not complete."""
        if self.events is not None:
            self.events.resolve()
        done = min((len(row) for row in self.rows), default=0)
        steps = tuple(tuple(row[step] for row in self.rows) for step in range(WARM, done))
        return DeviceProfile(device=self.device, steps=steps)


class Events:
    """Pairs of events on the streams of an accelerator, and the host's clock at one of them."""

    def __init__(self, accelerator: torch.device) -> None:
        self.accelerator, self.module = accelerator, module(accelerator)
        self.pending: list[tuple[list[Times], torch.Event, torch.Event, float]] = []
        self.lock = threading.Lock()
        with self.module.device(accelerator):
            self.base = self.module.Event(enable_timing=True)
            self.module.synchronize()
            self.base.record()
            self.base.synchronize()
            self.began = monotonic()

    def watch(self, row: list[Times], most: int, run: Bound) -> Bound:
        """Wrap an instruction in two events of the stream that is current when it is issued."""
        noted = 0

        def timed() -> None:
            nonlocal noted
            if noted >= most:
                run()
                return
            noted += 1
            begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
            host = thread_time()
            begin.record()
            run()
            end.record()
            with self.lock:
                self.pending.append((row, begin, end, thread_time() - host))

        return timed

    def resolve(self) -> None:
        """Read the events that have not been read, on the host's clock."""
        self.module.synchronize(self.accelerator)
        for row, begin, end, host in self.pending:
            start = self.began + self.base.elapsed_time(begin) / 1e3
            row.append((start, start + begin.elapsed_time(end) / 1e3, host))
        self.pending.clear()


def labelled(node: str, run: Bound) -> Bound:
    """Wrap an instruction so that it has a label while a torch profiler runs."""
    # Kineto also draws it on the streams of an accelerator, around the kernels that were launched within it.

    def named() -> None:
        if profiler._is_profiler_enabled:  # of the process: threads do not know of a profiler themselves
            with profiler.record_function(node):
                run()
        else:
            run()

    return named


class DeviceTimes:
    """The events of one device's instructions. The host issues them long before they run."""

    def __init__(self, accelerator: torch.device) -> None:
        self.accelerator, self.module = accelerator, module(accelerator)
        self.recorded: dict[int, tuple[torch.Event, torch.Event]] = {}  # by place, since `take`

    def watch(self, place: int, run: Bound) -> Bound:
        """Return an instruction that records when its stream begins and ends it."""
        events = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)

        def timed() -> None:
            if capturing(self.accelerator):
                run()  # events inside a graph cannot be read
                return
            events[0].record()
            run()
            events[1].record()
            self.recorded[place] = events

        return timed

    def take(self) -> float:
        """Return the seconds of all instructions since the last call. The step must be over."""
        found, self.recorded = self.recorded, {}
        return float(sum(begin.elapsed_time(end) for begin, end in found.values())) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """A worker's clock relative to the driver's: the offset of its times, and the error of that offset."""

    offset: float
    error: float


def compare(ask: Callable[[], float], tries: int = 8) -> ClockOffset:
    """Estimate a clock's offset by asking for its time: in the shortest round trip it answered half way."""
    best = ClockOffset(offset=0.0, error=float("inf"))
    for _ in range(tries):
        begin = monotonic()
        there = ask()
        end = monotonic()
        error = (end - begin) / 2
        if error < best.error:
            best = ClockOffset(offset=there - (begin + end) / 2, error=error)
    return best


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


def first_bad(
    outline: CapturedModel, trails: Mapping[int, Mapping[OutputKey, Tensor]], state: Mapping[str, Tensor]
) -> str | None:
    """Return the first bad result in the order of the model. None: all results are finite.

    The order: forwards, backwards in reverse, parameters. Later results only propagate it. Within a chunk,
    microbatches are looked at one after another.
    """
    order = {chunk.name: place for place, chunk in enumerate(outline.chunks)}
    bad_results: list[tuple[tuple[int, int], int, OutputKey, str]] = []
    for device, trail in trails.items():
        for place, (mark, value) in enumerate(trail.items()):
            if bad := kind_of(value):
                chunk = order[mark[0].chunk]
                forward = mark[0].phase == "F"
                bad_results.append(
                    ((0, chunk) if forward else (1, -chunk), place, mark, f"{bad} on device {device}")
                )
    if bad_results:
        _, _, (run, slot), what = min(bad_results, key=lambda item: item[:2])
        return f"{run}: {slot} holds {what}"
    for name, tensor in state.items():
        if bad := kind_of(tensor):
            return f"the update: {name} holds {bad}"
    return None


def kind_of(value: Tensor) -> str | None:
    """Return what is wrong with a tensor's numbers. None: all are finite."""
    if not value.is_floating_point() or bool(torch.isfinite(value).all()):
        return None
    return "a NaN" if bool(torch.isnan(value).any()) else "an infinity"


def predicts(outline: CapturedModel) -> bool:
    """Return whether a program predicts: what it has in place of a loss is more than one number."""
    return bool(loss_chunk(outline).outputs[outline.loss.index].shape)


def loss_chunk(outline: CapturedModel) -> Chunk:
    """Return the chunk that computes the loss."""
    return next(chunk for chunk in outline.chunks if chunk.name == outline.loss.chunk)


class PredictionRecorder:
    """The predictions of a device, by microbatch: forwards, kept where losses would be added up."""

    # So the proof that every loss is counted exactly once says of the predictions that none is missing.

    def __init__(self, env: Env) -> None:
        self.env = env
        self.kept: dict[Tags, Tensor] = {}

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Return an instruction that keeps a prediction, in place of one that adds up losses."""
        if ins.op != "accumulate" or ins.writes[0] != LOSS:
            return run
        slots, source, total = self.env.slots, self.env.at(ins.reads[0]), self.env.at(LOSS)
        part, device = ins.reads[0].part, self.env.setup.device

        def keep() -> None:
            self.kept[part] = cast(Tensor, slots[source]).clone()
            slots[total] = torch.zeros(1, dtype=torch.float64, device=device)

        return keep

    def take(self) -> dict[Tags, Tensor]:
        """Return the predictions on the host, and keep them no longer."""
        kept, self.kept = self.kept, {}
        return {part: value.cpu() for part, value in kept.items()}


def predicted_rows(program: ProgramLike, answers: Mapping[int, Mapping[Tags, Tensor]]) -> Tensor:
    """Return the rows that devices predicted, in the order of the batch. Devices that share samples agree."""
    plans, chunk = program.plans, loss_chunk(program.outline)
    degree, placed = program.outline.degree(chunk), plans.chunks[chunk.name]
    values: list[tuple[int, int, Tags, Tensor]] = []  # a slice of the samples, of how many, and its rows
    for device, kept in answers.items():
        for part, value in kept.items():
            devices = placed.devices_for(part)
            position, member = divmod(devices.index(device), degree)
            if not member:
                values.append((position, len(devices) // degree, part, value))
    samples = sum(len(value) for *_, value in values)
    rows = values[0][-1].new_empty((samples, *values[0][-1].shape[1:]))
    for position, count, part, value in values:
        spans = slices(plans, samples, position, count, part)
        rows[torch.cat([torch.arange(low, high) for low, high in spans])] = value
    return rows
