"""Copies of values to memory of the host and back, and of the state to memory that outlives its worker."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.plan.instr import Instr
from piper.plan.protected import MIRRORED
from piper.runtime.accelerator import is_accelerator, module, wait_for_stream
from piper.runtime.context import Bound, Env
from piper.runtime.host_state import HostBuffer


@dataclass(slots=True)
class TensorCopy:
    """A tensor on the host: its whole storage, and where the tensor lies in it."""

    buffer: HostBuffer
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(slots=True)
class HostCopy:
    """The value of a slot on the host: a tensor, or several, of which some may be no tensors."""

    items: list[object]
    several: bool

    def buffers(self) -> list[HostBuffer]:
        """Return the buffers that the value lies in, each once."""
        found = (item.buffer for item in self.items if isinstance(item, TensorCopy))
        return list({id(buffer): buffer for buffer in found}.values())


def offload(env: Env, ins: Instr) -> Bound:
    """Copy values to memory of the host, each storage once, or the state of a bucket."""
    if ins.writes[0].kind == "state":
        return offload_state(env, ins)
    slots, device, memory = env.slots, env.setup.device, env.host_memory
    pairs = [(env.at(read), env.at(made)) for read, made in zip(ins.reads, ins.writes, strict=True)]

    def run() -> None:
        buffers: dict[int, HostBuffer] = {}  # by the storage that they are of

        def copied(value: object) -> object:
            if not isinstance(value, Tensor) or value.device != device:
                return value
            storage = value.untyped_storage()
            if storage._cdata not in buffers:
                buffer = buffers[storage._cdata] = memory.take(storage.nbytes(), device)
                stored = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
                buffer.data.copy_(stored, non_blocking=True)
            return TensorCopy(
                buffers[storage._cdata], value.dtype, value.size(), value.stride(), value.storage_offset()
            )

        for source, target in pairs:
            value = slots[source]
            items = value if isinstance(value, list) else [value]
            copy = HostCopy([copied(item) for item in items], isinstance(value, list))
            for buffer in copy.buffers():
                buffer.users += 1
            slots[target] = copy

    return run


def fetch(env: Env, ins: Instr) -> Bound:
    """Bring values back from the host, each storage once, into memory of the stream that reads them."""
    if ins.reads[0].kind == "state":
        return fetch_state(env, ins)
    slots, device, memory = env.slots, env.setup.device, env.host_memory
    pairs = [(env.at(read), env.at(made)) for read, made in zip(ins.reads, ins.writes, strict=True)]
    ending = {env.at(slot) for slot in ins.frees}
    maker = env.makers[ins.writes[0]]

    def run() -> None:
        empty = allocator(env, maker)
        storages: dict[int, torch.UntypedStorage] = {}  # by the buffers that they are copied from
        ended: list[HostBuffer] = []

        def restored(item: object) -> object:
            if not isinstance(item, TensorCopy):
                return item
            key = id(item.buffer)
            if key not in storages:
                data = empty(len(item.buffer.data))
                data.copy_(item.buffer.data, non_blocking=True)
                storages[key] = data.untyped_storage()
            made = torch.empty(0, dtype=item.dtype, device=device)
            return made.set_(storages[key], item.offset, item.size, item.stride)

        for source, target in pairs:
            copy = slots[source]
            assert isinstance(copy, HostCopy), f"{ins.node} finds no copy on the host"
            items = [restored(item) for item in copy.items]
            slots[target] = items if copy.several else items[0]
            if source in ending:
                ended += copy.buffers()
        for buffer in ended:
            buffer.users -= 1
            if not buffer.users:
                memory.give(buffer, device)

    return run


def fetch_state(env: Env, ins: Instr) -> Bound:
    """Bring the optimizer's state for a bucket to the device."""
    bucket, slots, target = ins.reads[0].owner, env.slots, env.at(ins.writes[0])
    maker = env.makers[ins.writes[0]]

    def run() -> None:
        slots[target] = env.state.bring(bucket, allocator(env, maker))

    return run


def offload_state(env: Env, ins: Instr) -> Bound:
    """Copy the optimizer's state for a bucket to the host."""
    bucket = ins.writes[0].owner

    def run() -> None:
        env.state.put_away(bucket)

    return run


def allocator(env: Env, maker: str) -> Callable[[int], Tensor]:
    """Return a function that allocates bytes on the device, of the memory of another stream.

    What that stream has freed may still be in use by work that it was given before, so the current stream
    waits for that work.
    """
    device = env.setup.device
    if not is_accelerator(device):
        return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    torch_module = module(device)
    current = torch_module.current_stream(device)
    owner = env.streams.get(maker, current)
    current.wait_stream(owner)

    def empty(nbytes: int) -> Tensor:
        with torch_module.stream(owner):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    return empty


def protect(env: Env, ins: Instr) -> Bound:
    """Copy a part of the state that the step begins with, where a launcher has given memory for it."""
    number = [other.node for other in env.plan.instrs if other.op == "protect"].index(ins.node) + 1

    def run() -> None:
        if env.vault is not None and env.vault.due(env.step):
            env.vault.copy(number, ins)

    return run


def mirror(env: Env, ins: Instr) -> Bound:
    """Give copies of the state to the next device of the group, and keep those of the one before."""
    group, device = env.group(ins), env.setup.device

    def run() -> None:
        vault = env.vault
        if vault is None or not vault.due(env.step):
            return
        wait_for_stream(device)  # the copies have arrived
        given = vault.outgoing(ins)
        totals = torch.empty(group.size, dtype=torch.int64, device=device)
        group.all_gather(torch.tensor([len(given)], device=device), totals)
        lengths: list[int] = totals.tolist()
        arrived = torch.empty(lengths[group.rank - 1], dtype=torch.uint8, pin_memory=is_accelerator(device))
        for begin in range(0, max(lengths), MIRRORED):
            piece = given[begin : begin + MIRRORED].to(device, non_blocking=True)
            place = arrived[begin : begin + MIRRORED]
            place.copy_(group.shift_uneven(piece, len(place)), non_blocking=True)
        wait_for_stream(device)
        vault.take(ins, arrived)

    return run
