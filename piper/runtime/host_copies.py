"""Copies of values to memory of the host and back, and of the state to memory that outlives its worker."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from piper.plan.instr import Instr
from piper.plan.protected import MIRRORED
from piper.runtime.accelerator import is_accelerator, module, wait_for_stream
from piper.runtime.bucket_state import HostBuffer
from piper.runtime.context import Bound, Env, writing


@dataclass(slots=True)
class TensorCopy:
    """A tensor on the host, over a buffer with its whole storage."""

    buffer: HostBuffer
    tensor: Tensor


def offload(env: Env, ins: Instr) -> Bound:
    """Copy values to memory of the host, each storage once, or the state of a bucket."""
    if ins.writes[0].kind == "state":
        return env.state.away[ins.writes[0].owner].put_away
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
            buffers[storage._cdata].users += 1
            return TensorCopy(buffers[storage._cdata], over(buffers[storage._cdata].data, value))

        for source, target in pairs:
            slots[target] = each_in(slots[source], copied)

    return run


def fetch(env: Env, ins: Instr) -> Bound:
    """Bring values, or the state of a bucket, back from the host, into memory of the stream that reads it."""
    maker = env.makers[ins.writes[0]]
    if ins.reads[0].kind == "state":
        away = env.state.away[ins.reads[0].owner]
        return writing(env, ins, lambda state: away.bring(allocator(env, maker)))
    slots, device, memory = env.slots, env.setup.device, env.host_memory
    pairs = [(env.at(read), env.at(made)) for read, made in zip(ins.reads, ins.writes, strict=True)]
    ending = {env.at(slot) for slot in ins.frees}

    def run() -> None:
        empty = allocator(env, maker)
        brought: dict[int, Tensor] = {}  # bytes on the device, by the buffers that they are copied from
        ended: list[HostBuffer] = []

        def restored(item: object, ends: bool) -> object:
            if not isinstance(item, TensorCopy):
                return item
            buffer = item.buffer
            if id(buffer) not in brought:
                brought[id(buffer)] = empty(len(buffer.data)).copy_(buffer.data, non_blocking=True)
            if ends:
                ended.append(buffer)
            return over(brought[id(buffer)], item.tensor)

        for source, target in pairs:
            slots[target] = each_in(slots[source], partial(restored, ends=source in ending))
        for buffer in ended:
            buffer.users -= 1
            if not buffer.users:
                memory.give(buffer, device)

    return run


def each_in(value: object, act: Callable[[object], object]) -> object:
    """Return what an act makes of the value of a slot: of each item where it has several."""
    return [act(item) for item in value] if isinstance(value, list) else act(value)


def over(data: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that lies in these bytes as another one lies in its storage."""
    made = torch.empty(0, dtype=like.dtype, device=data.device)
    return made.set_(data.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def allocator(env: Env, maker: str) -> Callable[[int], Tensor]:
    """Return a function that allocates bytes on the device, of the memory of another stream."""
    # What that stream has freed may still be in use by work that it was given before, so the current stream
    # waits for that work.
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
