"""Compiles the program that evaluates a job: the forward alone, under the job's own strategy."""

from dataclasses import replace
from typing import TYPE_CHECKING

from piper.capture.autodiff.differentiate import Captured
from piper.capture.divide.request import Request
from piper.compiler import MASTER_BYTES, Program, capturing_with, directed, new_recordings, placing
from piper.devices import show
from piper.errors import CaptureError
from piper.ir.chunk import CapturedModel, Parameter
from piper.ir.graph import Graph
from piper.job import Batch, strategy_of
from piper.lower.lower import lower
from piper.lower.state import Completed, Settings
from piper.slices import capture_slices, outline_by_slice

if TYPE_CHECKING:
    from piper.capture.trace.record import LossFn


def compile_evaluation(program: Program, batch: Batch) -> Program:
    """Compile the forward of a trained program for batches like `batch`, and prove its plans.

    The model is captured in eval mode, with the loss that evaluation runs. Backward nodes have nothing to do
    and are dropped by lowering, like those of a frozen region.
    """
    job = program.job
    loss: LossFn = job.loss if job.evaluate is None or job.evaluate.metrics is None else job.evaluate.metrics
    strategy = strategy_of(job)
    samples = len(next(iter(batch.values())))
    settings = Settings(
        samples=samples,
        state_bytes=program.work.settings.state_bytes,
        master_bytes=MASTER_BYTES[job.precision],
        buckets=program.plans.buckets,
    )
    compiled = program.cache is not None
    recordings = new_recordings(job, program.device, batch, loss, compiled=compiled, forward_only=True)
    capturing = capturing_with(batch, recordings, program.cache)
    codes: dict[int, Captured] = {}
    requests: list[Request] = []

    def completed(graph: Graph) -> Completed:
        graph = replace(graph, budgets={})  # there is no backward to recompute for
        codes.update(capture_slices(graph, samples, capturing, requests))
        outline = outline_by_slice(graph, samples, codes)
        check_buffers(program, graph, outline)
        return Completed(outline=with_parameters_of(program.outline, outline, program))

    with placing(job, strategy, batch):
        graph = directed(capturing, strategy, samples, requests).graph
        plans, work = lower(replace(graph, reruns={}), settings, completed)
    return replace(
        program, graph=work.graph, plans=plans, work=work, codes=codes, warnings=(), cache=program.cache
    )


def with_parameters_of(trained: CapturedModel, outline: CapturedModel, program: Program) -> CapturedModel:
    """Return an outline with the parameters of the trained program, divided as that program divides them.

    Raise a CaptureError where a forward in eval mode reads a parameter that training does not hold.
    """
    held = {piece.name for bucket in program.plans.buckets.values() for piece in bucket.pieces}
    for chunk in outline.chunks:
        for name in chunk.params:
            if name not in held:
                raise CaptureError(
                    f"the model uses {name} in eval mode only",
                    by="model",
                    facts={"but": "evaluation reads the parameters of the training program"},
                    hint="make it a buffer, or let the forward use it in both modes",
                )
    found = {parameter.name: parameter for parameter in outline.parameters}
    for parameter in trained.parameters:
        if parameter.name in held:
            assert layout_of(parameter) == layout_of(found[parameter.name]), parameter.name
    return replace(outline, parameters=tuple(replace(p, trainable=False) for p in trained.parameters))


def check_buffers(program: Program, graph: Graph, outline: CapturedModel) -> None:
    """Refuse a buffer that training and evaluation use on different devices: it would have two values."""
    before, placed = (devices_of_chunks(each) for each in (program.graph, graph))
    trained: dict[str, set[int]] = {}
    for chunk in program.outline.chunks:
        for name in chunk.buffers:
            trained.setdefault(name, set()).update(before[chunk.name])
    for chunk in outline.chunks:
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
    found: dict[str, set[int]] = {}
    for node in graph.nodes.values():
        found.setdefault(node.chunk, set()).update(node.devices)
    return found


def layout_of(parameter: Parameter) -> object:
    """Return the shape and type of a parameter, and how devices divide it."""
    slices = [(held.axis, held.degree, held.dim, held.blocks) for held in parameter.slices]
    return parameter.shape, parameter.dtype, slices
