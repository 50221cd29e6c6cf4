"""The two sides of `gpu_ranks` as processes: each trains a row and hands back its figures.

Piper's driver stays for the next row, so that torch is imported once. After an error or too long a wait it is
ended, and the next row gets a new one. Each row of a peer gets new processes: a second process group with
NCCL in the same process ended it, in torch's `splitGroup`.
"""

import contextlib
import gc
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import piper
from benchmarks.ranks_peer import peer_rank
from benchmarks.ranks_probe import WARM, Probe, Probes
from benchmarks.ranks_rows import RANKS, ROWS, SIZES, Size, batch_of, job_of
from piper.compiler import Program

GIB = 2**30
PROFILED = 2  # steps
PROFILED_RANK = 1  # a stage in the middle
BRIEF = 3.0  # seconds in which other ranks may say why as well
CONTROL = "nvidia-cuda-mps-control"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row at a size, and how it is run."""

    row: str
    size: str
    steps: int
    device: str
    cache: str
    compiled: bool = True
    by_layer: bool | None = None
    profile: bool = False
    port: int = 0
    samples: int | None = None  # of a microbatch; None: those of the row
    gib: float = 0.0  # of a rank, of which its allocator refuses more; 0: all there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a side measured."""

    times: list[float]  # seconds of each step
    losses: list[float]
    norm: float  # of the gradient of the first step
    memory: list[int]  # bytes of each rank
    build_s: float  # to the first step
    profile: dict[str, float] | None = None
    repeated: int = 0  # steps that were run again, because rows exceeded their blocks

    @property
    def ms(self) -> float:
        """Return the median of the second half of the steps."""
        return statistics.median(self.times[len(self.times) // 2 :]) * 1e3

    @property
    def gib(self) -> float:
        """Return the memory of the worst rank."""
        return max(self.memory) / GIB

    @property
    def fifth(self) -> float:
        """Return the time of the fifth step over that of the twentieth, or of the last."""
        if len(self.times) < 5:
            return float("nan")
        return self.times[4] / self.times[min(19, len(self.times) - 1)]

    def as_dict(self) -> dict[str, object]:
        """Return all figures by name."""
        return {**asdict(self), "ms": self.ms, "gib": self.gib, "fifth_over_twentieth": self.fifth}


class Failed(Exception):  # noqa: N818  it is a result as well
    """A row that could not be run, with the reason."""


class Side(Protocol):
    """A side that runs rows."""

    def run(self, task: Task, patience: float) -> Figures: ...
    def close(self) -> None: ...


def size_of(task: Task) -> Size:
    """Return the size of a task, with the task's own samples in a microbatch."""
    size = SIZES[task.size]
    if task.samples is None:
        return size
    shape = replace(size.shapes[task.row], samples=task.samples)
    return replace(size, shapes={**size.shapes, task.row: shape})


# the peer


def peer_main(rank: int, pipe: Connection) -> None:
    """Be a rank of the peer: train one row after another."""
    serve(pipe, lambda task: train_peer(task, rank))


def train_peer(task: Task, rank: int) -> Figures:
    """Train a row as a rank of the peer."""
    begin = time.perf_counter()
    on_gpu = task.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    store = TCPStore("127.0.0.1", task.port, RANKS, rank == 0)
    where = torch.device("cuda", 0) if on_gpu else None
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, device_id=where)
    try:
        return measure_peer(task, rank, begin)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def measure_peer(task: Task, rank: int, begin: float) -> Figures:
    """Build a rank of the peer, and time its steps, which begin and end together on all ranks."""
    probe = Probe(task.device, task.gib)
    losses, norm = [], 0.0
    row, size = ROWS[task.row], size_of(task)
    with peer_rank(row, size, rank, task.device, compiled=task.compiled) as peer:
        build_s = time.perf_counter() - begin

        def train(step: int) -> None:
            nonlocal norm
            loss, square = peer.step(with_norm=step == 0)
            losses.append(loss)
            norm = norm or square

        times = probe.timed(task.steps, train)
        profile, memory = None, probe.memory_of_ranks()
        if task.profile:
            if rank == PROFILED_RANK:
                probe.start()
            for _ in range(PROFILED):
                peer.step()
            if rank == PROFILED_RANK:
                profile = probe.stop()
            probe.together()
    return Figures(times=times, losses=losses, norm=norm, memory=memory, build_s=build_s, profile=profile)


# ours


def piper_main(pipe: Connection) -> None:
    """Drive Piper's side: train one row after another."""
    serve(pipe, train_piper)


def launched(program: Program, *, graphs: bool = False) -> piper.Run:
    """Launch four ranks, which talk by NCCL where they share a GPU."""
    return piper.launch(program, on="local", share="nccl", timeout=300, graphs=graphs)


def train_piper(task: Task) -> Figures:
    """Train a row with Piper."""
    begin = time.perf_counter()
    row, size = ROWS[task.row], size_of(task)
    batch = batch_of(row, size.shapes[task.row])
    times, losses, norm, repeated = [], [], 0.0, 0
    with Probes(task.device, task.gib) as probes:
        job = job_of(row, size, probes.optimizer, task.by_layer)
        program = piper.compile(job, device=task.device, compile=task.compiled, cache=task.cache)
        with launched(program, graphs=row.graphs and task.device == "cuda") as run:
            probes.meet(RANKS)
            build_s = time.perf_counter() - begin
            for step in range(task.steps):
                if step == WARM:
                    probes.ask("reset")
                start = time.perf_counter()
                result = run.step(batch)
                times.append(time.perf_counter() - start)
                losses.append(result.loss)
                norm = norm or result.grad_norm
                repeated += result.repeated
            memory = [*probes.ask("memory").values()]
            profile = None
            if task.profile:
                process = cast("Mapping[int, int]", run.session.group.processes)[PROFILED_RANK]  # type: ignore[attr-defined]
                probes.ask_one(process, "start")
                for _ in range(PROFILED):
                    run.step(batch)
                profile = probes.ask_one(process, "stop")
    return Figures(
        times=times,
        losses=losses,
        norm=norm,
        memory=memory,
        build_s=build_s,
        profile=profile,
        repeated=repeated,
    )


# processes


def serve(pipe: Connection, train: Callable[[Task], Figures]) -> None:
    """Answer tasks with figures, or with the text of an error, until the other end is gone."""
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer: Figures | str = train(task)
        except Exception:  # noqa: BLE001  it is the result of the row
            answer = traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:  # another rank has failed first
            return


class ProcessSide:
    """A side whose processes wait for rows."""

    def __init__(
        self, mains: list[Callable[[Connection], None]], environments: list[dict[str, str]], *, lasting: bool
    ) -> None:
        """Take what each process runs, what its environment has besides, and if it runs a second row."""
        self.mains, self.environments, self.lasting = mains, environments, lasting
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        """Start the processes, unless they wait already."""
        if self.processes:
            return
        context = multiprocessing.get_context("spawn")
        for main, environment in zip(self.mains, self.environments, strict=True):
            here, there = context.Pipe()
            process = context.Process(target=main, args=(there,))
            with set_for_children(environment):
                process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, task: Task, patience: float) -> Figures:
        """Train a row. Wait for so many seconds at most."""
        self.start()
        try:
            figures = self._answer(task, patience)
        except Failed:
            self.close()
            raise
        if not self.lasting:
            self.close()
        return figures

    def _answer(self, task: Task, patience: float) -> Figures:
        """Return the figures of a row. After an error wait only briefly for those of other ranks."""
        for pipe in self.pipes:
            pipe.send(task)
        answers: dict[int, Figures | str] = {}
        end = time.monotonic() + patience
        while len(answers) < len(self.pipes):
            left = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = cast("list[Connection]", wait(left, max(0.0, end - time.monotonic())))
            if not ready:
                break
            for pipe in ready:
                answers[self.pipes.index(pipe)] = answer = received(pipe)
                if isinstance(answer, str):
                    end = min(end, time.monotonic() + BRIEF)
        errors = [f"rank {rank}: {answer}" for rank, answer in answers.items() if isinstance(answer, str)]
        chosen = answers.get(PROFILED_RANK if len(self.pipes) > 1 else 0)
        if errors or not isinstance(chosen, Figures) or len(answers) < len(self.pipes):
            raise Failed("\n".join(errors) or f"no answer within {patience:.0f} s")
        return chosen

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
        self.pipes.clear()
        self.processes.clear()


