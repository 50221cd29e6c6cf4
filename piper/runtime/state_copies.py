"""Copies of a device's state in memory that outlives its worker, and copies of them on other devices."""

import torch

from piper.plan.instr import Instr
from piper.plan.protected import MIRRORED
from piper.runtime.accelerator import is_accelerator, wait_for_stream
from piper.runtime.context import Bound, Env


def protect(env: Env, ins: Instr) -> Bound:
    """Copy a part of the state that the step begins with, where a launcher has given memory for it."""
    number = [other.node for other in env.plan.instrs if other.op == "protect"].index(ins.node) + 1

    def run() -> None:
        if env.vault is not None and env.vault.due(env.step):
            env.vault.copy(number, ins)

    return run


def mirror(env: Env, ins: Instr) -> Bound:
    """Give copies of the state to the next device of the group, and keep those of the one before."""
    assert ins.comm is not None
    group, device = env.comms.group(ins.comm), env.setup.device

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
