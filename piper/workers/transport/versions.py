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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import is_

import torch
from torch import Tensor

from piper.checkpoint.load import read_state
from piper.checkpoint.metadata import Record, Trainer
from piper.checkpoint.save import (
    NO_TENSORS,
    Copied,
    RefusedError,
    copy_parts,
    copy_state,
    states_here,
    trainer_of,
)
from piper.checkpoint.storage import TensorRange
from piper.errors import ConfigError
from piper.ir.chunk_options import Protection
from piper.ir.dtypes import itemsize
from piper.ir.format import size
from piper.ir.ids import state_slot
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.plan.protected import GENERATIONS
from piper.runtime.worker import Worker
from piper.workers.processes import MEMORY, Place, SharedFile, free_memory, nameless_file
from piper.workers.transport.version_sections import (
    CODEC,
    HEAD,
    REST,
    SPAN,
    HeldVersion,
    Holders,
    SectionWriter,
    VersionReader,
    same,
    step_in,
)

INDEX = 2**20  # bytes that the indices of a device take at most, for the estimate
Files = Mapping[int, tuple[SharedFile, ...]]  # of each device, by generation


@dataclass(frozen=True, slots=True)
class LastCopy:
    """What a section was written with last, to be written again with what its tensors hold then."""

    kept: list[Tensor]  # by the optimizer. While it keeps the same tensors, the copy is of the same ones
    copied: Copied
    joined: Mapping[str, Tensor]  # by bucket, what is joined for each copy: without memory in between


class WorkerVersions:
    """A worker's side of versions: it writes its own, and reads those of all devices."""

    def __init__(self, worker: Worker, files: Files) -> None:
        self.worker, self.files = worker, files
        device, descriptors = worker.device, [file.open() for file in files[worker.device]]
        self.holders = Holders(worker.setup.plans)
        self.writers = {n: SectionWriter(device, descriptors, n) for n in self.holders.numbers[device]}
        here = [section for section in self.holders.sections if section.holder == device]
        self.own = [section for section in here if section.owner == device]
        self.brought = [section for section in here if section.owner != device]
        self.refused = False  # this state cannot be copied: a run that needs a version of it will say so
        self.said: tuple[int, Trainer, bytes] | None = None  # of a step: the same in all its sections
        self.known: dict[int, LastCopy] = {}  # by section: what was copied last, while it is the same
        self.began: int | None = None  # the first step whose state is copied. None: the next one
        if self.holders.state is not None:
            worker.env.vault = self

    def write(self) -> None:
        """Copy the state as it is between two steps, if it can be, without what instructions copy."""
        self.began = self.said = None  # a state that was loaded may be of the same step, with other options
        if not self.refused:
            try:
                if self.holders.state is None:
                    copied = copy_state(self.worker, same)
                else:  # what this device is the one to save: it is the same after every step
                    rest = self.holders.rest_of(self.worker.device)
                    copied = replace(copy_parts(self.worker, *rest, Trainer(), same), step=0)
                self.writers[REST].write(copied)
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
                self._copy(self.writers[number], ins)
            except (RefusedError, ConfigError):
                self.refused = True

    def _copy(self, writer: SectionWriter, ins: Instr) -> None:
        step, holdings = self.worker.env.step, self.worker.holder.holdings
        if self.said is None or self.said[0] != step:
            trainer = trainer_of(self.worker.env.state)
            text = CODEC.encode(Copied(parts=[], trainer=trainer, moments={}, numbers={}, step=step))
            self.said = step, trainer, text
        kept, known = self._kept(ins), self.known.get(writer.number)
        if kept is None:
            writer.write(replace(self._copied(ins, same), trainer=self.said[1]))
            return
        if known is None or len(kept) != len(known.kept) or not all(map(is_, kept, known.kept)):
            states = {name: holdings[name] for name in params_in(ins)}
            joined = {name: state.trained for name, state in states.items() if state.bucket.splits}
            known = LastCopy(kept, self._copied(ins, Tensor.detach, joined), joined)
            self.known[writer.number] = known
        else:
            for name, flat in known.joined.items():
                flat.untyped_storage().resize_(flat.nbytes)
                flat.copy_(holdings[name].trained)
        writer.write(replace(known.copied, step=step), self.said[2])
        for flat in known.joined.values():
            flat.untyped_storage().resize_(0)

    def _copied(
        self, ins: Instr, take: Callable[[Tensor], Tensor], joined: Mapping[str, Tensor] = NO_TENSORS
    ) -> Copied:
        """Return what an instruction copies."""
        buckets = [self.worker.setup.plans.buckets[name].update for name in params_in(ins)]
        buffers = [slot.owner for slot in ins.reads if slot.kind == "buffer"]
        return copy_parts(self.worker, buckets, buffers, Trainer(), take, joined)

    def _kept(self, ins: Instr) -> list[Tensor] | None:
        """Return what the optimizer keeps of what is copied. None: a step replaces some of the values."""
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
        sends = [section for section in self.own if section.sent_by == ins.node and not self.refused]
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.cat([empty, *(self.writers[section.number].image() for section in sends)])

    def take(self, ins: Instr, arrived: Tensor) -> None:
        """Keep the sections of other devices that an instruction brought."""
        for section in (s for s in self.brought if s.by == ins.node and len(arrived)):
            nbytes = HEAD.unpack(bytes(arrived[: HEAD.size].numpy()))[-1]
            self.writers[section.number].take(arrived[:nbytes])
            arrived = arrived[nbytes:]

    def restore(self, step: int) -> None:
        """Take the state after a step, of which the driver has found a complete version."""
        files = {device: [file.open() for file in shared] for device, shared in self.files.items()}
        try:
            held = [section for _, section in self.holders.held(files, step)]
        finally:
            for descriptor in (descriptor for pair in files.values() for descriptor in pair):
                os.close(descriptor)
        assert held, "the driver has looked"
        for act in read_state(self.worker, VersionReader(held, self.worker.setup.seed)):
            act()
        self.worker.env.step, self.began = step, None


