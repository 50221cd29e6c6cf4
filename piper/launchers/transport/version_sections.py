"""The sections that versions of a job's state consist of: written, found and read in shared memory."""

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.metadata import Record, SavedPiece, Trainer, kept_by
from piper.checkpoint.save import Copied, Shapes, merged
from piper.checkpoint.storage import CheckpointReader, StoredRange, index_of
from piper.launchers.transport.serialize import Codec
from piper.launchers.transport.shared_memory import ALIGNMENT

HEAD = struct.Struct("=qqqq")  # the step plus one, or 0 while it is written; bytes: the copy, layout, all
SPAN = 2**36  # bytes from one section to the next. What is not written takes no memory
REST = 0  # the section of what no instruction copies


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLayout:
    """What lies where in a section."""

    placed: tuple[StoredRange, ...]
    offsets: tuple[int, ...]  # of each placed part, in bytes
    moments: dict[str, Shapes]  # the optimizer's tensors


CODEC = Codec((Copied, VersionLayout))


def same(value: Tensor) -> Tensor:
    """Return a tensor's elements, copied only if they do not lie one after another."""
    return value.detach().contiguous()


def rounded(nbytes: int) -> int:
    """Return bytes rounded up, so that any type can begin there."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SectionWriter:
    """Writes one section of the memory of a device, see [Note: versions]."""

    def __init__(self, device: int, descriptors: Sequence[int], number: int) -> None:
        self.device, self.descriptors, self.number = device, descriptors, number
        self.memories: dict[int, mmap.mmap] = {}
        self.layout: tuple[object, bytes] | None = None  # what it depends on, and the layout as bytes
        self.last = 0  # the generation that was written last

    def write(self, copied: Copied) -> None:
        """Copy a part of the state. Its tensors may be those that the worker trains."""
        texts = (CODEC.encode(replace(copied, parts=[], moments={})), self._layout(copied))
        index = b"".join(texts)
        at = [rounded(HEAD.size + len(index))]
        for part in copied.parts:
            at.append(rounded(at[-1] + part.tensor.nbytes))
        about = (*map(len, texts), at[-1])
        memory = self._memory(at[-1], pinned=any(part.tensor.is_cuda for part in copied.parts))
        HEAD.pack_into(memory, 0, 0, *about)
        memory[HEAD.size : HEAD.size + len(index)] = index
        for part, offset in zip(copied.parts, at, strict=False):
            put(memory, offset, part.tensor.reshape(-1))
        device = next((part.tensor.device for part in copied.parts if part.tensor.is_cuda), None)
        # The number comes last on the stream that copies, which the host does not wait for.
        put(memory, 0, torch.full((1,), copied.step + 1, device=device))

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

    def _layout(self, copied: Copied) -> bytes:
        """Return what lies where, as bytes. It seldom changes from step to step, so it is kept."""
        depends = (
            [(p.key, p.start, p.stride, p.tensor.shape, p.tensor.dtype) for p in copied.parts],
            copied.moments,
        )
        if self.layout is None or self.layout[0] != depends:
            self.layout = (depends, CODEC.encode(layout_of(copied, f"device-{self.device:05}")))
        return self.layout[1]

    def _memory(self, nbytes: int, *, pinned: bool = False) -> mmap.mmap:
        """Return the memory of the older generation, at least this large."""
        steps = [step_in(descriptor, self.number) for descriptor in self.descriptors]
        self.last = min(range(len(steps)), key=lambda i: -1 if (step := steps[i]) is None else step)
        found = self.memories.get(self.last)
        if found is None or len(found) < nbytes:
            if found is not None:
                if pinned:
                    unpin(found)
                found.close()
            descriptor, begin = self.descriptors[self.last], self.number * SPAN
            # Memory that is missing is an error here. Where it is written to, it would be a killed process.
            os.posix_fallocate(descriptor, begin, nbytes)
            found = self.memories[self.last] = mmap.mmap(descriptor, nbytes, offset=begin)
            if pinned:
                pin(found)
        return found


def put(memory: mmap.mmap, offset: int, values: Tensor) -> None:
    """Copy values to a place in memory. Those of an accelerator arrive when its stream gets there."""
    if count := values.numel():
        place = torch.frombuffer(memory, dtype=values.dtype, count=count, offset=offset)
        place.copy_(values, non_blocking=True)
        del place  # before the memory closes under it


def pin(memory: mmap.mmap) -> None:
    """Let an accelerator write to memory while the host goes on."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))


def unpin(memory: mmap.mmap) -> None:
    """Take back what `pin` did."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def image_bytes(image: Tensor) -> int:
    """Return how many bytes a section takes whose bytes come first in a tensor."""
    return int(HEAD.unpack(bytes(image[: HEAD.size].numpy()))[-1])


def layout_of(copied: Copied, file: str) -> VersionLayout:
    """Return what lies where in a version. Offsets count from the first tensor."""
    offsets, at = [], 0
    for part in copied.parts:
        offsets.append(at)
        at = rounded(at + part.tensor.nbytes)
    placed = tuple(
        StoredRange(
            key=part.key,
            dtype=str(part.tensor.dtype).removeprefix("torch."),
            size=part.size,
            piece=part.lies(file),
        )
        for part in copied.parts
    )
    return VersionLayout(placed=placed, offsets=tuple(offsets), moments=copied.moments)


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
    found = int(HEAD.unpack(head)[0])
    return found - 1 if found else None


def held_in(descriptor: int, number: int = REST) -> HeldVersion:
    """Return a section of a file."""
    _, first, second, nbytes = HEAD.unpack(os.pread(descriptor, HEAD.size, number * SPAN))
    memory = mmap.mmap(descriptor, nbytes, offset=number * SPAN)
    middle, end = HEAD.size + first, HEAD.size + first + second
    copied, layout = CODEC.decode(memory[HEAD.size : middle]), CODEC.decode(memory[middle:end])
    assert isinstance(copied, Copied) and isinstance(layout, VersionLayout)
    copied = replace(copied, moments=layout.moments)
    return HeldVersion(copied=copied, layout=layout, memory=memory, begin=rounded(end))


class VersionShelf(CheckpointReader):
    """The tensors of a version. A worker reads what it needs, from the memory of any device."""

    def __init__(self, held: Iterable[HeldVersion], seed: int) -> None:
        found = [*held]
        self.located = {
            (placed.piece.file, placed.key, placed.piece.offset): (one, number)
            for one in found
            for number, placed in enumerate(one.layout.placed)
        }
        copies = [one.copied for one in found]
        moments, numbers = merged([c.moments for c in copies]), merged([c.numbers for c in copies])
        trainer = next((c.trainer for c in copies if c.trainer.optimizer is not None), Trainer())
        self.record = Record(
            step=copies[0].step,
            seed=seed,
            trainer=replace(trainer, kept=kept_by(moments, numbers)),
            moments=moments,
            numbers=numbers,
            tensors=index_of(one.layout.placed for one in found),
        )

    def values(self, key: str, piece: SavedPiece, first: int, length: int) -> Tensor:
        """Return elements of a stored piece: `length` of them from its element `first` on."""
        held, number = self.located[piece.file, key, piece.offset]
        return held.part(number)[first : first + length]
