"""One device of a job: its state, its plan, and one step at a time. The same under every launcher."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from piper.ir.ids import TOTAL, buffer_slot
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.runtime.accelerator import is_accelerator, module
from piper.runtime.comm.base import Comms
from piper.runtime.context import BatchField, Bound, Dice, Env
from piper.runtime.cuda.graph_checks import check_static
from piper.runtime.cuda.graphs import GraphExecutor, Intake
from piper.runtime.device_state import DeviceState
from piper.runtime.executor import Executor
from piper.runtime.expert_exchange import TABLES, tables_of_field
from piper.runtime.kernels import KERNELS
from piper.runtime.recorders import OutputRecorder, PredictionRecorder, Recorder, predicts
from piper.runtime.setup import Initial, Setup, blank_values
from piper.runtime.stream_executor import Show, StreamExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums over all devices at the end of a step, and what one device has to say of it."""

    numbers: Mapping[str, tuple[float, ...]]  # of each of the plans' sums
    busy: float = 0.0  # seconds that this device computed, where a launcher counts them
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # ^ of each expert in this device's group, by chunks of experts that have clones
    repeated: bool = False  # rows exceeded their blocks, so the step was run again with as many as there were
    fullest: tuple[float, float] = (0.0, 0.0)
    # ^ then of this device's fullest block what it would need, and its room, both in even shares

    def __getitem__(self, name: str) -> float:
        return self.numbers[name][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a worker runs its plan."""

    streams: bool = True  # a thread for each stream; else everything in the order of issue
    timeout: float = 60.0  # seconds that any one wait may take
    threads: int = 1  # of one computation: on their number depends how it rounds
    keep_gradients: bool = False  # so that they can be looked at after the step
    keep_outputs: bool = False  # every result of a chunk, likewise
    blank: bool = False  # begin without first values, because a checkpoint is loaded before the first step
    profile: int = 0  # steps whose instructions are timed, after the first few
    graphs: bool = False  # on CUDA: issue a step as one graph, after the first few
    share: str = "host"  # devices that share an accelerator exchange values through the host, or by NCCL

    @property
    def looks(self) -> list[str]:
        """Return which of these look at single instructions of a step."""
        found = {
            "keep_gradients": self.keep_gradients,
            "keep_outputs (--detect-nan)": self.keep_outputs,
            "profile (--profile)": self.profile,
        }
        return [name for name, asked in found.items() if asked]


Watch = Callable[[int, Instr, Bound], Bound]  # an instruction of the plan, by its place, as it is to be run
Kernels = Mapping[Op, Callable[[Env, Instr], Bound]]


class Worker:
    """A device that runs its plan."""

    def __init__(
        self,
        setup: Setup,
        device: int,
        comms: Comms,
        initial: Initial,
        options: Options,
        dice: Dice | None = None,
        watch: Watch | None = None,
        show: Show = lambda places: None,
        kernels: Kernels = KERNELS,
        state: DeviceState | None = None,  # of the worker whose parameters this one uses too. None: its own
    ) -> None:
        self.setup, self.device = setup, device
        self.options, self.watch, self.show, self.kernels = options, watch, show, kernels
        self.intake: Intake | None = None
        if options.graphs:
            check_static(setup, [setup.plans.of(device)], options.looks, by_host=not comms.on_streams)
            self.intake = Intake()
            kernels = self.intake.kernels(kernels)
        setup.build_code([setup.plans.of(device)], lambda: None)
        self.env = Env(setup, device, comms, initial, dice, state)
        if state is None:
            self.env.state.keep_gradients = options.keep_gradients
        plan = self.env.plan
        bound = [kernels[ins.op](self.env, ins) for ins in plan.instrs]
        self.trail = OutputRecorder(self.env) if options.keep_outputs else None
        self.recorder = Recorder(device, options.profile, setup.device) if options.profile else None
        self.predictions = PredictionRecorder(self.env) if predicts(setup.outline) else None
        watchers = (self.intake, self.trail, self.predictions, self.recorder)
        watches = [watcher.watch for watcher in watchers if watcher is not None]
        for each in watches if watch is None else [*watches, watch]:
            instrs = enumerate(zip(plan.instrs, bound, strict=True))
            bound = [each(place, ins, run) for place, (ins, run) in instrs]
        self.places = setup.plans.places
        self.on_host = torch.zeros(
            sum(setup.plans.sums.values()), dtype=torch.float64, pin_memory=is_accelerator(setup.device)
        )
        self.others: dict[int, Worker] = {}  # by the numbers of their programs
        self.latest = self  # the one that ran the last step
        self.holder = self.env.state  # the layout in which the state is
        self.executor = self._executor(bound, options)

    def _executor(
        self, bound: Sequence[Bound], options: Options
    ) -> Executor | StreamExecutor | GraphExecutor:
        """Return the plan's executor: threads on the host, streams on an accelerator, or a graph of them."""
        env = self.env
        bindings = (env.plan, bound, env.slots, env.index, self.device, env.comms.abort, self._fetch)
        if not is_accelerator(self.setup.device):
            return Executor(*bindings, streams=options.streams, timeout=options.timeout)
        executor = StreamExecutor(
            *bindings,
            streams=options.streams,
            timeout=options.timeout,
            accelerator=self.setup.device,
            show=self.show,
            home=None if self.intake is None else module(self.setup.device).Stream(self.setup.device),
        )
        env.streams = executor.streams
        if self.intake is None:
            return executor
        overflows = self.places.get("overflows")
        undone = None if overflows is None else (env.at(TOTAL), overflows.start)
        return GraphExecutor(executor, self.intake, [*map(env.at, env.plan.residents)], undone)

    def _fetch(self) -> None:
        """Bring the step's sums to the host; on an accelerator, when it gets there."""
        self.on_host.copy_(cast(Tensor, self.env.slots[self.env.at(TOTAL)]), non_blocking=True)

    def step(self, batch: Mapping[str, BatchField], number: int = 0) -> Sums:
        """Train on one global batch, of which this device takes its rows, with the program of a number."""
        self.latest = self.others[number] if number else self
        assert self.latest.env.state is self.holder, "the state has moved there before"
        if self.latest is not self:
            self._lend_buffers(self.latest)
        sums = self.latest.run(batch)
        if self.latest is not self:
            self._take_buffers(self.latest)
        self.env.step += 1
        if self.holder.scheduler is not None:
            # A device that trains nothing in this layout has not stepped its optimizer: say nothing of it.
            self.holder.optimizer._opt_called = True  # type: ignore[union-attr]
            self.holder.scheduler.step()
        return sums

    def run(self, batch: Mapping[str, BatchField]) -> Sums:
        """Run the plan once on this device's rows of a global batch, and return the sums over all devices."""
        env = self.env
        env.batch = batch
        env.rows.clear()
        env.fullest.clear()
        if isinstance(tables := batch.get(TABLES), Tensor):
            env.move_experts(tables_of_field(tables, self.setup.plans.cloned))
        repeated = self._issue()
        env.batch = {}
        numbers = {name: tuple(self.on_host[place].tolist()) for name, place in self.places.items()}
        rows = {region: tuple(counts.tolist()) for region, counts in env.rows.items()}
        fullest = max(((float(needs), room) for room, needs in env.fullest), default=(0.0, 0.0))
        return Sums(numbers=numbers, rows=rows, repeated=repeated, fullest=fullest)

    def _issue(self) -> bool:
        """Run the plan, a second time where rows exceed their blocks. Return whether it ran again."""
        # The first run has then changed buffers only: no device has updated anything.
        env = self.env
        overflows = self.places.get("overflows")
        kept = () if overflows is None else env.index.items()
        buffers = {place: env.slots[place] for slot, place in kept if slot.kind == "buffer"}
        self.executor.run()
        if overflows is None or not self.on_host[overflows]:
            return False
        for place, value in buffers.items():
            env.slots[place] = value
        env.exact = True
        try:
            self.executor.issue()
        finally:
            env.exact = False
        return True

    def prepare(
        self,
        number: int,
        setup: Setup,
        comms: Comms,
        initial: Initial,
        *,
        trains: bool = False,
    ) -> None:
        """Bind the plan of another program, which trains or evaluates this worker's parameters."""
        # In another layout it has a state of its own, which is empty until the worker's state moves there.
        # initial: the values of buffers that this worker's own plan does not hold.
        options = replace(self.options, profile=0, graphs=False)  # each graph keeps memory of its own
        if not trains:
            options = replace(options, keep_gradients=False, keep_outputs=False)
        states = [self.env.state, *dict.fromkeys(other.env.state for other in self.others.values())]
        state = next((one for one in states if setup.plans.lie_in(one.setup.plans)), None)
        if state is None:
            assert trains, "the program whose parameters are evaluated comes first"
            state = DeviceState(setup, self.device, blank_values(setup.outline), states)
            state.keep_gradients = options.keep_gradients
            state.hold(False, state.own(beside=self.holder))
        self.others[number] = Worker(
            setup,
            self.device,
            comms,
            initial,
            options,
            self.env.dice,
            self.watch,
            self.show,
            self.kernels,
            state,
        )
        if trains:
            self.others[number].env.vault = self.env.vault

    def evaluate(self, number: int, batch: Mapping[str, BatchField]) -> Sums:
        """Run an evaluation program on one global batch, with this worker's parameters and buffers."""
        evaluator = self.others[number]
        self._lend_buffers(evaluator)
        return evaluator.run(batch)

    def _lend_buffers(self, other: "Worker") -> None:
        """Let the worker of another program begin where this one is: with its step and its buffers."""
        other.env.step = self.env.step
        for mine, its in self._shared_buffers(other):
            other.env.slots[its] = self.env.slots[mine]

    def _take_buffers(self, other: "Worker") -> None:
        """Take the buffers as another program has left them; where a graph reads them, into their memory."""
        for mine, its in self._shared_buffers(other):
            before, now = self.env.slots[mine], other.env.slots[its]
            if before is not now and isinstance(self.executor, GraphExecutor):
                cast(Tensor, before).copy_(cast(Tensor, now))
            else:
                self.env.slots[mine] = now

    def _shared_buffers(self, other: "Worker") -> Iterator[tuple[int, int]]:
        """Yield the places of each buffer that both programs use, in this worker and in the other."""
        for slot, place in other.env.index.items():
            if slot.kind == "buffer" and slot in self.env.index:
                yield self.env.at(slot), place

    def owned(self, bucket: str) -> Tensor:
        """Return what this device holds of a bucket, exact: its shard, or all of it."""
        return self.env.state.holdings[bucket].trained

    def gradient(self, bucket: str) -> Tensor | None:
        """Return the last gradient of this device's share of a bucket, before clipping. None: it has none."""
        return self.latest.env.state.gradients.get(bucket)

    def buffer(self, name: str) -> Tensor | None:
        """Return a buffer. None: this device does not use it."""
        slot = self.env.index.get(buffer_slot(name))
        return None if slot is None else cast(Tensor, self.env.slots[slot])

    def buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return what this device holds of those of the named buffers that it uses."""
        return {name: value for name in names if (value := self.buffer(name)) is not None}

    def renew(self) -> None:
        """Take note that the state was loaded: it may lie elsewhere in memory now."""
        for away in self.env.state.away.values():
            away.put_away(wait=True)
        for act in self.env.state.renewed:
            act()
        if isinstance(self.executor, GraphExecutor):
            self.executor.reset()

    def close(self) -> None:
        """End the worker's threads."""
        for other in self.others.values():
            other.close()
        self.executor.close()
