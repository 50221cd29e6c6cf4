"""The messages between a driver and its workers: what a worker is given, asked for, and answers."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.checkpoint.background import Done
from piper.errors import LaunchError
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.plan.plan import Plans
from piper.runtime.compute import slices
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.debug.profiler import ClockOffset, DeviceProfile
from piper.runtime.setup import Code, Setup
from piper.runtime.worker import Options, Sums
from piper.workers.blame import Failure
from piper.workers.processes import SharedFile
from piper.workers.transport.serialize import Codec, pack, pickled_by_value, unpack
from piper.workers.transport.shared_memory import TensorEntry

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The store at which the workers of a job meet."""

    host: str
    port: int
    own: str  # the address that this worker listens on


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The first message to a worker: its device, its plan, and where it finds the initial values."""

    device: int
    local: int  # which of its machine's accelerators it uses, where the job uses any
    store: StoreAddress
    options: Options
    setup: bytes
    shares: bool = False  # its accelerator serves other workers too
    values: Mapping[str, TensorEntry]  # where each initial value lies in shared memory
    path: tuple[str, ...] = ()  # where modules are imported from. Empty: as the process has it
    versions: Mapping[int, tuple[SharedFile, ...]] | None = None  # of each device. None: it keeps none


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign that a worker lives while it works on a call."""

    leaving: bool = False  # the system has asked its process to end


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Another program for a worker, with the values of buffers that the worker does not hold.

    trains: it trains the worker's parameters on batches of another shape. Otherwise it evaluates.
    """

    number: int
    setup: bytes
    buffers: Mapping[str, Tensor]
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBatch:
    """A device's rows of a batch, and the number of the program that runs on them."""

    number: int
    fields: Mapping[str, BatchSlice]


def spans_of(plans: Plans, device: int, samples: int) -> dict[str, list[Span]]:
    """Return the rows that a device's plan loads, by field, in ranges that do not touch."""
    found: dict[str, list[Span]] = {}
    for ins in plans.of(device).instrs:
        if ins.op == "load":
            field = ins.loads
            mine = slices(plans, samples, *field.slice_of(device), field.part)
            found.setdefault(field.name, []).extend(mine)
    return {field: joined(spans) for field, spans in found.items()}


def joined(spans: list[Span]) -> list[Span]:
    """Return spans in order, with those that touch or overlap merged."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


class BatchSlicer:
    """Slices batches for devices. The rows are computed once for each batch size."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.known: dict[tuple[int, int], dict[str, list[Span]]] = {}

    def cut(self, batch: Mapping[str, Tensor], device: int) -> dict[str, BatchSlice]:
        """Return the slices of a batch that one device needs."""
        samples = len(next(iter(batch.values())))
        if (device, samples) not in self.known:
            self.known[device, samples] = spans_of(self.plans, device, samples)
        return {
            field: BatchSlice(
                samples=samples,
                dtype=batch[field].dtype,
                parts=tuple((low, batch[field][low:high]) for low, high in spans),
            )
            for field, spans in self.known[device, samples].items()
        }


CODEC = Codec(
    (
        Assignment,
        BatchSlice,
        ClockOffset,
        Done,
        Failure,
        Heartbeat,
        OutputKey,
        Preparation,
        ProgramBatch,
        DeviceProfile,
        Sums,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledCode:
    """The code that plans call, and nothing else of the capture it comes from."""

    built: Mapping[tuple[str, Phase], Code]

    def __call__(self, chunk: Chunk, phase: Phase) -> Code:
        return self.built[chunk.key, phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """The functions of a setup. They travel as a pickle, from a driver to its own workers only."""

    code: CalledCode
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A setup as a message: its data in typed form, and its functions as a pickle."""

    plans: Plans
    outline: CapturedModel
    constants: Mapping[str, Tensor]
    precision: str
    clip_norm: float | None
    seed: int
    device: str
    functions: bytes


SHIPMENT = Codec((Shipment,))


def called_code(setup: Setup) -> CalledCode:
    """Return the code that the plans of a setup call."""
    setup.build_code(setup.plans, lambda: None)
    called = setup.called(setup.plans)
    return CalledCode(built={(chunk.key, phase): setup.code(chunk, phase) for chunk, phase in called})


def pack_setup(setup: Setup) -> bytes:
    """Return a setup as bytes that a worker can read, wherever the job's functions come from."""
    functions = Functions(code=called_code(setup), optimizer=setup.optimizer, scheduler=setup.scheduler)
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
    return SHIPMENT.encode(
        Shipment(
            plans=setup.plans,
            outline=setup.outline,
            constants=setup.constants,
            precision=setup.precision,
            clip_norm=setup.clip_norm,
            seed=setup.seed,
            device=str(setup.device),
            functions=code,
        )
    )


def unpack_setup(data: bytes) -> Setup:
    """Return the setup that bytes hold. They come from the driver, after both sides have proved their key."""
    sent = cast(Shipment, SHIPMENT.decode(data))
    functions = cast(Functions, unpack(sent.functions))
    return Setup(
        plans=sent.plans,
        outline=sent.outline,
        code=functions.code,
        constants=sent.constants,
        optimizer=functions.optimizer,
        scheduler=functions.scheduler,
        precision=sent.precision,
        clip_norm=sent.clip_norm,
        seed=sent.seed,
        device=torch.device(sent.device),
    )
