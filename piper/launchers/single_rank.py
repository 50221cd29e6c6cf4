"""`rank:N`: one device of a job by itself, with real kernels and memory, on a network that is only timed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from piper.errors import ConfigError, LaunchError
from piper.ir.chunk import CapturedModel
from piper.launchers.base import Resumed
from piper.launchers.group import WorkerGroup
from piper.launchers.run import Run
from piper.launchers.sessions import Sessions
from piper.launchers.starter import GivenGroup
from piper.launchers.worker_answers import WorkerAnswers
from piper.plan.memory_timeline import timeline
from piper.plan.ops import COMMUNICATION
from piper.runtime.accelerator import is_accelerator, module, usual_cluster
from piper.runtime.comm.synthetic import AloneComms, arriving, totalled
from piper.runtime.debug.fake_network import CopyEngine, Sleeper, occupied
from piper.runtime.debug.profiler import ClockOffset
from piper.runtime.kernels import KERNELS
from piper.runtime.memory_release import predicted_peak
from piper.runtime.setup import Initial, JobLike, ProgramLike, Setup, build_model, setup_of
from piper.runtime.worker import Options, Worker
from piper.simulate.cluster import load_cluster

A = TypeVar("A")
R = TypeVar("R")
SPREAD = 0.02  # standard deviation of the elements of a matrix, as most models begin
SAMPLE = 1_000_003  # numbers that are drawn; a prime, so that no two rows are alike
REFUSED = {  # calls that need all devices
    "owned": "there is no full state",
    "gradients": "there are no gradients of a whole job",
    "optimizer_state": "there is no optimizer state of a whole job",
    "save": "there is nothing worth saving",
    "load": "a checkpoint cannot be loaded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The peak memory of a device, predicted and measured, in bytes."""

    planned: int  # counting in the order of issue
    predicted: int  # with what is held while streams run at the same time
    measured: int | None  # none on a host, which does not count


class SingleRankGroup(WorkerGroup):
    """One device of a job, without the others."""

    in_order = True

    def __init__(self, program: ProgramLike, device: int, options: Options, cluster: str | None) -> None:
        super().__init__(program, options)
        self.device, self.devices, self.setup = device, (device,), setup_of(program)
        self.network = load_cluster(cluster or usual_cluster(program.device))
        self.engine = CopyEngine(self.setup.device) if is_accelerator(self.setup.device) else None
        self.seconds: list[float] = []  # of each step
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        kernels = {**KERNELS, "recv": arriving, "total": totalled}
        for op in COMMUNICATION:
            kernels[op] = occupied(kernels[op], self.network.seconds, self.engine or Sleeper())
        self.worker = Worker(
            self.setup,
            device,
            AloneComms(program.plans, device),
            synthetic_weights(program.job, program.outline),
            options,
            kernels=kernels,
        )
        self.answers = WorkerAnswers(self.worker)
        if self.engine is not None:
            module(self.setup.device).reset_peak_memory_stats(self.setup.device)

    def start(self) -> dict[str, Tensor]:
        return {}

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        if call.__name__ in REFUSED:
            raise single_rank_error(REFUSED[call.__name__])
        begin = perf_counter()
        answer = call(self.answers, arguments[self.device])
        if call == WorkerAnswers.step:
            self.seconds.append(perf_counter() - begin)
        return {self.device: answer}

    def prepare(self, number: int, setup: Setup, buffers: Mapping[str, Tensor], *, trains: bool) -> None:
        if not trains:
            raise single_rank_error("there is nothing to evaluate")
        comms = AloneComms(setup.plans, self.device)
        self.worker.prepare(number, setup, comms, buffers.__getitem__, trains=trains)

    def clock(self, device: int) -> ClockOffset:
        return ClockOffset(offset=0.0, error=0.0)

    def close(self) -> None:
        self.worker.close()
        torch.set_num_threads(self.threads_before)


class SingleRankRun(Run):
    """One device of a job, for its step time and peak memory. Its numbers mean nothing."""

    saves = False

    def __init__(self, group: SingleRankGroup) -> None:
        super().__init__(Sessions(group.program, group.options, GivenGroup(group)))
        self.device, self.setup, self.plans = group.device, group.setup, group.program.plans
        self.network, self.engine, self.seconds = group.network, group.engine, group.seconds
        self.sessions.begin()
        self.worker = group.worker

    def peak(self) -> PeakMemory:
        """Return the peak memory so far, predicted and measured."""
        plan = self.worker.env.plan
        measured = None
        if self.engine is not None:
            measured = module(self.setup.device).max_memory_allocated(self.setup.device) - self.engine.nbytes
        return PeakMemory(planned=timeline(plan).peak, predicted=predicted_peak(plan), measured=measured)

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Refuse to save."""
        raise single_rank_error("there is nothing worth saving")

    def load(self, path: Path | str) -> Resumed:
        """Refuse to load."""
        raise single_rank_error("a checkpoint cannot be loaded")


def single_rank_error(what: str) -> LaunchError:
    """Return the error of a call that needs all devices, on a run of a single one."""
    return LaunchError(
        what,
        by="rank",
        facts={"why": "one device runs alone, on synthetic numbers"},
        hint="launch the whole job: on='inline', 'local' or 'ray'",
    )


def device_named(on: str, program: ProgramLike) -> int:
    """Return the device that `rank:N` names."""
    known = program.plans.devices
    text = on.partition(":")[2]
    if not text.isdecimal() or int(text) not in known:
        raise ConfigError(
            f"there is no device {text!r}",
            by=on,
            facts={"devices": f"{known[0]} to {known[-1]}"},
            hint="name one of the plan's devices: --on rank:0",
        )
    return int(text)


def launch_single_rank(
    program: ProgramLike, on: str, options: Options | None = None, *, cluster: str | None = None
) -> SingleRankRun:
    """Start one device of a program in this process."""
    return SingleRankRun(SingleRankGroup(program, device_named(on, program), options or Options(), cluster))


def synthetic_weights(job: JobLike, outline: CapturedModel) -> Initial:
    """Return synthetic initial values: the model's own buffers, and parameters of the usual size."""
    shapes = {parameter.name: parameter.shape for parameter in outline.parameters}
    buffers = buffers_alone(job)
    drawn = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(job.seed)).mul_(SPREAD)

    def initial(name: str) -> Tensor:
        if name in buffers:
            return buffers[name]
        shape = shapes[name]
        if len(shape) < 2:
            return torch.ones(shape)  # scales of norms; a bias does not mind
        if len(shape) > 2:  # experts, all alike: a device copies only its own
            return spread(drawn, shape[1:]).expand(shape)
        return spread(drawn, shape)

    return initial


def spread(drawn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape that repeats the drawn numbers."""
    size = torch.Size(shape).numel()
    return drawn.repeat(-(-size // len(drawn)))[:size].view(shape)


def buffers_alone(job: JobLike) -> dict[str, Tensor]:
    """Return a model's buffers as its constructor makes them, without allocating its parameters."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]  # it may return one
    try:
        model = build_model(job, torch.device("cpu"))
    finally:
        hook.remove()
    return {name: value.detach() for name, value in model.named_buffers()}