def params_in(ins: Instr) -> list[str]:
    """Return the buckets whose parameters an instruction reads."""
    return [slot.owner for slot in ins.reads if slot.kind == "param"]


class Versions:
    """The driver's side of versions: it holds the memory open, and knows which version is complete."""

    def __init__(self, plans: Plans, *, checked: bool = True) -> None:
        """Open the memory. Refuse a machine that has too little of it, if that is to be checked."""
        self.holders = Holders(plans)
        self.devices = self.holders.devices
        self.every = 1 if plans.protection is None else plans.protection.every
        if checked:
            check_memory(sum(version_bytes(self.holders).values()), plans.protection)
        self.descriptors = {d: [nameless_file(HEAD.size) for _ in range(GENERATIONS)] for d in self.devices}

    def of(self, plans: Plans) -> "Versions":
        """Return memory for another program, of the same kind."""
        return Versions(plans)

    def empty(self) -> None:
        """Drop all versions, and give back the memory that they take. No worker may live."""
        for descriptor in (descriptor for pair in self.descriptors.values() for descriptor in pair):
            os.ftruncate(descriptor, 0)

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
        """Return the newest step, up to `last`, of which all elements are complete. None: there is none."""
        places = [place for device in self.descriptors for place in self.places(device)]
        steps = {step_in(self.descriptors[d][generation], at // SPAN) for d, generation, at in places}
        wanted = (step for step in steps if step is not None and (last is None or step <= last))
        return max((step for step in wanted if self.holders.of(self.descriptors, step)), default=None)

    def places(self, device: int) -> list[Place]:
        """Return where each section of a device may begin."""
        numbers = self.holders.numbers[device]
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
        return self.holders.held(self.descriptors, step)

    def saved(self, step: int, seed: int) -> tuple[Record, dict[int, list[TensorRange]]]:
        """Return the record of a complete version, and all its tensors by device, to write them to a disk."""
        held = self._held(step)
        ranges: dict[int, list[TensorRange]] = {device: [] for device in self.devices}
        for device, section in held:
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
        return VersionReader((section for _, section in held), seed).record, ranges

    def close(self) -> None:
        """Give the memory back."""
        for pair in self.descriptors.values():
            for descriptor in pair:
                os.close(descriptor)
        self.descriptors = {}


def version_bytes(holders: Holders) -> dict[int, int]:
    """Return how much memory the versions of each device take at most, in bytes."""
    totals = dict.fromkeys(holders.devices, INDEX)
    for section in holders.sections:
        totals[section.holder] += section.nbytes
    for device in holders.devices:
        residents = holders.plans.of(device).residents
        for slot, one in residents.items():
            if slot.kind == "buffer" and slot not in holders.copied:
                totals[device] += one.nbytes
        for update in holders.rest_of(device)[0]:
            low, high = update.owned(device)
            state = residents.get(state_slot(update.name))
            totals[device] += (high - low) * itemsize(update.dtype) + (state.everywhere if state else 0)
    return {device: GENERATIONS * total for device, total in totals.items()}


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
