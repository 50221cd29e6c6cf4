"""The environment of a device's kernels: slots, state and communicators."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from piper.ir.chunk import Output
from piper.ir.ids import SlotId
from piper.ir.mesh import axis_through
from piper.plan.expert_table import ExpertTable
from piper.plan.instr import Instr
from piper.plan.memory_timeline import allocations
from piper.plan.ops import Rows
from piper.plan.plan import Plan
from piper.runtime.accelerator import generator
from piper.runtime.bucket_layout import Clones, Layout, own_slice
from piper.runtime.bucket_state import HostMemory
from piper.runtime.comm.base import Comms, Form, Group
from piper.runtime.device_state import DeviceState
from piper.runtime.expert_exchange import Division
from piper.runtime.setup import Initial, Setup

Bound = Callable[[], None]  # an instruction with everything it needs resolved


class BatchField(Protocol):
    """A field of the global batch: a tensor, or the part of one that a device needs."""

    @property
    def dtype(self) -> torch.dtype: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Tensor: ...


class Dice:
    """Seeds torch's generator for one draw at a time: it is one for all threads of a process."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Take the generator of `device`, where the numbers are drawn; its state lives on the host."""
        self.lock = threading.Lock()
        self.generator = generator(device or torch.device("cpu"))

    @contextmanager
    def seeded(self, begin: int | Tensor) -> Iterator[None]:
        """Draw from a seed, or from where other draws ended, inside, and leave the generator as it was."""
        with self.lock:
            before = self.generator.get_state()
            if isinstance(begin, int):
                self.generator.manual_seed(begin)
            else:
                self.generator.set_state(begin)
            try:
                yield
            finally:
                self.generator.set_state(before)


def draw_seed(seed: int, step: int, where: str) -> int:
    """Return a seed for one region on one microbatch and replica in one step; no two of them are related."""
    text = f"{seed}/{step}/{where}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Vault(Protocol):
    """Memory for copies of a device's state, as a launcher gives it. Sections are what `protect` copies."""

    def due(self, step: int) -> bool: ...  # whether the state that a step begins with is to be copied
    def copy(self, number: int, ins: Instr) -> None: ...  # copies what an instruction reads into a section
    def outgoing(self, ins: Instr) -> Tensor: ...  # the sections that it sends, as bytes, one after another
    def take(self, ins: Instr, arrived: Tensor) -> None: ...  # keeps the sections that it brought


