"""Versions of a job's state in memory that outlives its workers.

[Note: versions] Every device has two files without a name, which the driver holds open. After step k a device
copies what it is the one to save, each element once, into file k mod 2. It first writes 0 into the head of
the file, and the number of the step only when all is copied, so a version of a device is complete or absent.
A version of the job is complete when all devices have it. The loss is summed over all devices, so a device
ends step k + 1 only after all others have begun it, and a device begins it only after its copy of step k. So
while any device overwrites step k - 1, step k is complete. Versions are read only when no worker lives that
could write.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piper.checkpoint.bucket_spans import owned_range, saved_buckets
from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.load import read_state
from piper.checkpoint.metadata import Record, SavedPiece, Trainer, kept_by
from piper.checkpoint.save import Copied, RefusedError, Shapes, copy_state, merged
from piper.checkpoint.storage import CheckpointReader, StoredRange, TensorRange, index_of
from piper.errors import ConfigError
from piper.format import size
from piper.launchers.processes import SharedFile
from piper.launchers.transport.serialize import Codec
from piper.launchers.transport.shared_memory import ALIGNMENT, MEMORY, nameless_file
from piper.plan.plan import Plans
from piper.runtime.worker import Worker

GENERATIONS = 2
HEAD = struct.Struct("=qqq")  # the step plus one, or 0 while it is written; bytes of the copy and the layout
INDEX = 2**20  # bytes that indices take at most, for the estimate
Files = Mapping[int, Sequence[SharedFile]]  # of each device, by generation


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLayout:
    """What lies where in a version of one device."""

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


class VersionWriter:
    """Writes the versions of one device, see [Note: versions]."""

    def __init__(self, worker: Worker, descriptors: Sequence[int]) -> None:
        self.worker, self.descriptors = worker, descriptors
        self.memories: dict[int, mmap.mmap] = {}
        self.layout: tuple[object, bytes] | None = None  # what it depends on, and the layout as bytes

    def write(self) -> None:
        """Copy the state as it is between two steps."""
        copied = copy_state(self.worker, same)
        texts = (CODEC.encode(replace(copied, parts=[], moments={})), self._layout(copied))
        lengths = [len(text) for text in texts]
        index = b"".join(texts)
        at = [rounded(HEAD.size + len(index))]
        for part in copied.parts:
            at.append(rounded(at[-1] + part.tensor.nbytes))
        memory = self._memory(copied.step % GENERATIONS, at[-1])
        HEAD.pack_into(memory, 0, 0, *lengths)
        memory[HEAD.size : HEAD.size + len(index)] = index
        for part, offset in zip(copied.parts, at, strict=False):
            if count := part.tensor.numel():
                place = torch.frombuffer(memory, dtype=part.tensor.dtype, count=count, offset=offset)
                place.copy_(part.tensor.reshape(-1))
                del place  # before the memory closes under it
        HEAD.pack_into(memory, 0, copied.step + 1, *lengths)

    def _layout(self, copied: Copied) -> bytes:
        """Return what lies where, as bytes. It seldom changes from step to step, so it is kept."""
        depends = (
            [(p.key, p.start, p.stride, p.tensor.shape, p.tensor.dtype) for p in copied.parts],
            copied.moments,
        )
        if self.layout is None or self.layout[0] != depends:
            layout = layout_of(copied, f"device-{self.worker.device:05}")
            self.layout = (depends, CODEC.encode(layout))
        return self.layout[1]

    def _memory(self, generation: int, nbytes: int) -> mmap.mmap:
        """Return the memory of a generation, at least this large."""
        found = self.memories.get(generation)
        if found is None or len(found) < nbytes:
            if found is not None:
                found.close()
            descriptor = self.descriptors[generation]
            # Memory that is missing is an error here. Where it is written to, it would be a killed process.
            os.posix_fallocate(descriptor, 0, nbytes)
            found = self.memories[generation] = mmap.mmap(descriptor, 0)
        return found


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


def step_in(descriptor: int) -> int | None:
    """Return the step of the version in a file. None: there is none, or it was not completed."""
    head = os.pread(descriptor, HEAD.size, 0)
    if len(head) < HEAD.size:
        return None
    number = int(HEAD.unpack(head)[0])
    return number - 1 if number else None


def held_in(descriptor: int) -> HeldVersion:
    """Return the version in a file."""
    memory = mmap.mmap(descriptor, 0)
    _, first, second = HEAD.unpack_from(memory)
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


class WorkerVersions:
    """A worker's side of versions: it writes its own, and reads those of all devices."""

    def __init__(self, worker: Worker, files: Files) -> None:
        self.worker, self.files = worker, files
        self.writer = VersionWriter(worker, [opened(file) for file in files[worker.device]])
        self.refused = False  # this state cannot be copied: a run that needs a version of it will say so

    def write(self) -> None:
        """Copy the state as it is between two steps, if it can be."""
        if not self.refused:
            try:
                self.writer.write()
            except (RefusedError, ConfigError):
                self.refused = True

    def restore(self, step: int) -> None:
        """Take the state after a step, which every device has."""
        held: list[HeldVersion] = []
        for files in self.files.values():
            descriptor = opened(files[step % GENERATIONS])
            assert step_in(descriptor) == step, "the driver has looked"
            held.append(held_in(descriptor))
            os.close(descriptor)
        for act in read_state(self.worker, VersionShelf(held, self.worker.setup.seed)):
            act()


