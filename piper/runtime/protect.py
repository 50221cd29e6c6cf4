"""Copies of a device's state in memory that outlives its worker, and copies of them on other devices."""

from itertools import accumulate

import torch

from piper.plan.instr import Instr
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
        images = vault.outgoing(ins)
        lengths = torch.tensor([len(image) for image in images], dtype=torch.int64, device=device)
        sizes: list[int] = group.shift_uneven(lengths, vault.incoming(ins)).tolist()
        empty = torch.empty(0, dtype=torch.uint8)
        arrived = group.shift_uneven(torch.cat([empty, *images]).to(device, non_blocking=True), sum(sizes))
        ends = [*accumulate(sizes)]
        vault.take(ins, [arrived[end - size : end] for end, size in zip(ends, sizes, strict=True)])

    return run
