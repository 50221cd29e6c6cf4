"""Looks into the processes of a job: peak memory, and what its GPU did during some steps.

A worker of Piper calls the job's `optimizer`, which is the way in here: it starts a thread that answers the
driver over a socket. The thread sleeps while nothing is asked, so it costs a step nothing.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks_rows import RANKS, adamw

Event = Mapping[str, Any]  # of a trace in Chrome's format
Figures = dict[str, float]
KEY = b"ranks"
WARM = 2  # steps before memory is counted


class Probe:
    """Measures the process it is in."""

    def __init__(self, device: str, gib: float = 0.0) -> None:
        """Take the device, and the memory of it that this process may have. 0: all there is."""
        self.on_gpu = device == "cuda"
        if self.on_gpu and gib:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(gib * 2**30 / whole)
        self.profiler: torch.profiler.profile | None = None

    def reset(self) -> None:
        """Forget the peak of memory so far."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> int:
        """Return the most bytes that tensors have taken."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else 0

    def memory_of_ranks(self) -> list[int]:
        """Return the memory of every rank of the process group."""
        memory = [0] * RANKS
        dist.all_gather_object(memory, self.memory())
        return memory

    def timed(self, steps: int, act: Callable[[int], object]) -> list[float]:
        """Run steps, which begin and end together on all ranks, and return the seconds of each."""
        times = []
        for step in range(steps):
            if step == WARM:
                self.reset()
            start = self.together()
            act(step)
            times.append(self.together() - start)
        return times

    def together(self) -> float:
        """Wait for the GPU and for all ranks, and return the time."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    def start(self) -> None:
        """Begin to record what runs on the GPU for all threads of this process."""
        activity = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[activity.CUDA if self.on_gpu else activity.CPU])
        self.profiler.start()

    def stop(self) -> Figures:
        """Return the figures of what was recorded."""
        assert self.profiler is not None
        if self.on_gpu:
            torch.cuda.synchronize()
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self.profiler = None
        return figures_of(events)


def figures_of(events: Iterable[Event]) -> Figures:
    """Return where the time of a trace went, in milliseconds, and how many kernels were launched.

    compute, nccl, copies: sums of times; two kernels at once count twice. busy: when at least one kernel that
    is not NCCL's ran. gaps: from the first such kernel to the last, less busy. exposed: of the gaps, those in
    which NCCL's kernels or copies ran.
    """
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "nccl": [], "copies": []}
    launches = 0
    for event in events:
        match event.get("cat"):
            case "kernel":
                kind = "nccl" if "nccl" in event["name"].lower() else "compute"
                spans[kind].append((event["ts"], event["ts"] + event["dur"]))
            case "gpu_memcpy" | "gpu_memset":
                spans["copies"].append((event["ts"], event["ts"] + event["dur"]))
            case "cuda_runtime" | "cuda_driver":
                launches += "Launch" in event["name"]
    compute, others = union(spans["compute"]), union([*spans["nccl"], *spans["copies"]])
    busy = total(compute)
    window = compute[-1][1] - compute[0][0] if compute else 0.0
    idle = [(end, begin) for (_, end), (begin, _) in pairwise(compute)]
    return {
        **{kind: total(found) / 1e3 for kind, found in spans.items()},
        "busy": busy / 1e3,
        "gaps": (window - busy) / 1e3,
        "exposed": total(overlaps(idle, others)) / 1e3,
        "kernels": float(len(spans["compute"])),
        "nccl kernels": float(len(spans["nccl"])),
        "copy calls": float(len(spans["copies"])),
        "launches": float(launches),
    }


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times at which at least one of the spans runs, in order and apart."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlaps(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the times that lie in spans of both lists. The spans of a list are in order and apart."""
    both, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            both.append((begin, end))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return both


def total(spans: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the lengths of spans."""
    return sum(end - begin for begin, end in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAdamW:
    """An optimizer's function that answers a driver from the processes of workers."""

    address: str
    driver: int  # its process, in which nothing is to be measured
    device: str
    gib: float

    def __call__(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        name = f"probe of {self.driver}"
        if os.getpid() != self.driver and all(thread.name != name for thread in threading.enumerate()):
            threading.Thread(target=self.answer, name=name, daemon=True).start()
        return adamw(params)

    def answer(self) -> None:
        """Answer until the driver is gone."""
        probe = Probe(self.device, self.gib)
        with Client(self.address, authkey=KEY) as connection:
            connection.send(os.getpid())
            try:
                while True:
                    method: Callable[[], object] = getattr(probe, connection.recv())
                    connection.send(method())
            except (EOFError, OSError):
                return


class Probes:
    """The driver's side: asks the workers of a run."""

    def __init__(self, device: str, gib: float = 0.0) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="probe")
        self.listener = Listener(str(Path(self.folder.name) / "way"), authkey=KEY)
        self.device, self.gib = device, gib
        self.workers: dict[int, Connection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.workers.values():
            connection.close()
        self.listener.close()
        self.folder.cleanup()

    @property
    def optimizer(self) -> ProbedAdamW:
        """Return the function for the job."""
        address = cast(str, self.listener.address)
        return ProbedAdamW(address=address, driver=os.getpid(), device=self.device, gib=self.gib)

    def meet(self, count: int) -> None:
        """Wait for so many workers, which have been launched."""
        while len(self.workers) < count:
            connection = self.listener.accept()
            self.workers[connection.recv()] = connection

    def ask(self, method: str) -> dict[int, Any]:
        """Return the answers of all workers, by their processes."""
        for connection in self.workers.values():
            connection.send(method)
        return {process: connection.recv() for process, connection in self.workers.items()}

    def ask_one(self, process: int, method: str) -> Any:  # noqa: ANN401  a method's answer
        """Return the answer of one worker."""
        self.workers[process].send(method)
        return self.workers[process].recv()
