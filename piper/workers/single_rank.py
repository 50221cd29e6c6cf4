"""The worker of one device of a job, with real kernels and memory, on a network that is only timed."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from piper.errors import LaunchError
from piper.ir.chunk import CapturedModel
from piper.job import Job
from piper.plan.ops import COMMUNICATION
from piper.runtime.accelerator import KINDS, computing_on, is_accelerator, module
from piper.runtime.comm.synthetic import AloneComms, CopyEngine, Sleeper, arriving, occupied, totalled
from piper.runtime.kernels import KERNELS
from piper.runtime.setup import Initial, ProgramLike, Setup, build_model, setup_of
from piper.runtime.worker import Options, Worker
from piper.simulate.cluster import load_cluster
from piper.workers.group import A, R, WorkerGroup
from piper.workers.serve import WorkerAnswers, needs_of

SPREAD = 0.02  # standard deviation of the elements of a matrix, as most models begin
SAMPLE = 1_000_003  # numbers that are drawn; a prime, so that no two rows are alike


class SingleRankGroup(WorkerGroup):
    """One device of a job, without the others."""

    in_order = True

    def __init__(self, program: ProgramLike, device: int, options: Options, cluster: str | None) -> None:
        super().__init__(program, options)
        self.device, self.devices, self.setup = device, (device,), setup_of(program)
        self.network = load_cluster(
            cluster or (KINDS[program.device].cluster if program.device in KINDS else "cpu")
        )
        self.engine = CopyEngine(self.setup.device) if is_accelerator(self.setup.device) else None
        self.seconds: list[float] = []  # of each step
        self.computing = ExitStack()
        self.computing.enter_context(computing_on(options.threads))
        kernels = {**KERNELS, "recv": arriving, "total": totalled}
        for op in COMMUNICATION:
            kernels[op] = occupied(kernels[op], self.network.seconds, self.engine or Sleeper())
        self.worker = Worker(
            self.setup,
            device,
            AloneComms(program.plans.comms, device),
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
        if why := needs_of(call).whole:
            raise single_rank_error(why)
        begin = perf_counter()
        answer = call(self.answers, arguments[self.device])
        if call == WorkerAnswers.step:
            self.seconds.append(perf_counter() - begin)
        return {self.device: answer}

    def prepare(self, number: int, setup: Setup, buffers: Mapping[str, Tensor], *, trains: bool) -> None:
        if not trains:
            raise single_rank_error("there is nothing to evaluate")
        comms = AloneComms(setup.plans.comms, self.device)
        self.worker.prepare(number, setup, comms, buffers.__getitem__, trains=trains)

    def close(self) -> None:
        self.worker.close()
        self.computing.close()


def single_rank_error(what: str) -> LaunchError:
    """Return the error of a call that needs all devices, on a run of a single one."""
    return LaunchError(
        what,
        by="rank",
        facts={"why": "one device runs alone, on synthetic numbers"},
        hint="launch the whole job: on='inline', 'local' or 'ray'",
    )


def synthetic_weights(job: Job, outline: CapturedModel) -> Initial:
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


def buffers_alone(job: Job) -> dict[str, Tensor]:
    """Return a model's buffers as its constructor makes them, without allocating its parameters."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]  # it may return one
    try:
        model = build_model(job, torch.device("cpu"))
    finally:
        hook.remove()
    return {name: value.detach() for name, value in model.named_buffers()}
