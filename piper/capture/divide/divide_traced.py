"""Divides a traced model, and cuts what one device of its groups computes into chunks and collectives."""

from collections.abc import Sequence
from dataclasses import replace

from piper.capture.divide.request import Request, divide_model
from piper.capture.trace.trace import Traced, cut_model
from piper.ir.chunk import Tags


def divided(traced: Traced, requests: Sequence[Request]) -> Traced:
    """Return the model as one device of its groups computes it, cut into chunks and collectives."""
    divided_model = divide_model(
        traced.recording, requests, traced.outline.parameters, traced.outline.batch, exact=traced.exact
    )
    model_cut = cut_model(divided_model.recording)
    outline = replace(
        traced.outline,
        chunks=model_cut.chunks,
        loss=model_cut.loss,
        weight=model_cut.weight,
        metrics=model_cut.metrics,
        parameters=divided_model.parameters,
        fields=divided_model.batch,
        degrees=degrees_of(requests),
    )
    return replace(traced, outline=outline, pieces=model_cut.pieces, recording=divided_model.recording)


def degrees_of(requests: Sequence[Request]) -> dict[Tags, int]:
    """Return how many devices share the same samples, for each region that is divided."""
    degrees: dict[Tags, int] = {}
    for request in requests:
        for tags in request.regions:
            degrees[tags] = degrees.get(tags, 1) * request.degree
    return degrees
