"""Versions of a job's state in memory that outlives its workers.

[Note: versions] Every device has two files without a name, one for each generation, which the driver holds
open. A file has sections, each at its own distance from the beginning. Where the plan protects the state,
each of its copies is a section, see [Note: sections], and section 0 holds what no step writes. Elsewhere
section 0 holds all that the device is the one to save, and is written between two steps. A section is
written over the older of its two generations: first a 0 into its head, and the number of the step only when
all is copied, so a section of a step is complete or absent. A version of the job is complete when its
sections hold every element. A device begins step k + 1 only when all devices have ended step k, and with it
the copy that was made during it. So while any device overwrites an older version, the one after it is
complete. Versions are read only when no worker lives that could write. A version may be complete although
the driver never heard that its step has ended: a worker was lost before all answers were read. Such a step is
repeated from the version before it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_

import torch
from torch import Tensor

from piper.checkpoint.bucket_spans import saved_buckets, saved_buffers
from piper.checkpoint.load import read_state
from piper.checkpoint.metadata import Trainer
from piper.checkpoint.save import Copied, RefusedError, copy_parts, copy_state, states_here, trainer_of
from piper.checkpoint.storage import TensorRange
from piper.errors import ConfigError
from piper.ir.chunk_options import Protection
from piper.ir.dtypes import itemsize
from piper.ir.format import size
from piper.ir.ids import SlotId, buffer_slot, param_slot
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.plan.protected import GENERATIONS, ProtectedState, sent
from piper.plan.updates import BucketUpdate
from piper.runtime.worker import Worker
from piper.workers.processes import MEMORY, Place, SharedFile, free_memory, nameless_file
from piper.workers.transport.version_sections import (
    HEAD,
    REST,
    SPAN,
    HeldVersion,
    SectionWriter,
    VersionReader,
    encoded,
    held_in,
    same,
    step_in,
)

INDEX = 2**20  # bytes that the indices of a device take at most, for the estimate
Files = Mapping[int, tuple[SharedFile, ...]]  # of each device, by generation


class Holders:
    """Finds the sections that make up a version, in the memory of all devices."""

    def __init__(self, plans: Plans) -> None:
        self.devices = [device for plan in plans for device in plan.devices]
        self.state = ProtectedState(plans) if plans.protection is not None else None
        self.sections = () if self.state is None else self.state.sections
        self.resting = [d for d in self.devices if self.state is not None and any(rest_of(plans, d))]

    def numbers(self, device: int) -> list[int]:
        """Return the numbers of all sections in the memory of a device."""
        return [REST, *(section.number for section in self.sections if section.holder == device)]

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


class WorkerVersions:
    """A worker's side of versions: it writes its own, and reads those of all devices."""

    def __init__(self, worker: Worker, files: Files) -> None:
        self.worker, self.files = worker, files
        self.descriptors = [opened(file) for file in files[worker.device]]
        self.holders = Holders(worker.setup.plans)
        self.writers: dict[int, SectionWriter] = {}
        self.refused = False  # this state cannot be copied: a run that needs a version of it will say so
        self.said: tuple[int, Trainer, bytes] | None = None  # of a step: the same in all its sections
        self.known: dict[int, tuple[list[Tensor], Copied]] = {}  # what was copied last, while it is the same
        self.began: int | None = None  # the first step whose state is copied. None: the next one
        if self.holders.state is not None:
            worker.env.vault = self

    def write(self) -> None:
        """Copy the state as it is between two steps, if it can be, without what instructions copy."""
        self.began = None
        if not self.refused:
            try:
                if self.holders.state is None:
                    copied = copy_state(self.worker, same)
                else:  # what this device is the one to save: it is the same after every step
                    rest = rest_of(self.worker.setup.plans, self.worker.device)
                    copied = replace(copy_parts(self.worker, *rest, Trainer(), same), step=0)
                self.writer(REST).write(copied)
            except (RefusedError, ConfigError):
                self.refused = True

    def due(self, step: int) -> bool:
        """Return whether the state that this step begins with is to be copied."""
        asked = self.worker.setup.plans.protection
        assert asked is not None
        if self.began is None:
            self.began = step
        return (step - self.began) % asked.every == 0

    def copy(self, number: int, ins: Instr) -> None:
        """Copy what an instruction reads into a section, if it can be."""
        if not self.refused:
            try:
                self._copy(self.writer(number), ins)
            except (RefusedError, ConfigError):
                self.refused = True

    def _copy(self, writer: SectionWriter, ins: Instr) -> None:
        step = self.worker.env.step
        if self.said is None or self.said[0] != step:
            trainer = trainer_of(self.worker.env.state)
            text = encoded(Copied(parts=[], trainer=trainer, moments={}, numbers={}, step=step))
            self.said = step, trainer, text
        kept, known = self._kept(ins), self.known.get(writer.number)
        if kept is None:
            writer.write(replace(self._copied(ins, same), trainer=self.said[1]))
            return
        if known is None or len(kept) != len(known[0]) or not all(map(is_, kept, known[0])):
            known = self.known[writer.number] = kept, self._copied(ins, Tensor.detach)
        writer.write(replace(known[1], step=step), self.said[2])

    def _copied(self, ins: Instr, take: Callable[[Tensor], Tensor]) -> Copied:
        """Return what an instruction copies."""
        buckets = [self.worker.setup.plans.buckets[s.owner].update for s in ins.reads if s.kind == "param"]
        buffers = [slot.owner for slot in ins.reads if slot.kind == "buffer"]
        return copy_parts(self.worker, buckets, buffers, Trainer(), take)

    def _kept(self, ins: Instr) -> list[Tensor] | None:
        """Return the tensors that the optimizer keeps for the buckets that an instruction copies.

        As long as they are the same, so is everything that is copied. None: there are values that a step
        replaces, such as buffers.
        """
        states: list[Tensor] = []
        for slot in ins.reads:
            if slot.kind == "buffer":
                return None
            update = self.worker.setup.plans.buckets[slot.owner].update
            for _, kept in states_here(self.worker, [update]) if slot.kind == "param" else ():
                for value in (value for values in kept.values() for value in values.values()):
                    if not isinstance(value, Tensor) or not value.is_contiguous():
                        return None
                    states.append(value)
        return states

    def outgoing(self, ins: Instr) -> Tensor:
        """Return the sections that an instruction sends, as bytes. None of them: they could not be copied."""
        own = [s for s in self.holders.sections if s.holder == s.owner == self.worker.device]
        sends = () if self.refused else sent(self.worker.env.plan, ins, own)
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.cat([empty, *(self.writer(section.number).image() for section in sends)])

    def take(self, ins: Instr, arrived: Tensor) -> None:
        """Keep the sections of other devices that an instruction brought."""
        mine = [s for s in self.holders.sections if s.holder == self.worker.device != s.owner]
        for section in (s for s in mine if s.by == ins.node and len(arrived)):
            nbytes = HEAD.unpack(bytes(arrived[: HEAD.size].numpy()))[-1]
            self.writer(section.number).take(arrived[:nbytes])
            arrived = arrived[nbytes:]

    def writer(self, number: int) -> SectionWriter:
        """Return the writer of a section of this device's memory."""
        if number not in self.writers:
            self.writers[number] = SectionWriter(self.worker.device, self.descriptors, number)
        return self.writers[number]

    def reader(self, step: int) -> VersionReader:
        """Return the tensors of a version, the same for all devices. The driver has found it complete."""
        files = {device: [opened(file) for file in shared] for device, shared in self.files.items()}
        try:
            sections = self.holders.all_of(files, step)
            assert sections is not None, "the driver has looked"
            held = [held_in(file, number) for _, file, number in sections]
        finally:
            for descriptor in (descriptor for pair in files.values() for descriptor in pair):
                os.close(descriptor)
        return VersionReader(held, self.worker.setup.seed)

    def restore(self, step: int, reader: VersionReader | None = None) -> None:
        """Take the state after a step. reader: of this step, if it is known already."""
        for act in read_state(self.worker, self.reader(step) if reader is None else reader):
            act()
        self.worker.env.step, self.began = step, None


