"""`remat`: what it makes of the graph, its JSON form, and what it refuses."""

import re
from inspect import cleandoc

import pytest

from piper.directives import Directive, apply, order, remat, split
from piper.directives.json import parse_strategy
from piper.errors import ConfigError, ScheduleError
from piper.ir.chunk import CapturedModel, Chunk
from piper.ir.graph import Graph, start
from piper.ir.select import At, at
from tests.chain import chain

DENSE = chain(2)
EXPERTS = chain(2, experts=4)


def after(*strategy: Directive, outline: CapturedModel = DENSE) -> Graph:
    return apply(start(outline), strategy)


def budgets(graph: Graph) -> dict[str, float]:
    return graph.chosen(lambda options: options.budget)


def reruns(graph: Graph) -> dict[str, str]:
    return graph.chosen(lambda options: options.rerun)


def said(outline: CapturedModel, *strategy: Directive) -> str:
    with pytest.raises(ScheduleError) as caught:
        apply(start(outline), strategy)
    return re.sub(r"test_\w+\.py:\d+", "here", str(caught.value))


def test_a_later_budget_wins() -> None:
    graph = after(remat(at(), 0.5), remat(at(PP=1), 0))
    assert budgets(graph) == {"PP=0": 0.5, "PP=1": 0.0}
    assert graph.nodes["F[PP=0]"].origin == (0,)
    assert graph.nodes["B[PP=1]"].origin == (0, 1)


def test_parts_and_halves_share_their_chunk_s_budget() -> None:
    halves = order([[at(PP=0, PASS="BI")], [at(PP=0, PASS="BW")]])
    assert budgets(after(split(at(), parts=2), halves, remat(at(PP=0), 0.25))) == {"PP=0": 0.25}


def test_markers_have_nothing_to_recompute() -> None:
    names = {"PP=0", "PP=0 EP=0", "PP=0 #1"}
    assert set(budgets(after(remat(at(PP=0), 0.5), outline=EXPERTS))) == names & {
        chunk.name for chunk in EXPERTS.chunks
    }


def test_across_names_the_region_of_each_chunk() -> None:
    assert reruns(after(remat(at(PP=1), 0.5, across="PP"))) == {"PP=1": "PP=1"}
    graph = after(remat(at(), 0.5, "PP"), outline=EXPERTS)
    stage = {"PP=0": "PP=0", "PP=0 EP=0": "PP=0", "PP=0 #1": "PP=0"}
    assert reruns(graph) == stage | {"PP=1": "PP=1", "PP=1 EP=1": "PP=1", "PP=1 #1": "PP=1"}
    assert set(budgets(graph)) == set(reruns(graph))
    inner = after(remat(at(EP="*"), 0.5, across="EP"), outline=EXPERTS)
    assert reruns(inner) == {"PP=0 EP=0": "PP=0 EP=0", "PP=1 EP=1": "PP=1 EP=1"}
    assert reruns(after(remat(at(), 0.5))) == {}


def test_regions_are_those_of_the_whole_path() -> None:
    """An index may come again in another region around it."""
    chunks = [
        Chunk(name=f"PP={stage} LAYER={layer}", tags=(("PP", stage), ("LAYER", layer), ("X", 0)))
        for stage in range(2)
        for layer in range(2)
    ]
    graph = after(
        remat(at(), 0, across="LAYER"), outline=CapturedModel(chunks=tuple(chunks), loss=DENSE.loss)
    )
    assert reruns(graph) == {chunk.name: chunk.name for chunk in chunks}


def test_a_later_region_wins_and_none_ends_it() -> None:
    first = remat(at(), 0.5, across="PP")
    within = after(first, remat(at(EP=0), 1, across="EP"), outline=EXPERTS)
    assert reruns(within)["PP=0"] == "PP=0"
    assert reruns(within)["PP=0 EP=0"] == "PP=0 EP=0"
    ended = after(first, remat(at(PP=0), 0.5), outline=EXPERTS)
    assert set(reruns(ended)) == {"PP=1", "PP=1 EP=1", "PP=1 #1"}
    assert budgets(ended)["PP=0"] == 0.5
    assert reruns(after(first, remat(at(PP=0), 0.5), remat(at(PP=0), 1, "PP"))) == {
        "PP=1": "PP=1",
        "PP=0": "PP=0",
    }


def test_parts_and_halves_run_again_with_their_chunk() -> None:
    halves = order([[at(PP=0, PASS="BI")], [at(PP=0, PASS="BW")]])
    graph = after(split(at(), parts=2), halves, remat(at(PP=0), 0.25, across="PP"))
    assert reruns(graph) == {"PP=0": "PP=0"}
    assert all(node.origin[-1:] == (2,) for node in graph.nodes.values() if node.chunk == "PP=0")


def test_the_json_form() -> None:
    assert parse_strategy('[{"op": "remat", "filter": {"PP": 0}, "budget": 0.5}]') == [remat(at(PP=0), 0.5)]
    entry = '{"op": "remat", "filter": {"PP": "*"}, "budget": 1, "across": "PP"}'
    (read,) = parse_strategy(f"[{entry}]")
    assert read == remat(at(PP="*"), 1, across="PP") != remat(at(PP="*"), 1)


