"""The samples that a chunk gets at a time, the code for each such slice, and what is sharded along axes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from piper.capture.autodiff.differentiate import Captured
from piper.capture.recordings import Capturing
from piper.capture.shard.axis_sharding import Request
from piper.capture.trace.sliced_losses import compared_samples, sums_over_samples, uneven_means
from piper.directives import Directive, Place, Replicate, Shard, ShardAxis, Split
from piper.errors import CaptureError, ScheduleError
from piper.ir.chunk import CapturedModel, Tags
from piper.ir.chunk_options import AxisPolicy, CodeOptions
from piper.ir.graph import Graph
from piper.ir.mesh import Axis, Mesh, mesh_of
from piper.lower.validate import parts_of


def likely_rows(strategy: list[Directive], samples: int) -> int:
    """Estimate the samples of one slice, as if all device sets had one size. A wrong guess costs a trace."""
    sizes = {len(d.devices) for d in strategy if isinstance(d, Place | Replicate | Shard | ShardAxis)}
    shared = math.prod(
        d.ways or len(d.devices) for d in {d.axis: d for d in strategy if isinstance(d, ShardAxis)}.values()
    )
    sizes = {max(1, size // shared) for size in sizes}
    parts = math.prod(d.parts for d in strategy if isinstance(d, Split) and isinstance(d.parts, int))
    return max(1, samples // max(1, max(sizes, default=1) * parts))


def samples_of_group(graph: Graph, samples: int) -> int:
    """Return the samples that each of the groups that train apart gets, or all of them."""
    groups = 1 if graph.averaging is None else len(graph.averaging.groups)
    if samples % groups:
        raise ScheduleError(
            f"{samples} samples do not divide into {groups} groups that train apart",
            by=next(each.title for each in graph.directives if each.verb == "average"),
            facts={"batch": f"{samples} samples", "groups": str(groups)},
            hint=f"use a batch that is a multiple of {groups}",
        )
    return samples // groups


def rows_of(graph: Graph, samples: int) -> dict[str, int]:
    """Return how many samples each chunk gets at a time."""
    nodes = {node.chunk: node for node in graph.nodes.values()}
    return {
        chunk: samples // (graph.mesh(node).slices * parts_of(graph, chunk)) for chunk, node in nodes.items()
    }


def capture_slices(
    graph: Graph, samples: int, capturing: Capturing, requests: Sequence[Request]
) -> tuple[dict[int, Captured], CapturedModel]:
    """Return the code for every slice size that chunks get, and an outline: each chunk as for its own."""
    rows = rows_of(graph, samples)
    compiled = capturing.recordings.compiled
    # Gradients that are reduced after each run of backwards are written where they are reduced from, and
    # those of several microbatches are added to the sum by the backward that computes them.
    options = {}
    for chunk in graph.outline.chunks:
        asked, expert = graph.options[chunk.name], chunk.kind == "expert"
        options[chunk.name] = CodeOptions(
            budget=asked.budget,
            products=asked.products,
            ways=asked.policy.ways if expert else 1,
            clones=asked.policy.clones if expert else 0,
            capacity=asked.policy.capacity if expert else None,
            flat=compiled and (asked.policy.zero >= 2 or parts_of(graph, chunk.name) > 1),
        )
    codes = {n: capturing.differentiated(n, requests, options) for n in sorted(set(rows.values()))}
    chunks = {size: {chunk.name: chunk for chunk in code.outline.chunks} for size, code in codes.items()}
    for size, by_name in chunks.items():
        assert [*by_name] == [*graph.chunks], f"the model has other chunks for slices of {size} samples"
    first = next(iter(codes.values())).outline
    return codes, replace(first, chunks=tuple(chunks[rows[name]][name] for name in graph.chunks))


def check_sums(graph: Graph, samples: int, capturing: Capturing) -> None:
    """Refuse a loss that adds up samples where the batch is sliced: the slices' mean is another loss."""
    rows = rows_of(graph, samples)[graph.outline.loss.chunk]
    if rows == samples:
        return
    few = capturing.traced(rows).recording
    if found := sums_over_samples(few, rows, lambda: capturing.traced(samples).recording, samples):
        slices = samples // rows
        raise CaptureError(
            "the loss is a sum over samples, and the slices of a batch are averaged",
            by="loss",
            facts={
                "sum": ", ".join(found),
                "slices": f"{slices} of {rows} samples each, whose mean is 1/{slices} of the sum",
            },
            hint="return (sum, weight), as piper.losses does, or a mean, such as sum / len(batch)",
        )


def sliced_warnings(graph: Graph, samples: int, capturing: Capturing) -> Iterator[str]:
    """Warn if the batch is sliced, and the mean over slices may be another loss than that of the batch."""
    rows = rows_of(graph, samples)[graph.outline.loss.chunk]
    if rows == samples:
        return
    few = capturing.traced(rows).recording
    if means := uneven_means(few, rows):
        yield (
            f"the loss is a mean that divides by a number of the data: {', '.join(means)}. Replicas and "
            "microbatches whose numbers differ then train on another loss than one device. Return (sum, "
            "weight): see piper.losses"
        )
    if found := compared_samples(few, rows, lambda: capturing.traced(samples).recording, samples):
        yield (
            f"the loss compares samples with each other: {', '.join(found)}. Replicas and microbatches "
            "compare those of their own slice alone, which is another loss than that of one device. "
            "Annotate the part that compares, and place it on one device, without microbatches"
        )


def requests_of(graph: Graph) -> list[Request]:
    """Return what each `shard` over an axis asks, for the regions where no later directive took its place."""
    sizes = {node.chunk: len(node.devices) for node in graph.nodes.values()}
    asked: dict[int, tuple[AxisPolicy, dict[Tags, Mesh]]] = {}  # by directive, with its regions
    for chunk in graph.outline.chunks:
        axes = graph.policy(chunk.name).axes
        mesh = mesh_of(
            tuple(range(sizes[chunk.name])), (Axis(name=held.axis, degree=held.degree) for held in axes)
        )
        for held in axes:
            asked.setdefault(held.origin, (held, {}))[1][chunk.tags] = mesh
    return [
        Request(
            **{each.name: getattr(held, each.name) for each in fields(held)},
            by=graph.directives[number].title,
            regions=regions,
        )
        for number, (held, regions) in sorted(asked.items())
    ]
