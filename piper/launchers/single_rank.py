"""`rank:N`: one device of a job by itself, with real kernels and memory, on a network that is only timed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from piper.errors import ConfigError, LaunchError
from piper.ir.chunk import CapturedModel
from piper.launchers.base import EvaluationResult, Resumed
from piper.launchers.messages import Call
from piper.launchers.run_programs import Prepared, ProgramRun
from piper.plan.memory_timeline import timeline
from piper.plan.ops import COMMUNICATION
from piper.runtime.comm.synthetic import AloneComms, arriving, totalled
from piper.runtime.cuda.memory_release import predicted_peak
from piper.runtime.debug.fake_network import CopyEngine, Sleeper, occupied
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.debug.profiler import ClockOffset, DeviceProfile
from piper.runtime.kernels import KERNELS
from piper.runtime.setup import Initial, JobLike, ProgramLike, build_model, setup_of
from piper.runtime.worker import Options, Sums, Worker
from piper.simulate.cluster import load_cluster

SPREAD = 0.02  # standard deviation of the elements of a matrix, as most models begin
SAMPLE = 1_000_003  # numbers that are drawn; a prime, so that no two rows are alike
CLUSTERS = {"cuda": "h200", "cpu": "cpu"}  # whose network is meant where none is named


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The peak memory of a device, predicted and measured, in bytes."""

    planned: int  # counting in the order of issue
    predicted: int  # with what is held while streams run at the same time
    measured: int | None  # none on a host, which does not count


class SingleRankRun(ProgramRun):
    """One device of a job, for its step time and peak memory. Its numbers mean nothing."""

    saves = False

    def __init__(self, program: ProgramLike, device: int, options: Options, cluster: str | None) -> None:
        super().__init__(program, options)
        self.device, self.unread = device, {}
        self.setup = setup = setup_of(program)
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        self.network = load_cluster(cluster or CLUSTERS[program.device])
        self.engine = CopyEngine(setup.device) if setup.device.type == "cuda" else None
        kernels = {**KERNELS, "recv": arriving, "total": totalled}
        for op in COMMUNICATION:
            kernels[op] = occupied(kernels[op], self.network.seconds, self.engine or Sleeper())
        self.worker = Worker(
            setup,
            device,
            AloneComms(self.plans, device),
            synthetic_weights(program.job, program.outline),
            options,
            kernels=kernels,
        )
        self.seconds: list[float] = []  # of each step
        if self.engine is not None:
            torch.cuda.reset_peak_memory_stats(setup.device)

    def _step(self, ready: Prepared, batch: Mapping[str, Tensor]) -> Sums:
        """Train on the rows that this device takes of a global batch. The loss is only its own part."""
        begin = perf_counter()
        sums = self.worker.step(batch, ready.number)
        self.seconds.append(perf_counter() - begin)
        return sums

    def _prepare(self, made: Prepared, *, trains: bool) -> None:
        comms = AloneComms(made.program.plans, self.device)
        initial = made.buffers.__getitem__
        self.worker.prepare(made.number, setup_of(made.program), comms, initial, trains=trains)

    def _forward(self, ready: Prepared, batch: Mapping[str, Tensor]) -> Sums:
        raise AssertionError("`evaluate` is refused")

    def peak(self) -> PeakMemory:
        """Return the peak memory so far, predicted and measured."""
        plan = self.worker.env.plan
        measured = None
        if self.engine is not None:
            measured = torch.cuda.max_memory_allocated(self.setup.device) - self.engine.nbytes
        return PeakMemory(planned=timeline(plan).peak, predicted=predicted_peak(plan), measured=measured)

    def recordings(self) -> dict[int, tuple[DeviceProfile, ClockOffset]]:
        """Return when the instructions of the recorded steps ran; `profile` must be on."""
        recorder, same = self.worker.recorder, ClockOffset(offset=0.0, error=0.0)
        return {} if recorder is None else {self.device: (recorder.take(), same)}

    def _ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        raise AssertionError("what needs all devices is refused")

    def state_dict(self) -> dict[str, Tensor]:
        raise single_rank_error("there is no full state")

    def gradients(self) -> dict[str, Tensor]:
        raise single_rank_error("there are no gradients of a whole job")

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]] | None = None) -> EvaluationResult:
        raise single_rank_error("there is nothing to evaluate")

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return the options of each group of parameters."""
        return self.worker.env.state.options() or []

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters."""
        self.worker.env.state.set_option(group, key, value)

    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        raise single_rank_error("there is no optimizer state of a whole job")

    def trails(self) -> dict[int, dict[OutputKey, Tensor]]:
        """Return what every chunk returned in the last step; `keep_outputs` must be on."""
        return {} if self.worker.trail is None else {self.device: self.worker.trail.kept}

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        raise single_rank_error("there is nothing worth saving")

    def read(self, path: Path | str) -> Resumed:
        raise single_rank_error("a checkpoint cannot be loaded")

    def settle(self) -> None:
        """Return at once: no checkpoint is written."""

    def protect(self) -> None:
        raise single_rank_error("its state is not kept")

    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        raise single_rank_error("its state is not kept")

    def close(self) -> None:
        """End the worker's threads. Idempotent."""
        self.worker.close()
        torch.set_num_threads(self.threads_before)


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


@contextmanager
def launch_single_rank(
    program: ProgramLike, on: str, options: Options | None = None, *, cluster: str | None = None
) -> Iterator[SingleRankRun]:
    """Start one device of a program in this process, and end it with the block."""
    run = SingleRankRun(program, device_named(on, program), options or Options(), cluster)
    try:
        yield run
    finally:
        run.close()


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
