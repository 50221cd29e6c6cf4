"""The messages between a driver and its workers: what a worker is given, asked for, and answers."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from piper.checkpoint.load import Done
from piper.errors import LaunchError
from piper.ir.chunk import CapturedModel
from piper.plan.plan import Plans
from piper.runtime.compute import merged_spans, slices
from piper.runtime.recorders import ClockOffset, DeviceProfile, OutputKey
from piper.runtime.setup import Setup
from piper.runtime.worker import Options, Sums
from piper.workers.blame import Failure
from piper.workers.processes import SharedFile
from piper.workers.transport.serialize import Codec, pack, pickled_by_value, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The first message to a worker: its device, its plan, and where it finds the initial values."""

    device: int
    local: int  # which of its machine's accelerators it uses, where the job uses any
    host: str  # and the port of the store at which the workers of the job meet
    port: int
    own: str  # the address that this worker listens on
    options: Options
    setup: bytes
    shares: bool = False  # its accelerator serves other workers too
    path: tuple[str, ...] = ()  # where modules are imported from. Empty: as the process has it
    versions: Mapping[int, tuple[SharedFile, ...]] | None = None  # of each device. None: it keeps none


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A message before an answer: the system has asked the process of a worker to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlice:
    """The rows of one batch field that a device needs, under their numbers in the whole batch."""

    samples: int  # of the whole field
    dtype: torch.dtype
    parts: tuple[tuple[int, Tensor], ...]  # where each run of rows begins, and the rows

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, rows: slice) -> Tensor:
        for first, part in self.parts:
            if first <= rows.start and rows.stop <= first + len(part):
                return part[rows.start - first : rows.stop - first]
        raise IndexError(f"rows {rows.start}:{rows.stop} were not sent to this device")


class BatchSlicer:
    """Slices batches for devices. The rows are computed once for each batch size."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.known: dict[tuple[int, int], dict[str, list[tuple[int, int]]]] = {}

    def cut(self, batch: Mapping[str, Tensor], device: int) -> dict[str, BatchSlice]:
        """Return the slices of a batch that one device needs."""
        samples = len(next(iter(batch.values())))
        if (device, samples) not in self.known:
            found: dict[str, list[tuple[int, int]]] = {}
            for field in (ins.loads for ins in self.plans.of(device).instrs if ins.op == "load"):
                mine = slices(self.plans, samples, *field.slice_of(device), field.part)
                found.setdefault(field.name, []).extend(mine)
            self.known[device, samples] = {name: merged_spans(spans) for name, spans in found.items()}
        return {
            name: BatchSlice(
                samples=samples,
                dtype=batch[name].dtype,
                parts=tuple((low, batch[name][low:high]) for low, high in spans),
            )
            for name, spans in self.known[device, samples].items()
        }


CODEC = Codec((Assignment, BatchSlice, ClockOffset, Done, Failure, Leaving, OutputKey, DeviceProfile, Sums))
SETUP = Codec((Plans, CapturedModel))
APART = ("code", "optimizer", "scheduler", "device", "build")  # fields of a setup that are no data


def pack_setup(setup: Setup) -> bytes:
    """Return a setup as bytes for a driver's own workers: its functions travel as a pickle."""
    setup.build_code(setup.plans, lambda: None)
    built = {(chunk.key, phase): setup.code(chunk, phase) for chunk, phase in setup.called(setup.plans)}
    functions = {
        "code": lambda chunk, phase: built[chunk.key, phase],  # and nothing else of the capture
        "optimizer": setup.optimizer,
        "scheduler": setup.scheduler,
    }
    try:
        with pickled_by_value(setup.optimizer, setup.scheduler):
            code = pack(functions)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise LaunchError(
            "the job cannot be sent to its workers",
            by="launch",
            facts={"why": f"{type(error).__name__}: {error}"},
            hint="define operators in a module, keep locks and files out of optimizers, or use on='inline'",
        ) from error
    data = {field.name: getattr(setup, field.name) for field in fields(setup) if field.name not in APART}
    return SETUP.encode((data, str(setup.device), code))


def unpack_setup(data: bytes) -> Setup:
    """Return the setup that bytes hold. They come from the driver, after both sides have proved their key."""
    sent, device, code = cast("tuple[dict[str, Any], str, bytes]", SETUP.decode(data))
    functions = cast("dict[str, Any]", unpack(code))
    return Setup(**sent, **functions, device=torch.device(device))