def opened(file: SharedFile) -> int:
    """Return a descriptor of a shared file."""
    descriptor = file.open()
    assert descriptor is not None, "versions are held on this machine"
    return descriptor


class Versions:
    """The driver's side of versions: it holds the memory open, and knows which version is complete."""

    def __init__(self, plans: Plans) -> None:
        """Open the memory. Refuse a machine that has too little of it."""
        self.devices = [device for plan in plans for device in plan.devices]
        check_memory(sum(version_bytes(plans, device) for device in self.devices))
        self.descriptors = {d: [nameless_file(HEAD.size) for _ in range(GENERATIONS)] for d in self.devices}

    @property
    def files(self) -> dict[int, tuple[SharedFile, ...]]:
        """Return where workers find the memory."""
        return {d: tuple(map(SharedFile.of, found)) for d, found in self.descriptors.items()}

    def newest(self) -> int | None:
        """Return the newest step that is complete on all devices. None: there is none."""
        found = [
            steps.pop()
            for steps in (
                {step_in(pair[generation]) for pair in self.descriptors.values()}
                for generation in range(GENERATIONS)
            )
            if len(steps) == 1
        ]
        return max((step for step in found if step is not None), default=None)

    def forget(self, chosen: Callable[[int], bool]) -> None:
        """Drop the versions of chosen steps. No worker may live."""
        for pair in self.descriptors.values():
            for descriptor in pair:
                step = step_in(descriptor)
                if step is not None and chosen(step):
                    os.pwrite(descriptor, HEAD.pack(0, 0, 0), 0)

    def shelf(self, step: int, seed: int) -> VersionShelf:
        """Return the tensors of a complete version."""
        pairs = self.descriptors.values()
        return VersionShelf((held_in(pair[step % GENERATIONS]) for pair in pairs), seed)

    def parts(self, step: int) -> dict[int, list[TensorRange]]:
        """Return all tensors of a complete version by device, to write them to a disk."""
        found: dict[int, list[TensorRange]] = {}
        for device, pair in self.descriptors.items():
            held = held_in(pair[step % GENERATIONS])
            found[device] = [
                TensorRange(
                    key=placed.key,
                    size=placed.size,
                    start=placed.piece.offset,
                    tensor=held.part(number).view(placed.piece.count, -1).squeeze(0),
                    stride=placed.piece.stride,
                )
                for number, placed in enumerate(held.layout.placed)
            ]
        return found

    def close(self) -> None:
        """Give the memory back."""
        for pair in self.descriptors.values():
            for descriptor in pair:
                os.close(descriptor)
        self.descriptors = {}


def version_bytes(plans: Plans, device: int) -> int:
    """Return how much memory the versions of a device take at most, in bytes."""
    residents = plans.of(device).residents
    states = {slot.owner: found.nbytes for slot, found in residents.items() if slot.kind == "state"}
    total = sum(found.nbytes for slot, found in residents.items() if slot.kind == "buffer")
    for bucket in saved_buckets(plans, device):
        low, high = owned_range(bucket, device)
        total += (high - low) * bucket.itemsize + states.get(bucket.name, 0)
    return GENERATIONS * (total + INDEX)


def check_memory(wanted: int) -> None:
    """Refuse to train if the versions do not fit into shared memory."""
    if not MEMORY.is_dir():
        return
    found = os.statvfs(MEMORY)
    free = found.f_bavail * found.f_frsize
    if wanted > free:
        raise ConfigError(
            "there is too little shared memory to keep versions of the state in",
            by=f"--retries, on {MEMORY}",
            facts={"needs": f"{size(wanted)}: two versions of what each device owns", "has": size(free)},
            hint=f"enlarge it (mount -o remount,size=... {MEMORY}), or train without: --retries 0",
        )
