"""The graph: what it starts as, and what filters find in it."""

from dataclasses import replace

from piper.directives import apply, order, place, replicate, split
from piper.ir.chunk import Output
from piper.ir.graph import Graph, has_backward, start
from piper.ir.select import At, at
from tests.chain import chain


def names(graph: Graph, what: At) -> list[str]:
    return [node.name for node in graph.select(what)]


def test_a_graph_starts_as_one_step_on_one_device() -> None:
    graph = start(chain(2))
    assert list(graph.nodes) == ["F[PP=0]", "F[PP=1]", "B[PP=1]", "B[PP=0]"]
    assert graph.devices() == ()


def test_a_chunk_without_a_backward_has_no_node_for_it() -> None:
    outline = chain(2)
    first = outline.chunks[0]
    forward_only = replace(first, phases={"F": first.phases["F"]})
    graph = start(replace(outline, chunks=(forward_only, outline.chunks[1])))
    assert list(graph.nodes) == ["F[PP=0]", "F[PP=1]", "B[PP=1]"]
    assert not has_backward(forward_only)


def test_a_chunk_whose_phases_are_not_known_yet_has_both() -> None:
    outline = chain(1)
    graph = start(replace(outline, chunks=tuple(replace(chunk, phases={}) for chunk in outline.chunks)))
    assert list(graph.nodes) == ["F[PP=0]", "B[PP=0]"]


def test_filters_by_tag() -> None:
    graph = start(chain(2, experts=4))
    region = ["PP=1 EP=1 route", "PP=1 EP=1", "PP=1 EP=1 unroute"]
    assert names(graph, at(EP=1, PASS="F")) == [f"F[{chunk}]" for chunk in region]
    assert names(graph, at(PP=1, EP=None, PASS="F")) == ["F[PP=1]", "F[PP=1 #1]"]
    assert names(graph, at(PP="*", EP=0, PASS="F")) == names(graph, at(EP=0, PASS="F"))
    assert names(graph, at(PP=0, EP=1)) == []


def test_filters_by_part_and_pass() -> None:
    graph = apply(start(chain(1)), [split(at(), parts=2), order([[at(MB=1, PASS="BI")]])])
    assert names(graph, at(MB=0)) == ["F[PP=0 MB=0]", "B[PP=0 MB=0]"]
    assert names(graph, at(MB=1)) == ["F[PP=0 MB=1]", "BI[PP=0 MB=1]", "BW[PP=0 MB=1]"]
    assert names(graph, at(MB=1, PASS="B")) == ["BI[PP=0 MB=1]", "BW[PP=0 MB=1]"]
    assert names(graph, at(MB="*", PASS="BW")) == ["BW[PP=0 MB=1]"]


def test_a_node_knows_who_made_it_and_who_placed_it() -> None:
    graph = apply(start(chain(1)), [replicate(at(), [0, 1]), place(at(PASS="F"), [0]), order([[at()]])])
    assert graph.nodes["F[PP=0]"].origin == (0, 1, 2)
    assert graph.placed_by(graph.nodes["F[PP=0]"]) == graph.directives[1].title
    assert graph.placed_by(graph.nodes["B[PP=0]"]) == graph.directives[0].title
    assert graph.directives[1].title.startswith("place #1 (test_graph.py:")
    bare = apply(start(chain(1)), [order([[at()]])])
    assert bare.placed_by(bare.nodes["F[PP=0]"]) == "strategy"


def test_a_chain_lists_chunks_after_what_they_read() -> None:
    for outline in (chain(3), chain(2, experts=2, tied=True), chain(1)):
        seen: set[str] = set()
        for chunk in outline.chunks:
            for source in chunk.sources:
                assert source.chunk in seen
            seen.add(chunk.name)
        assert outline.loss == Output(chunk=outline.chunks[-1].name, index=0)


def test_a_chain_shares_a_parameter_when_tied() -> None:
    users = [chunk.name for chunk in chain(3, tied=True).chunks if "shared" in chunk.params]
    assert users == ["PP=0", "PP=2"]
    assert chain(1, tied=True).chunks[0].params == ("shared", "stages.0.0")
