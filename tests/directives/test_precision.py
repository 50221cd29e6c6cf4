"""`precision`: what it makes of the graph, and what it refuses."""

import re
from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.directives import Directive, apply, order, precision, replicate, split
from piper.directives.json import parse_strategy
from piper.errors import ScheduleError
from piper.ir.chunk import CapturedModel
from piper.ir.graph import Graph, start
from piper.ir.select import at
from piper.lower.validate import validate
from tests.chain import chain


def with_products(outline: CapturedModel, *weights: tuple[str, ...]) -> CapturedModel:
    """A model whose first chunks multiply by these weights."""
    chunks = [replace(chunk, products=found) for chunk, found in zip(outline.chunks, weights, strict=False)]
    return replace(outline, chunks=(*chunks, *outline.chunks[len(chunks) :]))


DENSE = with_products(chain(2), ("a.weight",), ("b.weight",))


def after(*strategy: Directive, outline: CapturedModel = DENSE) -> Graph:
    return apply(start(outline), strategy)


def products(graph: Graph) -> dict[str, str]:
    return graph.chosen(lambda options: options.products)


def gathers(graph: Graph) -> dict[str, str]:
    return graph.chosen(lambda options: options.gather)


def said(*strategy: Directive, outline: CapturedModel = DENSE) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(apply(start(outline), strategy), samples=8)
    return re.sub(r"test_\w+\.py:\d+", "here", str(caught.value))


def test_regions_with_products_are_selected() -> None:
    halves = order([[at(PP=0, PASS="BI")], [at(PP=0, PASS="BW")]])
    graph = after(split(at(), parts=2), halves, precision(at(PP=0), "fp8"))
    assert products(graph) == {"PP=0": "fp8"}
    assert graph.nodes["BW[PP=0 MB=1]"].origin == (0, 1, 2) and graph.nodes["F[PP=1 MB=0]"].origin == (0,)
    assert products(after(precision(at(), "fp8"), outline=with_products(chain(2), ("a",)))) == {"PP=0": "fp8"}


def test_it_is_read_from_json() -> None:
    entry = '[{"op": "precision", "filter": {"PP": "*"}, "products": "fp8"}]'
    assert parse_strategy(entry) == [precision(at(PP="*"), "fp8")]
    graph = after(precision(at(PP=1), "fp8", gather="fp8"))
    assert products(graph) == gathers(graph) == {"PP=1": "fp8"}


def test_another_precision() -> None:
    assert said(precision(at(), "fp4")) == cleandoc("""
        precision #0 (here): products must be "fp8", got 'fp4'
          hint: Job(precision=...) is the precision of everything else
    """)


def test_another_precision_of_gathers() -> None:
    assert said(precision(at(), "fp8", gather="bf16")) == cleandoc("""
        precision #0 (here): gather must be "fp8", got 'bf16'
          hint: leave it out to gather weights in the job's precision
    """)


def test_nothing_is_gathered() -> None:
    kept = replicate(at(), [0, 1], zero=2)
    assert said(precision(at(PP=1), "fp8", gather="fp8"), kept) == cleandoc("""
        precision #0 (here): none of these regions gathers its parameters
          PP=1: zero=2
          hint: gather applies to replicate(..., zero=3); leave it out elsewhere
    """)


def test_the_last_one_says_how_weights_are_gathered() -> None:
    both = after(precision(at(), "fp8", gather="fp8"), precision(at(PP=0), "fp8"))
    assert set(gathers(both)) == {"PP=1"} and set(products(both)) == {"PP=0", "PP=1"}


def test_a_part_of_a_chunk() -> None:
    assert said(split(at(), parts=2), precision(at(PP=0, MB=0), "fp8")) == cleandoc("""
        precision #1 (here): the filter cuts through a chunk
          matched:  F[PP=0 MB=0]
          left out: F[PP=0 MB=1]
          hint:     select whole regions: leave PASS and axes of split out of the filter
    """)


def test_a_region_without_products() -> None:
    assert said(precision(at(PP=0), "fp8"), outline=chain(2)) == cleandoc("""
        precision #0 (here): nothing here multiplies by the weight of a linear layer
          asked:    at(PP=0)
          left out: attention, routers, the head
          hint:     select the regions of linear layers
    """)


def test_a_weight_of_two_regions_has_one_precision() -> None:
    tied = with_products(chain(2), ("a.weight",), ("b.weight", "a.weight"))
    assert said(precision(at(PP=1), "fp8"), outline=tied) == cleandoc("""
        precision #0 (here): the products of a.weight would have two precisions
          PP=0: the job's
          PP=1: fp8
          hint: select both regions, or neither
    """)
    assert products(after(precision(at(), "fp8"), outline=tied)) == {"PP=0": "fp8", "PP=1": "fp8"}


def test_something_else_than_a_filter() -> None:
    with pytest.raises(ScheduleError, match="'PP' is not a filter"):
        precision("PP", "fp8")  # type: ignore[arg-type]