def opened(file: SharedFile) -> int:
    """Return a descriptor of a shared file."""
    descriptor = file.open()
    assert descriptor is not None, "versions are held on this machine"
    return descriptor


class Versions:
    """The driver's side of versions: it holds the memory open, and knows which version is complete."""

    def __init__(self, plans: Plans, *, checked: bool = True) -> None:
        """Open the memory. Refuse a machine that has too little of it, if that is to be checked."""
        self.holders = Holders(plans)
        self.devices = self.holders.devices
        self.every = 1 if plans.protection is None else plans.protection.every
        if checked:
            check_memory(sum(version_bytes(plans, device) for device in self.devices), plans.protection)
        self.descriptors = {d: [nameless_file(HEAD.size) for _ in range(GENERATIONS)] for d in self.devices}

    def of(self, plans: Plans) -> "Versions":
        """Return memory for another program, of the same kind."""
        return Versions(plans)

    def empty(self) -> None:
        """Drop all versions, and give back the memory that they take. No worker may live."""
        for descriptor in (descriptor for pair in self.descriptors.values() for descriptor in pair):
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, HEAD.size)

    @property
    def files(self) -> dict[int, tuple[SharedFile, ...]]:
        """Return where workers find the memory."""
        return {d: tuple(map(SharedFile.of, pair)) for d, pair in self.descriptors.items()}

    def files_of(self, device: int) -> Files:
        """Return where the worker of a device finds the memory of all devices."""
        return self.files

    @property
    def whole(self) -> bool:
        """Return whether what no step writes is in memory too, so that workers can begin without values."""
        return self.holders.rest(self.descriptors) is not None

    def newest(self, last: int | None = None) -> int | None:
        """Return the newest step of which all elements are complete. None: there is none.

        last: the newest step that may be chosen. None: any may.
        """
        steps = {
            step_in(descriptor, number)
            for device, pair in self.descriptors.items()
            for descriptor in pair
            for number in self.holders.numbers(device)
        }
        wanted = (step for step in steps if step is not None and (last is None or step <= last))
        return max((step for step in wanted if self.holders.of(self.descriptors, step)), default=None)

    def places(self, device: int) -> list[Place]:
        """Return where each section of a device may begin."""
        numbers = self.holders.numbers(device)
        return [(device, generation, n * SPAN) for generation in range(GENERATIONS) for n in numbers]

    def forget(self, chosen: Callable[[int], bool]) -> list[Place]:
        """Drop the versions of chosen steps. Return where they were. No worker may live."""
        old = []
        for place in (place for device in self.descriptors for place in self.places(device)):
            device, generation, at = place
            step = step_in(self.descriptors[device][generation], at // SPAN)
            if step is not None and chosen(step):
                os.pwrite(self.descriptors[device][generation], bytes(HEAD.size), at)
                old.append(place)
        return old

    def _held(self, step: int) -> list[tuple[int, HeldVersion]]:
        """Return the sections of a complete version, with their devices."""
        sections = self.holders.all_of(self.descriptors, step) or ()
        return [(device, held_in(file, number)) for device, file, number in sections]

    def reader(self, step: int, seed: int) -> VersionReader:
        """Return the tensors of a complete version."""
        return VersionReader((section for _, section in self._held(step)), seed)

    def parts(self, step: int) -> dict[int, list[TensorRange]]:
        """Return all tensors of a complete version by device, to write them to a disk."""
        ranges: dict[int, list[TensorRange]] = {device: [] for device in self.devices}
        for device, section in self._held(step):
            ranges[device] += [
                TensorRange(
                    key=placed.key,
                    size=placed.size,
                    start=placed.piece.offset,
                    tensor=section.part(number).view(placed.piece.count, -1).squeeze(0),
                    stride=placed.piece.stride,
                )
                for number, placed in enumerate(section.layout.placed)
            ]
        return ranges

    def close(self) -> None:
        """Give the memory back."""
        for pair in self.descriptors.values():
            for descriptor in pair:
                os.close(descriptor)
        self.descriptors = {}


def version_bytes(plans: Plans, device: int) -> int:
    """Return how much memory the versions of a device take at most, in bytes."""
    residents = plans.of(device).residents
    states = {slot.owner: one.everywhere for slot, one in residents.items() if slot.kind == "state"}
    copied = copied_slots(plans)
    total = sum(s.nbytes for s in ProtectedState(plans).sections if s.holder == device)
    total += sum(
        one.nbytes for slot, one in residents.items() if slot.kind == "buffer" and slot not in copied
    )
    for update in saved_buckets(plans, device):
        if param_slot(update.name) not in copied:
            low, high = update.owned(device)
            total += (high - low) * itemsize(update.dtype) + states.get(update.name, 0)
    return GENERATIONS * (total + INDEX)


def rest_of(plans: Plans, device: int) -> tuple[list[BucketUpdate], list[str]]:
    """Return the buckets and buffers that a device is the one to save and no instruction copies."""
    copied = copied_slots(plans)
    buckets = [b for b in saved_buckets(plans, device) if param_slot(b.name) not in copied]
    buffers = [name for name in saved_buffers(plans, device) if buffer_slot(name) not in copied]
    return buckets, buffers


def copied_slots(plans: Plans) -> set[SlotId]:
    """Return the slots that instructions copy, on any device."""
    return {slot for plan in plans for ins in plan.instrs if ins.op == "protect" for slot in ins.reads}


def check_memory(wanted: int, asked: Protection | None = None) -> None:
    """Refuse to train if the versions do not fit into shared memory. asked: how the plan protects them."""
    free = free_memory()
    if free is not None and wanted > free:
        raise too_little(wanted, free, asked)


def too_little(wanted: int, free: int, asked: Protection | None, machine: str = "") -> ConfigError:
    """Return the error of a machine without enough shared memory; `machine`: which, if it is another one."""
    return ConfigError(
        "there is too little shared memory to keep versions of the state in",
        by=f"--retries, on {MEMORY}{machine}",
        facts={
            "needs": f"{size(wanted)}: two versions of what each device owns",
            **({"protect": f"copies={asked.copies}"} if asked is not None else {}),
            "has": size(free),
        },
        hint=f"enlarge it (mount -o remount,size=... {MEMORY}), or train without: --retries 0",
    )
