"""The sections that versions of a job's state consist of: written, found and read in shared memory."""

import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from piper.checkpoint.bucket_spans import saved_buckets, saved_buffers
from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.metadata import SavedPiece
from piper.checkpoint.save import Copied, Shapes, record_of
from piper.checkpoint.storage import CheckpointReader, StoredRange, TensorRange, index_of
from piper.ir.ids import buffer_slot, param_slot
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans
from piper.plan.protected import ProtectedState
from piper.runtime.accelerator import is_accelerator, pin, unpin
from piper.workers.transport.serialize import Codec, rounded

HEAD = struct.Struct("=qqqqq")  # the step plus one, or 0 while it is written; bytes: text, layout, begin, end
ROOM = 256  # bytes by which the text may grow before the tensors behind it move
SPAN = 2**36  # bytes from one section to the next. What is not written takes no memory
REST = 0  # the section of what no instruction copies


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLayout:
    """What lies where in a section."""

    placed: tuple[StoredRange, ...]
    offsets: tuple[int, ...]  # of each placed part, in bytes from the first one
    moments: dict[str, Shapes]  # the optimizer's tensors


CODEC = Codec((Copied, VersionLayout))
HOST = torch.device("cpu")


def same(value: Tensor) -> Tensor:
    """Return a tensor's elements, copied only if they do not lie one after another."""
    return value.detach().contiguous()


class SectionWriter:
    """Writes one section of the memory of a device, see [Note: versions]."""

    def __init__(self, device: int, descriptors: Sequence[int], number: int) -> None:
        self.device, self.descriptors, self.number = device, descriptors, number
        self.memories: dict[int, mmap.mmap] = {}
        self.parts: list[TensorRange] | None = None  # those that were copied last, with their layout as bytes
        self.layout, self.begin, self.end = b"", 0, 0  # and where they begin and end
        self.offsets: tuple[int, ...] = ()  # of each, from where they begin
        self.targets: dict[int, list[Tensor]] = {}  # the places of these parts in memory, by generation
        self.last = 0  # the generation that was written last

    def write(self, copied: Copied, text: bytes | None = None) -> None:
        """Copy a part of the state; `text`: the rest of the copy as bytes, where it is known."""
        text = text or CODEC.encode(replace(copied, parts=[], moments={}))
        if copied.parts is not self.parts or HEAD.size + len(text) + len(self.layout) > self.begin:
            self.targets.clear()
            self.parts = copied.parts
            *offsets, nbytes = accumulate((rounded(own.tensor.nbytes) for own in self.parts), initial=0)
            placed = tuple(part.stored(f"device-{self.device:05}") for part in self.parts)
            layout = VersionLayout(placed=placed, offsets=tuple(offsets), moments=copied.moments)
            self.offsets, self.layout = layout.offsets, CODEC.encode(layout)
            self.begin = rounded(HEAD.size + len(text) + ROOM + len(self.layout))
            self.end = self.begin + nbytes
        index, tensors = text + self.layout, [part.tensor for part in copied.parts]
        device = next((own.device for own in tensors if is_accelerator(own.device)), HOST)
        memory = self._memory(self.end, device)
        HEAD.pack_into(memory, 0, 0, len(text), len(self.layout), self.begin, self.end)
        memory[HEAD.size : HEAD.size + len(index)] = index
        if self.last not in self.targets:
            self.targets[self.last] = [
                torch.frombuffer(memory, dtype=own.dtype, count=own.numel(), offset=self.begin + at)
                if own.numel()
                else own
                for own, at in zip(tensors, self.offsets, strict=True)
            ]
        if tensors:
            flat = [own.reshape(-1) for own in tensors]
            torch._foreach_copy_(self.targets[self.last], flat, non_blocking=True)
        # The number comes last on the stream that copies, which the host does not wait for.
        head = torch.frombuffer(memory, dtype=torch.int64, count=1)
        head.copy_(torch.full((1,), copied.step + 1, device=device), non_blocking=True)
        del head  # before the memory closes under it

    def image(self) -> Tensor:
        """Return the bytes that were written last."""
        memory = self.memories[self.last]
        return torch.frombuffer(memory, dtype=torch.uint8, count=HEAD.unpack_from(memory)[-1])

    def take(self, image: Tensor) -> None:
        """Write a section as another device has written it."""
        about = HEAD.unpack(bytes(image[: HEAD.size].numpy()))
        memory = self._memory(len(image))
        HEAD.pack_into(memory, 0, 0, *about[1:])
        place = torch.frombuffer(memory, dtype=torch.uint8, count=len(image))
        place[HEAD.size :].copy_(image[HEAD.size :])
        del place  # before the memory closes under it
        HEAD.pack_into(memory, 0, *about)

    def _memory(self, nbytes: int, reader: torch.device = HOST) -> mmap.mmap:
        """Return the memory of the older generation, at least this large, which a device can access."""
        steps = [step_in(descriptor, self.number) for descriptor in self.descriptors]
        self.last = min(range(len(steps)), key=lambda i: -1 if (step := steps[i]) is None else step)
        memory = self.memories.get(self.last)
        if memory is None or len(memory) < nbytes:
            if memory is not None:
                self.targets.pop(self.last, None)
                unpin(torch.frombuffer(memory, dtype=torch.uint8), reader)
                memory.close()
            descriptor, begin = self.descriptors[self.last], self.number * SPAN
            # Memory that is missing is an error here. Where it is written to, it would be a killed process.
            os.posix_fallocate(descriptor, begin, nbytes)
            memory = self.memories[self.last] = mmap.mmap(descriptor, nbytes, offset=begin)
            pin(torch.frombuffer(memory, dtype=torch.uint8), reader)
        return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """A version of one device in memory."""

    copied: Copied  # without tensors
    layout: VersionLayout
    memory: mmap.mmap
    begin: int  # where its tensors begin

    def part(self, number: int) -> Tensor:
        """Return the elements of a part."""
        placed, at = self.layout.placed[number], self.begin + self.layout.offsets[number]
        count = placed.piece.elements
        return torch.frombuffer(self.memory, dtype=dtype_named(placed.dtype), count=count, offset=at)