class Env:
    """One device's slots, state and communicators, and what changes from step to step."""

    def __init__(
        self,
        setup: Setup,
        device: int,
        comms: Comms,
        initial: Initial,
        dice: Dice | None = None,
        state: DeviceState | None = None,  # of another program, from which buffers are taken over too
    ) -> None:
        self.lent = {} if state is None else state.buffers
        self.setup, self.device, self.comms = setup, device, comms
        self.plan: Plan = setup.plans.of(device)
        self.state = DeviceState(setup, device, initial) if state is None else state
        self.dice = dice or Dice(setup.device)
        self.chunks = {chunk.name: chunk for chunk in setup.outline.chunks}
        self.index = {slot: i for i, slot in enumerate([*self.plan.residents, *self.plan.slots])}
        self.slots: list[object] = [None] * len(self.index)
        for slot in self.plan.residents:
            self.slots[self.index[slot]] = self._resident(slot, initial)
        self.layouts = {bucket.name: Layout(bucket, device) for bucket in setup.plans.buckets_on(device)}
        self.clones: dict[str, list[Clones]] = {}  # by the chunks whose experts have them
        for layout in self.layouts.values():
            if layout.clones is not None:
                for chunk in layout.bucket.chunks:
                    self.clones.setdefault(chunk, []).append(layout.clones)
        self.makers: dict[SlotId, str] = {  # the stream that allocates each slot
            slot: self.plan.instrs[place].stream for slot, place in allocations(self.plan).items()
        }
        self.forms: dict[int, dict[tuple[str, str | None], Form]] = {}  # of what devices send
        self.host_memory = HostMemory()
        self.streams: Mapping[str, torch.Stream] = {}  # on an accelerator, of the executor; empty: all on one
        self.batch: Mapping[str, BatchField] = {}
        self.rows: dict[str, Tensor] = {}  # of each expert in this step, by chunks of experts with clones
        self.divisions: dict[str, tuple[ExpertTable, Division]] = {}  # of the last step, by such chunks
        self.vault: Vault | None = None  # None: instructions that copy the state do nothing
        self.step = 0
        self.exact = False  # rows travel by their counts, though there are blocks for them
        self.fullest: list[tuple[float, Tensor]] = []
        # ^ of a step that is run again, for each block: its room, and what it would need, in even shares
        # Where the generator stands before a later piece of a region, and in which step, by place and number.
        self.drawn: dict[tuple[str, int], tuple[int, Tensor]] = {}

    def _resident(self, slot: SlotId, initial: Initial) -> object:
        """Return the initial value of a slot that outlives the step."""
        match slot.kind:
            case "seed":
                loss = self.setup.outline.loss  # the gradient that each microbatch's loss starts from
                spec = self.chunks[loss.chunk].outputs[loss.index]
                dtype = getattr(torch, spec.dtype)
                return torch.full(spec.shape, self.setup.plans.seed, dtype=dtype, device=self.setup.device)
            case "buffer" if slot.owner in self.lent:
                return None  # it is taken over from the training worker before each run
            case "buffer":
                held = self.plan.residents[slot]
                value = own_slice(initial(slot.owner), held.shardings, held.position(self.device))
                dtype = self.setup.dtype if value.is_floating_point() else value.dtype
                return value.to(self.setup.device, dtype, copy=True)
            case "place" | "host_place":
                region, group = slot.devices
                place = axis_through(region, group).coordinate(region.index(self.device))
                return torch.tensor([place], device=self.setup.device if slot.kind == "place" else "cpu")
            case "constant":
                return self.setup.constants[slot.owner].to(self.setup.device)
            case "param":
                return self.state.holdings[slot.owner].param
        return None  # the optimizer keeps its own state; the total is written by the step

    def arriving(self, ins: Instr) -> Form:
        """Return the shape and type of what a receive brings."""
        assert ins.comm is not None
        sender, _ = self.comms.comms[ins.comm].group_of(self.device, "recv")
        return self.sent_by(sender)[ins.node, ins.comm]

    def sent_by(self, device: int) -> Mapping[tuple[str, str | None], Form]:
        """Return the shape and type of all that a device sends, by node and communicator."""
        if device not in self.forms:
            instrs = self.setup.plans.of(device).instrs
            # A sum of gradients lies with those who read the value: it has their samples, as these have.
            sums = {ins.writes[0]: ins.reads[0] for ins in instrs if ins.op == "add"}
            sends = (ins for ins in instrs if ins.op == "send")
            self.forms[device] = {(ins.node, ins.comm): self._form(ins, sums) for ins in sends}
        return self.forms[device]

    def _form(self, send: Instr, sums: Mapping[SlotId, SlotId]) -> Form:
        slot = send.reads[0]
        while slot in sums:
            slot = sums[slot]
        assert slot.kind in ("output", "input_gradient"), f"{slot} is not a value between chunks"
        chunk = self.chunks[slot.owner]
        spec = (chunk.input_specs if slot.kind == "input_gradient" else chunk.outputs)[slot.position]
        shape = spec.shape
        if isinstance(rows := send.payload, Rows):
            shape = (shape[0] * rows.stop // rows.of - shape[0] * rows.start // rows.of, *shape[1:])
        return Form(shape, getattr(torch, spec.dtype))

    def at(self, slot: SlotId) -> int:
        """Return the number of a slot."""
        return self.index[slot]

    def clones_behind(self, route: str) -> str:
        """Return the chunk of experts that a route sends rows to if they have clones. Else an empty name."""
        sources = ((name, self.chunks[name].inputs[0]) for name in self.clones)
        found = (name for name, source in sources if isinstance(source, Output) and source.chunk == route)
        return next(found, "")

    def move_experts(self, tables: Mapping[str, ExpertTable]) -> None:
        """Compute experts where tables say, by chunk, from this step on."""
        for name in tables.keys() & self.clones.keys():
            for clones in self.clones[name]:
                clones.table = tables[name]

    def division(self, region: str) -> Division:
        """Return how the rows of a chunk of experts are divided among their copies in this step."""
        table, known = self.clones[region][0].table, self.divisions.get(region)
        if known is None or known[0] != table:
            known = self.divisions[region] = table, Division.of(table, self.setup.device)
        return known[1]

    def group(self, ins: Instr) -> Group:
        """Return the group of this device that an instruction communicates within."""
        assert ins.comm is not None, f"{ins.node} has no communicator"
        return self.comms.group(ins.comm)


def writing(env: Env, ins: Instr, act: Callable[..., object]) -> Bound:
    """Bind an instruction that writes what an act makes of the values it reads."""
    slots, sources, target = env.slots, [*map(env.at, ins.reads)], env.at(ins.writes[0])

    def run() -> None:
        slots[target] = act(*[slots[source] for source in sources])

    return run
