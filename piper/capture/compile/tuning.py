"""Measures which form of each kernel is the fastest, and keeps it for later processes.

Inductor measures the forms of a kernel when it first runs, and writes the fastest into the folder in which
the kernel was compiled. That is the working folder of one process, and it ends with the process.
"""

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch._inductor.runtime.benchmarking import InductorBenchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, check_autotune_cache

from piper.capture.compile.cache import Cache
from piper.errors import ConfigError
from piper.process.attributes import replaced

log = logging.getLogger("piper")
REPEATS = 10  # runs of a kernel, of which the fastest counts
AHEAD = 2**23  # cycles that a GPU waits while they are queued: about 5 ms
TRIES = 3
_one_at_a_time = threading.RLock()


@contextmanager
def tuning_in(folder: Path) -> Iterator[list[Path]]:
    """Let kernels keep their fastest forms in a folder. Yield the files of those not measured yet."""
    unmeasured: list[Path] = []
    recheck: Callable[..., None] = CachingAutotuner.recheck_autotune_cache

    def recheck_here(kernel: CachingAutotuner, *args: object, **kwargs: object) -> None:
        forms = [result.config for result in kernel.compile_results]
        if kernel.filename is not None:
            written = Path(kernel.filename)  # by the process that compiled it
            kernel.filename = str(folder / written.parent.name / written.name)
        recheck(kernel, *args, **kwargs)
        if len(kernel.compile_results) == 1 < len(forms):
            # The fastest form was measured beside those that Inductor adds while it loads: not again.
            kernel.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}
        elif len(forms) > 1:
            _, cached, _ = check_autotune_cache(forms, kernel.filename, kernel.inductor_meta)
            if cached is not None and cached.local_cache is not None:
                file = Path(cached.local_cache[1])
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                kernel.save_cache_hook = cached.save
                unmeasured.append(file)

    with replaced(CachingAutotuner, "recheck_autotune_cache", recheck_here):
        yield unmeasured


def keep_measured(name: str, cache: Cache, files: list[Path]) -> None:
    """Add the files of kernels that have been measured since to an entry of the cache."""
    entry, folder = cache.find(name), cache.working_folder()
    measured = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files if file.exists()}
    if entry is None or not measured:
        return
    try:
        cache.keep(name, replace(entry, files={**entry.files, **measured}))
    except ConfigError as error:  # the step that measured them goes on
        log.warning("Which kernels are the fastest is not kept for the next run: %s", error.what)


@contextmanager
def measuring_kernels(cache: Cache) -> Iterator[None]:
    """Let the kernels that first run inside be measured by one thread of one process at a time."""
    plain: Callable[..., object] = CachingAutotuner.benchmark_all_configs

    def alone(*args: object, **kwargs: object) -> object:
        # What is under way may wait for a device that needs the lock first, and `milliseconds` waits for it.
        torch.cuda.synchronize()
        with (cache.working_folder().parent / "benchmark.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return plain(*args, **kwargs)

    with (
        _one_at_a_time,
        replaced(CachingAutotuner, "benchmark_all_configs", alone),
        replaced(InductorBenchmarker, "benchmark_gpu", lambda _, call, **settings: milliseconds(call)),
    ):
        yield


def milliseconds(call: Callable[[], object]) -> float:
    """Return how long a GPU takes for a call that launches kernels, on the current stream."""
    # Inductor begins its clock while the GPU has nothing to do, and so counts the time in which the host
    # launches the kernel. Forms of a kernel that takes less seem equal, and any is chosen. Here the GPU waits
    # until all launches are queued.
    call()  # what is done once is not measured
    cache = torch.empty(torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2))
    cycles = AHEAD
    for _ in range(TRIES):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        woken = torch.cuda.Event()
        woken.record()
        for begin, end in zip(begins, ends, strict=True):
            cache.zero_()  # no call reads what the one before it has left in the cache
            begin.record()
            call()
            end.record()
        queued = not woken.query()
        torch.cuda.synchronize()
        if queued:
            break
        cycles *= 4
    return min(float(begin.elapsed_time(end)) for begin, end in zip(begins, ends, strict=True))
