"""The kinds of device that a program can run on, and what the runtime asks of each.

To add a kind: a row of `KINDS`, the collectives between its devices (`runtime/comm`), which workers find in
`BETWEEN` (`workers/serve.py`), and kernels of its own where they pay (as in `runtime/cuda`). Everything else
asks here, or asks torch's module for the device: torch gives each kind of accelerator the same streams,
events, generators and counts of memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from piper.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of accelerator."""

    title: str  # as people write it
    visible: str  # the variable of the environment that lists which devices a process may use
    cluster: str  # whose network is meant where none is named
    environment: Mapping[str, str]  # variables of a worker, unless the user has set them
    versions: Callable[[], Mapping[str, str]] = dict  # of what it runs on, by name
    pin: Callable[[Tensor], object] | None = None  # lets it access memory of the host. None: it has no way to
    unpin: Callable[[Tensor], object] = lambda memory: None  # takes this back


def cuda_versions() -> dict[str, str]:
    """Return the versions of CUDA and NCCL."""
    return {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


def cuda_pin(memory: Tensor) -> None:
    """Let CUDA access memory of the host."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def cuda_unpin(memory: Tensor) -> None:
    """Take back what `cuda_pin` did."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


KINDS = {  # by torch's name
    "cuda": Kind(
        title="CUDA",
        visible="CUDA_VISIBLE_DEVICES",
        cluster="h200",
        # Streams beyond the number of hardware queues (8, or 2 under MPS) share one: work that could run then
        # waits behind a receive of another stream.
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        versions=cuda_versions,
        pin=cuda_pin,
        unpin=cuda_unpin,
    )
}


def device_kind(asked: str | None) -> str:
    """Return the kind of device that a job is for: as asked, otherwise an accelerator where there is any."""
    there = [kind for kind in KINDS if torch.get_device_module(kind).is_available()]
    if asked is None:
        return next(iter(there), "cpu")
    if asked != "cpu" and asked not in KINDS:
        known = ", ".join(["cpu", *KINDS])
        raise ConfigError(f"there is no device {asked!r}", by="device", hint=f"device is one of {known}")
    if asked != "cpu" and asked not in there:
        title = KINDS[asked].title
        built = "" if getattr(torch.version, asked, None) else f", built without {title}"
        raise ConfigError(
            f"there is no {title} device here",
            by="device",
            facts={"torch": f"torch {torch.__version__}{built}"},
            hint=f"use device cpu, or start where torch.{asked}.is_available()",
        )
    return asked


def device_of(kind: str) -> torch.device:
    """Return the device of a kind as each worker sees it: the first accelerator. Captured code names it."""
    return torch.device(kind, 0) if kind in KINDS else torch.device(kind)


def is_accelerator(device: torch.device | str) -> bool:
    """Return whether work is given to a device on streams, and done there while the host goes on."""
    return (device if isinstance(device, str) else device.type) in KINDS


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton writes code for a device, and is installed: modules with kernels import it."""
    return device.type == "cuda" and find_spec("triton") is not None


def module(device: torch.device) -> ModuleType:
    """Return torch's module for an accelerator: its streams, events, generators and counts of memory."""
    named: ModuleType = torch.get_device_module(device)
    return named


def accelerators() -> int:
    """Return how many accelerators this process may use, without initialising any."""
    return max(int(torch.get_device_module(kind).device_count()) for kind in KINDS)


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that draws on a device. Its state lives on the host."""
    if not is_accelerator(device):
        return torch.default_generator
    drawing: torch.Generator = module(device).default_generators[device.index or 0]
    return drawing


@contextmanager
def computing_on(threads: int) -> Iterator[None]:
    """Let a computation on the host use so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait_for_stream(device: torch.device) -> None:
    """Wait until the current stream of a device has done what it was given; a host has none."""
    if is_accelerator(device):
        module(device).current_stream(device).synchronize()


def capturing(device: torch.device) -> bool:
    """Return whether what an accelerator is given becomes a graph. Some kinds have no graphs."""
    asked = getattr(module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def pin(memory: Tensor, device: torch.device) -> None:
    """Let an accelerator access memory of the host. PyTorch's own pinned memory comes in powers of two."""
    kind = KINDS.get(device.type)
    if kind is not None and kind.pin is not None and memory.nbytes:
        kind.pin(memory)


def unpin(memory: Tensor, device: torch.device) -> None:
    """Take back what `pin` did."""
    kind = KINDS.get(device.type)
    if kind is not None and kind.pin is not None and memory.nbytes:
        kind.unpin(memory)