def step_in(descriptor: int, number: int = REST) -> int | None:
    """Return the step of a section in a file. None: there is none, or it was not completed."""
    head = os.pread(descriptor, HEAD.size, number * SPAN)
    if len(head) < HEAD.size:
        return None
    number = int(HEAD.unpack(head)[0])
    return number - 1 if number else None


def held_in(descriptor: int, number: int = REST) -> HeldVersion:
    """Return a section of a file."""
    _, first, second, begin, nbytes = HEAD.unpack(os.pread(descriptor, HEAD.size, number * SPAN))
    memory = mmap.mmap(descriptor, nbytes, offset=number * SPAN)
    middle, end = HEAD.size + first, HEAD.size + first + second
    copied, layout = CODEC.decode(memory[HEAD.size : middle]), CODEC.decode(memory[middle:end])
    assert isinstance(copied, Copied) and isinstance(layout, VersionLayout)
    copied = replace(copied, moments=layout.moments)
    return HeldVersion(copied=copied, layout=layout, memory=memory, begin=begin)


class VersionReader(CheckpointReader):
    """The tensors of a version. A worker reads what it needs, from the memory of any device."""

    def __init__(self, sections: Iterable[HeldVersion], seed: int) -> None:
        sections = [*sections]
        self.located = {
            (placed.piece.file, placed.key, placed.piece.offset): (one, number)
            for one in sections
            for number, placed in enumerate(one.layout.placed)
        }
        tensors = index_of(one.layout.placed for one in sections)
        self.record = replace(record_of([one.copied for one in sections], seed), tensors=tensors)

    def values(self, key: str, piece: SavedPiece, first: int, length: int) -> Tensor:
        """Return elements of a stored piece: `length` of them from its element `first` on."""
        section, number = self.located[piece.file, key, piece.offset]
        return section.part(number)[first : first + length]


class Holders:
    """Finds the sections that make up a version, in the memory of all devices."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.devices = [device for plan in plans for device in plan.devices]
        self.state = ProtectedState(plans) if plans.protection is not None else None
        self.sections = () if self.state is None else self.state.sections
        self.numbers = {device: [REST] for device in self.devices}  # of all sections in the memory of each
        for section in self.sections:
            self.numbers[section.holder].append(section.number)
        copies = (ins for plan in plans for ins in plan.instrs if ins.op == "protect")
        self.copied = {slot for ins in copies for slot in ins.reads}  # on any device
        self.resting = [d for d in self.devices if self.state is not None and any(self.rest_of(d))]

    def rest_of(self, device: int) -> tuple[list[Bucket], list[str]]:
        """Return the buckets and buffers that a device is the one to save and no instruction copies."""
        updates, buffers = saved_buckets(self.plans, device), saved_buffers(self.plans, device)
        rest = [update for update in updates if param_slot(update.name) not in self.copied]
        return rest, [name for name in buffers if buffer_slot(name) not in self.copied]

    def rest(self, files: Mapping[int, Sequence[int]]) -> list[tuple[int, int, int]] | None:
        """Return where everything lies that no step writes, as (device, descriptor, section). None: lost."""
        lies = [(d, file, REST) for d in self.resting for file in files[d][:1] if step_in(file) is not None]
        return lies if len(lies) == len(self.resting) else None

    def of(self, files: Mapping[int, Sequence[int]], step: int) -> list[tuple[int, int, int]] | None:
        """Return where a version lies, each element once, as (device, descriptor, section). None: nowhere."""
        if self.state is None:
            one = {d: next((f for f in files[d] if step_in(f) == step), None) for d in self.devices}
            every = [(device, file, REST) for device, file in one.items() if file is not None]
            return every if len(every) == len(self.devices) else None
        missing, chosen = set(self.state.written), []
        for section in sorted(self.sections, key=lambda section: section.holder != section.owner):
            if missing.isdisjoint(section.elements):
                continue
            file = next((f for f in files[section.holder] if step_in(f, section.number) == step), None)
            if file is not None:
                chosen.append((section.holder, file, section.number))
                missing.difference_update(section.elements)
        return None if missing else chosen

    def all_of(self, files: Mapping[int, Sequence[int]], step: int) -> list[tuple[int, int, int]] | None:
        """Return where a version lies, with what no step writes. None: it is not complete."""
        written, rest = self.of(files, step), self.rest(files)
        return None if written is None or rest is None else [*written, *rest]

    def held(self, files: Mapping[int, Sequence[int]], step: int) -> list[tuple[int, HeldVersion]]:
        """Return the sections of a version with their devices, none if it is not complete."""
        return [(device, held_in(file, n)) for device, file, n in self.all_of(files, step) or ()]
