"""Checks that a step is the same work every time, so that it can be issued as one graph.

A graph is replayed as it was captured: the same kernels on the same memory, with the numbers that the host
gave them then. So nothing in a step may depend on what the host knows only while it runs, and no
instruction of it can be watched by itself.
"""

from collections.abc import Iterable, Mapping

from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.errors import ConfigError
from piper.ir.chunk import Chunk
from piper.ir.format import listed
from piper.plan.ops import BY_HOST, Routing
from piper.plan.plan import Plan
from piper.runtime.device_state import fuse, steps_fused
from piper.runtime.setup import Setup
from piper.runtime.trainers import empty_optimizer

RATES = ("lr", "initial_lr")  # of a group of parameters: read again in every step
COUNTED = "how many rows go to each device is known only while it runs; shard(..., capacity=) fixes it"


def check_static(setup: Setup, plans: Iterable[Plan], looks: Iterable[str] = (), *, by_host: bool) -> None:
    """Refuse graphs for steps that need the host.

    looks: what looks at single instructions. by_host: values of other devices come through the host.
    """
    chunks = {chunk.name: chunk for chunk in setup.outline.chunks}
    plans = [*plans]
    reasons = [] if setup.device.type == "cuda" else [f"device {setup.device.type} has no graphs"]
    reasons += [f"{look} looks at single instructions" for look in looks]
    if by_host and any(ins.comm is not None for plan in plans for ins in plan.instrs):
        reasons.append("values go from device to device through the host")
    for plan in plans:
        reasons += static_reasons(plan, chunks)
    reasons += trainer_reasons(setup, skips_steps="overflows" in setup.plans.sums)
    if reasons:
        raise not_static(reasons)


def not_static(reasons: Iterable[str]) -> ConfigError:
    """Return the error of a step that cannot be a graph."""
    return ConfigError(
        "a step of this job cannot be issued as one graph",
        by="graphs",
        facts={"why": "\n".join(dict.fromkeys(reasons))},
        hint="leave graphs out: every instruction is then issued by itself",
    )


def static_reasons(plan: Plan, chunks: Mapping[str, Chunk]) -> list[str]:
    """Return the reasons why a plan needs the host while it runs."""
    named = dict.fromkeys(ins.computes.chunk for ins in plan.instrs if ins.op == "compute")
    experts = [name for name in named if chunks[name].kind == "expert"]
    drawn = [name for name in named if chunks[name].random]
    operations = {ins.op for ins in plan.instrs}
    reasons = [f"{op}: {reason}" for op, reason in BY_HOST.items() if op in operations]
    counted = any(isinstance(ins.payload, Routing) and not ins.payload.block for ins in plan.instrs)
    if experts and counted:
        reasons.append(f"{listed(experts)}: {COUNTED}")
    elif singly := [name for name in experts if not grouped(chunks[name])]:
        reasons.append(f"{listed(singly)}: one product for all experts takes bf16 and widths that 8 divides")
    if drawn:
        reasons.append(f"{listed(drawn)}: the host sets the seed of random numbers again in every step")
    return reasons


def grouped(chunk: Chunk) -> bool:
    """Return whether one kernel multiplies the rows of all experts, so that only the device counts them."""
    specs = (*chunk.input_specs, *chunk.outputs, *chunk.saved)
    rows = [spec for spec in specs if spec.dynamic_rows and len(spec.shape) > 1]
    return all(spec.dtype == "bfloat16" and spec.shape[-1] % 8 == 0 for spec in rows)


def trainer_reasons(setup: Setup, *, skips_steps: bool = False) -> list[str]:
    """Return why a job's optimizer and scheduler need the host; both are tried without anything to train."""
    sizes = {p.name: p.shape for p in setup.outline.parameters if p.trainable}
    optimizer = empty_optimizer(setup.optimizer, sizes)
    if optimizer is None:
        return []
    scheduler = setup.scheduler(optimizer) if setup.scheduler else None
    fuse(optimizer)  # as on the device
    reasons = optimizer_reasons(optimizer)
    if skips_steps and not reasons and not steps_fused(optimizer):
        name = type(optimizer).__name__
        reasons.append(
            f"{name} cannot skip a step in which rows exceed their blocks: no fused kernel does it"
        )
    if scheduler is not None and not reasons and (moved := moved_by(scheduler, optimizer)):
        name = type(scheduler).__name__
        reasons.append(f"{name} changes {', '.join(moved)}: a graph follows the learning rate alone")
    return reasons


def optimizer_reasons(optimizer: Optimizer) -> list[str]:
    """Return why an optimizer's step cannot be captured: SGD has to be fused, others to be `capturable`."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD) and not group["fused"]:
            return [f"{name} reads its learning rate on the host unless it is fused"]
        if not isinstance(optimizer, SGD) and "capturable" not in group:
            return [f"{name} has no `capturable`: it computes on the host"]
        if group.get("differentiable"):
            return [f"{name} is differentiable: nothing of it is done in place"]
    return []


def moved_by(scheduler: LRScheduler, optimizer: Optimizer) -> list[str]:
    """Return the settings other than the learning rate that the first step of a scheduler changes."""
    before = settings(optimizer)
    optimizer.step()  # nothing happens without gradients, but a scheduler wants to come second
    scheduler.step()
    after = settings(optimizer)
    changed = (key for old, new in zip(before, after, strict=True) for key in new if old.get(key) != new[key])
    return [*dict.fromkeys(changed)]


def settings(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return the settings of each group of parameters that a captured graph keeps."""
    return [
        {key: value for key, value in group.items() if key != "params" and key not in RATES}
        for group in optimizer.param_groups
    ]
