"""Refuses a program for batches of other sizes that does not fit the state of the first."""

from typing import TYPE_CHECKING

from piper.errors import CaptureError
from piper.job import Batch
from piper.plan.plan import Plans
from piper.runtime.uneven import COUNTS

if TYPE_CHECKING:
    from piper.compiler.build import Program


def check_same_state(program: "Program", other: "Program", batch: Batch) -> None:
    """Refuse a program that needs other parameters or buffers on some device than the first one."""
    check_parameters(program, other, batch)
    check_buffers(program, other, batch)


def check_parameters(program: "Program", other: "Program", batch: Batch) -> None:
    """Refuse a program that trains other parameters, or holds them in another way."""
    here, there = program.outline.reached, other.outline.reached
    if (here, program.plans.buckets) == (there, other.plans.buckets):
        return
    apart = sorted(here ^ there)
    which = f"{apart[0]} is trained only for one of them" if apart else "their order or their chunks differ"
    raise another_model(batch, "parameters", which)


def check_buffers(program: "Program", other: "Program", batch: Batch) -> None:
    """Refuse a program that writes a buffer on a device that does not hold it otherwise."""
    written = {name for chunk in other.outline.chunks for name in chunk.mutated}
    for device, names in buffers_by_device(other.plans).items():
        here = buffers_by_device(program.plans)[device]
        if missing := sorted((names - here) & written):
            raise another_model(batch, "buffers", f"{missing[0]} is written only for one of them")


def buffers_by_device(plans: Plans) -> dict[int, set[str]]:
    """Return the names of the buffers that each device holds."""
    return {
        device: {slot.owner for slot in plan.residents if slot.kind == "buffer"}
        for plan in plans
        for device in plan.devices
    }


def another_model(batch: Batch, what: str, which: str) -> CaptureError:
    """Return the error of a model that is not the same for batches of other sizes."""
    sizes = ", ".join(f"{name} {tuple(field.shape)}" for name, field in batch.items() if name != COUNTS)
    return CaptureError(
        f"the model has other {what} for batches of other sizes",
        by="model",
        facts={"batch": sizes, "why": which},
        hint="let the forward use the same layers whatever the sizes, or pad batches: Job(buckets=...)",
    )
