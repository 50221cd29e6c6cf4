"""Shards a traced model, and cuts what one device of its groups computes into chunks and collectives."""

from collections.abc import Sequence
from dataclasses import replace

from piper.capture.shard.request import Request, shard_model
from piper.capture.trace.trace import Traced, cut_model
from piper.ir.chunk import Tags


def sharded(traced: Traced, requests: Sequence[Request]) -> Traced:
    """Return the model as one device of its groups computes it, cut into chunks and collectives."""
    sharded_model = shard_model(
        traced.recording, requests, traced.outline.parameters, traced.outline.batch, exact=traced.exact
    )
    model_cut = cut_model(sharded_model.recording)
    outline = replace(
        traced.outline,
        chunks=model_cut.chunks,
        loss=model_cut.loss,
        weight=model_cut.weight,
        metrics=model_cut.metrics,
        parameters=sharded_model.parameters,
        fields=sharded_model.batch,
        degrees=degrees_of(requests),
    )
    return replace(traced, outline=outline, pieces=model_cut.pieces, recording=sharded_model.recording)


def degrees_of(requests: Sequence[Request]) -> dict[Tags, int]:
    """Return how many devices share the same samples, for each region that is sharded."""
    degrees: dict[Tags, int] = {}
    for request in requests:
        for tags in request.regions:
            degrees[tags] = degrees.get(tags, 1) * request.degree
    return degrees
