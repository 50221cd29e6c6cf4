"""The setup that a worker needs to run one device's plan."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.dtypes import DTYPES
from piper.job import Job
from piper.plan.plan import Plan, Plans
from piper.process.usercode import raised
from piper.runtime.accelerator import device_of
from piper.runtime.initial_draws import seeded_draws

Result = TypeVar("Result")
log = logging.getLogger("piper")
Code = Callable[..., tuple[Tensor, ...]]
BuildCode = Callable[[Iterable[tuple[Chunk, Phase]], Callable[[], None]], None]
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]  # the name, shape and type of each field of a batch
Initial = Callable[[str], Tensor]  # a parameter's or buffer's full first value, by name
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]  # what a run predicts: a row for each sample


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
