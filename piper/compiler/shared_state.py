"""Fits other programs of a job, for evaluation or for batches of other sizes, to the state of the first."""

from dataclasses import replace
from typing import TYPE_CHECKING

from piper.errors import CaptureError
from piper.ir.chunk import CapturedModel, Parameter
from piper.ir.devices import show
from piper.ir.graph import Graph
from piper.job import Batch
from piper.runtime.uneven import COUNTS

if TYPE_CHECKING:
    from piper.compiler.build import Program


def reads_state_of(program: "Program", graph: Graph) -> Graph:
    """Return a forward that reads the parameters and buffers where a program that trains them has them."""
    check_same_devices(program, graph)
    return replace(graph, outline=with_parameters_of(program, graph.outline))


def with_parameters_of(program: "Program", outline: CapturedModel) -> CapturedModel:
    """Return an outline with the parameters of the trained program, sharded as that program shards them.

    Raise a CaptureError where a forward in eval mode reads a parameter that training does not hold.
    """
    trained_names = {piece.name for bucket in program.plans.buckets.values() for piece in bucket.pieces}
    for chunk in outline.chunks:
        for name in chunk.params:
            if name not in trained_names:
                raise CaptureError(
                    f"the model uses {name} in eval mode only",
                    by="model",
                    facts={"but": "evaluation reads the parameters of the training program"},
                    hint="make it a buffer, or let the forward use it in both modes",
                )
    parameters = {parameter.name: parameter for parameter in outline.parameters}
    trained = program.outline.parameters
    for parameter in trained:
        if parameter.name in trained_names:
            assert layout_of(parameter) == layout_of(parameters[parameter.name]), parameter.name
    return replace(outline, parameters=tuple(replace(p, trainable=False) for p in trained))


def check_same_devices(program: "Program", graph: Graph) -> None:
    """Refuse a buffer that training and evaluation use on different devices: it would have two values."""
    before, placed = (devices_of_chunks(each) for each in (program.graph, graph))
    trained: dict[str, set[int]] = {}
    for chunk in program.outline.chunks:
        for name in chunk.buffers:
            trained.setdefault(name, set()).update(before[chunk.name])
    for chunk in graph.outline.chunks:
        for name in chunk.buffers:
            if name in trained and not trained[name].issuperset(placed[chunk.name]):
                raise CaptureError(
                    f"the buffer {name} is on other devices in eval mode",
                    by="model",
                    facts={
                        "training": f"uses it on {show(tuple(sorted(trained[name])))}",
                        chunk.name: f"uses it on {show(tuple(sorted(placed[chunk.name])))}",
                    },
                    hint="place the regions that share the buffer on the same devices",
                )


def devices_of_chunks(graph: Graph) -> dict[str, set[int]]:
    """Return the devices that run some microbatch of each chunk."""
    devices: dict[str, set[int]] = {}
    for node in graph.nodes.values():
        devices.setdefault(node.chunk, set()).update(node.devices)
    return devices


def layout_of(parameter: Parameter) -> object:
    """Return the shape and type of a parameter, and how it lies on its devices."""
    placements = [(along.axis, along.degree, along.placement) for along in parameter.placements]
    return parameter.shape, parameter.dtype, placements


def check_same_state(program: "Program", other: "Program", batch: Batch) -> None:
    """Refuse a program that needs other parameters or buffers on some device than the first one."""
    here, there = program.outline.reached, other.outline.reached
    if (here, program.plans.buckets) != (there, other.plans.buckets):
        apart = sorted(here ^ there)
        which = (
            f"{apart[0]} is trained only for one of them" if apart else "their order or their chunks differ"
        )
        raise another_model(batch, "parameters", which)
    written = {name for chunk in other.outline.chunks for name in chunk.mutated}
    for device in other.plans.devices:
        missing = other.plans.of(device).buffers.keys() - program.plans.of(device).buffers.keys()
        if not missing.isdisjoint(written):
            raise another_model(batch, "buffers", f"{min(missing & written)} is written only for one of them")


def another_model(batch: Batch, what: str, which: str) -> CaptureError:
    """Return the error of a model that is not the same for batches of other sizes."""
    sizes = ", ".join(f"{name} {tuple(field.shape)}" for name, field in batch.items() if name != COUNTS)
    return CaptureError(
        f"the model has other {what} for batches of other sizes",
        by="model",
        facts={"batch": sizes, "why": which},
        hint="let the forward use the same layers whatever the sizes, or pad batches: Job(buckets=...)",
    )