@pytest.mark.parametrize("budget", [-0.1, 1.5, True, "half", float("nan")])
def test_a_budget_out_of_range(budget: float) -> None:
    assert said(DENSE, remat(at(), budget)) == cleandoc(f"""
        remat #0 (here): budget must be a number from 0 to 1, got {budget!r}
          hint: 1 keeps all that is saved, 0.5 at most half of its bytes, 0 makes all of it again
    """)


def test_nothing_matched() -> None:
    assert said(DENSE, remat(at(PP=7), 0.5)) == cleandoc("""
        remat #0 (here): the filter matches no node
          asked: at(PP=7)
          known: PP=0..1
          hint:  use an index that exists; only an order that asks for halves makes a backward BI and BW
    """)


@pytest.mark.parametrize(
    ("asked", "matched", "left"),
    [
        (at(PP=0, MB=1), "F[PP=0 MB=1]", "F[PP=0 MB=0]"),
        (at(PP=0, PASS="F"), "F[PP=0 MB=0]", "B[PP=0 MB=0]"),
    ],
    ids=str,
)
def test_a_part_of_a_chunk(asked: At, matched: str, left: str) -> None:
    assert said(DENSE, split(at(), parts=2), remat(asked, 0.5)) == cleandoc(f"""
        remat #1 (here): the filter cuts through a chunk
          matched:  {matched}
          left out: {left}
          hint:     select whole regions: leave PASS and axes of split out of the filter
    """)


def test_only_markers() -> None:
    route = Chunk(name="EP=0 route", tags=(("EP", 0),), kind="route")
    outline = CapturedModel(chunks=(*DENSE.chunks, route), loss=DENSE.loss)
    assert said(outline, remat(at(EP=0), 0.5)) == cleandoc("""
        remat #0 (here): nothing here saves activations
          asked: at(EP=0)
          but:   EP=0 route only sends rows
          hint:  select the regions around it, or its experts
    """)


def test_no_filter() -> None:
    with pytest.raises(ScheduleError) as caught:
        remat("PP", 0.5)  # type: ignore[arg-type]
    assert re.sub(r"test_\w+\.py:\d+", "here", str(caught.value)) == cleandoc("""
        remat (here): 'PP' is not a filter
          hint: select nodes with at(): at(PP=0), or at() for all of them
    """)


def test_a_budget_in_json_that_is_no_number() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_strategy('[{"op": "remat", "filter": {}, "budget": "half"}]')
    assert str(caught.value) == cleandoc("""
        strategy[0]: 'budget' is "half"
          hint: 'budget' is a number from 0 to 1
    """)


@pytest.mark.parametrize("tag", [3, True, ("PP",), at(PP=0)], ids=str)
def test_a_region_that_is_no_tag(tag: object) -> None:
    with pytest.raises(ScheduleError) as caught:
        remat(at(), 0.5, across=tag)  # type: ignore[arg-type]
    assert re.sub(r"test_\w+\.py:\d+", "here", str(caught.value)) == cleandoc(f"""
        remat (here): across={tag!r} is not a tag
          hint: name a tag of the model: across="PP"
    """)


def test_a_region_that_the_model_does_not_have() -> None:
    assert said(DENSE, split(at(), parts=2), remat(at(PP=1), 0.5, across="LAYER")) == cleandoc("""
        remat #1 (here): PP=1 lies in no region 'LAYER'
          asked:   across='LAYER'
          regions: PP
          hint:    name a tag that the model is annotated with around all of them, or select fewer
    """)
    bare = CapturedModel(chunks=(Chunk(name="model", tags=()),), loss=DENSE.loss)
    assert said(bare, remat(at(), 0.5, across="PP")) == cleandoc("""
        remat #0 (here): model lies in no region 'PP'
          asked:   across='PP'
          regions: none
          hint:    name a tag that the model is annotated with around all of them, or select fewer
    """)


def test_a_chunk_outside_any_such_region() -> None:
    assert said(EXPERTS, remat(at(), 0.5, across="EP")) == cleandoc("""
        remat #0 (here): PP=0 lies in no region 'EP'
          asked:   across='EP'
          regions: PP, EP
          hint:    name a tag that the model is annotated with around all of them, or select fewer
    """)


def test_the_parts_of_a_split_are_no_region() -> None:
    assert said(DENSE, split(at(), parts=2), remat(at(), 0.5, across="MB")) == cleandoc("""
        remat #1 (here): PP=0 lies in no region 'MB'
          asked:   across='MB'
          regions: PP
          hint:    name a tag that the model is annotated with around all of them, or select fewer
    """)


@pytest.mark.parametrize("tag", ["3", '["PP"]', '"P P"', '""'])
def test_a_region_in_json_that_is_no_tag(tag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_strategy(f'[{{"op": "remat", "filter": {{}}, "budget": 1, "across": {tag}}}]')
    assert str(caught.value) == cleandoc(f"""
        strategy[0]: 'across' is {tag}
          hint: 'across' is a name in one word
    """)
