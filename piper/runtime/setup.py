"""The setup that a worker needs to run one device's plan, and the initial values of its parameters."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.dtypes import DTYPES
from piper.job import Job
from piper.plan.plan import Plan, Plans
from piper.process.usercode import raised
from piper.runtime.accelerator import KINDS, computing_on, device_of, is_accelerator, module

Result = TypeVar("Result")
log = logging.getLogger("piper")
Code = Callable[..., tuple[Tensor, ...]]
BuildCode = Callable[[Iterable[tuple[Chunk, Phase]], Callable[[], None]], None]
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]  # the name, shape and type of each field of a batch
Initial = Callable[[str], Tensor]  # a parameter's or buffer's full first value, by name
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]  # what a run predicts: a row for each sample
_aten = torch.ops.aten
_FILLS = {  # operations that fill a tensor with random numbers
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
}
_MAKES = {  # operations that return a new tensor of random numbers
    _aten.rand.default,
    _aten.rand_like.default,
    _aten.randn.default,
    _aten.randn_like.default,
    _aten.normal.float_float,
}
PIECE = 2**24  # bytes that are copied at a time
SMALL = 2**20  # bytes that are copied at once
CORES = 16  # that copy at a time: more are no faster


class DrawnOn(TorchDispatchMode):
    """Draws floating-point numbers for tensors of the host on an accelerator, and copies them to the host.

    A billion numbers take 10 s on a host, whose generator is serial. The accelerator holds one tensor at a
    time, so a model need not fit on it, and a constructor sees the tensors that it would see otherwise. The
    numbers are those of the same call on a tensor of the accelerator. A call with a generator of its own
    stays on the host.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.buffers: list[Tensor] = []  # pinned ones, as soon as a large tensor is copied

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _FILLS and _on_host(args[0]):
            target: Tensor = args[0]
            empty = torch.empty(target.shape, dtype=target.dtype, device=self.device)
            return self._copy(func(empty, *args[1:], **kwargs), target)
        if func in _MAKES and _made_on_host(args, kwargs):
            made: Tensor = func(*args, **{**kwargs, "device": self.device, "pin_memory": False})
            return self._copy(made, torch.empty_like(made, device="cpu"))
        return func(*args, **kwargs)

    def _copy(self, drawn: Tensor, target: Tensor) -> Tensor:
        """Copy what was drawn to the host: piece by piece, and there by several cores."""
        # The host's memory is new. To write it for the first time takes one core a second for each GB.
        if not is_accelerator(drawn.device) or drawn.nbytes <= SMALL or not target.is_contiguous():
            return target.copy_(drawn)
        self.buffers = self.buffers or [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        length = PIECE // drawn.element_size()
        pieces = [*zip(drawn.view(-1).split(length), target.view(-1).split(length), strict=True)]
        staged = [buffer.view(drawn.dtype) for buffer in self.buffers]
        events = [module(drawn.device).Event() for _ in staged]

        def send(number: int) -> None:
            piece = pieces[number][0]
            staged[number % 2][: len(piece)].copy_(piece, non_blocking=True)
            events[number % 2].record()

        with computing_on(min(CORES, len(os.sched_getaffinity(0)))):
            send(0)
            for number, (_, place) in enumerate(pieces):
                if number + 1 < len(pieces):
                    send(number + 1)
                events[number % 2].synchronize()
                place.copy_(staged[number % 2][: len(place)])
        return target


def _on_host(value: object) -> bool:
    """Return whether a value is a plain tensor in memory of the host."""
    return type(value) in (Tensor, nn.Parameter) and isinstance(value, Tensor) and value.device.type == "cpu"


def _made_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call returns a new tensor in memory of the host."""
    asked = kwargs.get("device")
    if asked is None and args and isinstance(args[0], Tensor):
        return _on_host(args[0])
    return asked is None or torch.device(asked).type == "cpu"


@contextmanager
def seeded_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside, draw initial values on a device, and restore the generators."""
    there = is_accelerator(device)
    kind, numbers = device.type if there else next(iter(KINDS)), {device.index or 0} if there else set()
    accelerator = torch.get_device_module(kind)
    if there:
        accelerator.init()
    if accelerator.is_initialized():
        numbers.add(accelerator.current_device())
    with torch.random.fork_rng(devices=numbers, device_type=kind):
        torch.manual_seed(seed)
        with DrawnOn(device) if there else nullcontext():
            yield
    if there:
        accelerator.empty_cache()  # the workers may be other processes, which need the memory


class ProgramLike(Protocol):
    """The attributes of a compiled job that running it needs."""

    @property
    def job(self) -> Job: ...
    @property
    def plans(self) -> Plans: ...
    @property
    def outline(self) -> CapturedModel: ...
    @property
    def constants(self) -> Mapping[str, Tensor]: ...
    @property
    def device(self) -> str: ...
    @property
    def shapes(self) -> Mapping[Shapes, "ProgramLike"]: ...
    def code(self, chunk: Chunk, phase: Phase) -> Code: ...
    def origins(self, node: str) -> list[str]: ...
    def evaluation(self, batch: Mapping[str, Tensor], forward: Forward | None = None) -> "ProgramLike": ...
    def shaped(self, batch: Mapping[str, Tensor]) -> "ProgramLike": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A compiled job as workers need it: the plans, the code they call, and how parameters change."""

    plans: Plans
    outline: CapturedModel
    code: Callable[[Chunk, Phase], Code]
    constants: Mapping[str, Tensor]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    precision: str = "fp32"
    clip_norm: float | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    build: BuildCode | None = None  # builds the code of phases, all together. None: one by one

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that chunks compute in."""
        dtype: torch.dtype = getattr(torch, DTYPES[self.precision])
        return dtype

    def build_code(self, plans: Iterable[Plan], meanwhile: Callable[[], Result]) -> Result:
        """Build the code that plans call. Return the result of `meanwhile`: this thread need not wait."""
        results: list[Result] = []
        if self.build is not None:
            self.build(self.called(plans), lambda: results.append(meanwhile()))
        return results[0] if results else meanwhile()

    def called(self, plans: Iterable[Plan]) -> list[tuple[Chunk, Phase]]:
        """Return the phases that plans call, each once."""
        chunks = {chunk.name: chunk for chunk in self.outline.chunks}
        runs = (ins.computes for plan in plans for ins in plan.instrs if ins.op == "compute")
        return [(chunks[name], phase) for phase, name in sorted({(run.phase, run.chunk) for run in runs})]


def setup_of(program: ProgramLike) -> Setup:
    """Return what workers need of a program."""
    job = program.job
    return Setup(
        plans=program.plans,
        outline=program.outline,
        code=program.code,
        constants=program.constants,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        precision=job.precision,
        clip_norm=job.clip_norm,
        seed=job.seed,
        device=device_of(program.device),
        build=getattr(program, "build", None),  # of one that was compiled in this process
    )


def drawing_device(program: ProgramLike) -> torch.device:
    """Return the device on which a program's initial values are drawn."""
    return device_of(program.device if program.job.initial == "device" else "cpu")


def build_model(job: Job, device: torch.device) -> nn.Module:
    """Build the model as PyTorch initialises it for the job's seed; its random numbers come from a device."""
    with seeded_draws(job.seed, device):
        try:
            return job.model()
        except Exception as error:
            hint = "it was built once without memory, and now with values: fix the model at that line"
            raise raised(
                "the model cannot be built", error, role="model", thing=job.model, hint=hint
            ) from error


def initial_tensors(program: ProgramLike) -> dict[str, Tensor]:
    """Return every parameter and buffer as PyTorch initialises them for the job's seed on one device."""
    log.debug("Drawing initial values")
    model = build_model(program.job, drawing_device(program))
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def blank_values(outline: CapturedModel) -> Initial:
    """Return values of the right shape that take no memory, for a worker that is about to load others."""
    known = {value.name: (value.shape, value.dtype) for value in outline.parameters}
    known |= {value.name: (value.shape, value.dtype) for value in outline.buffers}

    def blank(name: str) -> Tensor:
        shape, dtype = known[name]
        return torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)

    return blank