def received(pipe: Connection) -> Figures | str:
    """Return the figures that a process sends, or an error: its own, or that it is gone."""
    try:
        return cast("Figures | str", pipe.recv())
    except (EOFError, OSError):
        return "the process has ended"


@contextlib.contextmanager
def set_for_children(environment: Mapping[str, str]) -> Iterator[None]:
    """Let processes that start now have these variables."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class PeerMain:
    """What a process of the peer runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, pipe: Connection) -> None:
        peer_main(self.rank, pipe)


def side_of(name: str) -> ProcessSide:
    """Return a side by its name. NCCL takes the ranks of the peer for machines."""
    if name == "piper":
        return ProcessSide([piper_main], [{}], lasting=True)
    hosts = [{"NCCL_HOSTID": f"peer{rank}"} for rank in range(RANKS)]
    return ProcessSide([PeerMain(rank) for rank in range(RANKS)], hosts, lasting=False)


def free_port() -> int:
    """Return a port that no one listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def shared_gpu() -> Iterator[bool]:
    """Let processes that start in here run at once on the GPU, each on a quarter of it, by MPS.

    Yield whether MPS is there. The daemon must not get the limit: all that it ever serves would have it.
    """
    control = shutil.which(CONTROL)
    if control is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        places = {name: str(Path(folder) / name) for name in ("pipe", "log")}
        for place in places.values():
            Path(place).mkdir()
        ways = {"CUDA_MPS_PIPE_DIRECTORY": places["pipe"], "CUDA_MPS_LOG_DIRECTORY": places["log"]}
        with set_for_children(ways):
            subprocess.run([control, "-d"], check=True)
            try:
                with set_for_children({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // RANKS)}):
                    yield True
            finally:
                # Without a limit it would wait for this process, which is its client where it compiles.
                subprocess.run([control], input="quit -t 10\n", text=True, check=False, timeout=60)
