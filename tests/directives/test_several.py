"""Filters that select several indices, in every directive, and directives as Python shows them."""

from inspect import cleandoc

import pytest

from piper import ScheduleError, at, order, place, remat, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.graph import Graph, start
from piper.ir.ids import Pass
from piper.schedules.grid import Stage
from tests.chain import chain


def after(*strategy: Directive, experts: int = 0) -> Graph:
    return apply(start(chain(4, experts=experts)), strategy)


def test_place_and_replicate_take_several_indices() -> None:
    graph = after(place(at(PP=range(0, 3)), [0]), replicate(at(PP=[2, 3]), [1, 2], zero=2))
    assert {name: node.devices for name, node in graph.nodes.items() if name[0] == "F"} == {
        "F[PP=0]": (0,), "F[PP=1]": (0,), "F[PP=2]": (1, 2), "F[PP=3]": (1, 2),
    }  # fmt: skip
    assert [graph.policy(f"PP={index}").zero for index in range(4)] == [0, 0, 2, 2]


def test_several_indices_of_two_tags_select_what_has_both() -> None:
    graph = after(split(at(), parts=3))
    found = graph.select(at(PP=[0, 3], MB=range(1, 3), PASS="F"))
    assert [node.name for node in found] == ["F[PP=0 MB=1]", "F[PP=0 MB=2]", "F[PP=3 MB=1]", "F[PP=3 MB=2]"]


def test_several_indices_go_together_with_any_and_without() -> None:
    graph = after(experts=2)
    inside = graph.select(at(PP=[0, 1], EP="*", PASS="F"))
    outside = graph.select(at(PP=[0, 1], EP=None, PASS="F"))
    assert [node.chunk for node in inside] == [
        "PP=0 EP=0 route", "PP=0 EP=0", "PP=0 EP=0 unroute",
        "PP=1 EP=1 route", "PP=1 EP=1", "PP=1 EP=1 unroute",
    ]  # fmt: skip
    assert {node.chunk.partition(" ")[0] for node in outside} == {"PP=0", "PP=1"}
    assert not {node.chunk for node in inside} & {node.chunk for node in outside}


def test_shard_and_remat_take_several_indices() -> None:
    graph = after(shard(at(PP=range(0, 2)), [0, 1]), remat(at(PP=[0, 3]), budget=0.5), experts=4)
    assert [graph.policy(f"PP={index} EP={index}").ways for index in range(4)] == [2, 2, 1, 1]
    assert {name.partition(" ")[0] for name in graph.chosen(lambda options: options.budget)} == {
        "PP=0",
        "PP=3",
    }


def test_an_order_has_all_of_them_in_one_group() -> None:
    graph = after(order([[at(PP=range(0, 2), PASS="F")], [at(PP=[2, 3], PASS="F")]]))
    (ordering,) = graph.orderings
    assert ordering.groups == (
        (Pass(chunk="PP=0", phase="F", part=()), Pass(chunk="PP=1", phase="F", part=())),
        (Pass(chunk="PP=2", phase="F", part=()), Pass(chunk="PP=3", phase="F", part=())),
    )


def test_an_order_splits_the_backwards_of_all_of_them() -> None:
    graph = after(order([[at(PP=range(0, 3), PASS="BI")]]))
    assert [name for name in graph.nodes if name[0] == "B"] == [
        "B[PP=3]", "BI[PP=2]", "BW[PP=2]", "BI[PP=1]", "BW[PP=1]", "BI[PP=0]", "BW[PP=0]",
    ]  # fmt: skip


@pytest.mark.parametrize("directive", [place(at(PP=range(2, 6)), [0]), order([at(PP=[0, 4], PASS="F")])])
def test_an_index_of_several_that_does_not_exist(directive: Directive) -> None:
    with pytest.raises(ScheduleError) as caught:
        after(directive)
    where = directive.source
    asked = "at(PP=range(2, 6))" if directive.verb == "place" else 'at(PP=[0, 4], PASS="F")'
    assert str(caught.value) == cleandoc(f"""
        {directive.verb} #0 ({where}): there is no PP=4
          asked: {asked}
          known: PP=0..3
          hint:  select only indices that exist
    """)


SHOWN = [
    (place(at(PP=0), 3, stream="pp"), 'place(at(PP=0), devices=[3], stream="pp")'),
    (replicate(at(LAYER=range(0, 4)), range(8), zero=3), "replicate(at(LAYER=range(0, 4)), devices=range(0, 8), zero=3)"),
    (replicate(at(), [2, 1], bucket_mb=25), "replicate(at(), devices=[2, 1], bucket_mb=25)"),
    (shard(at(EP="*"), [0, 1, 3], ways=1), 'shard(at(EP="*"), devices=[0, 1, 3], ways=1)'),
    (split(at(), parts=4), "split(at(), parts=4)"),
    (split(at(), axis="M", parts=4), 'split(at(), axis="M", parts=4)'),
    (order([[at(PP=0)], [at(PP=1), at(PP=2, PASS="F")]]), 'order([at(PP=0), [at(PP=1), at(PP=2, PASS="F")]])'),
    (remat(at(), 0.5, across="PP"), 'remat(at(), budget=0.5, across="PP")'),
]  # fmt: skip


@pytest.mark.parametrize(("directive", "shown"), SHOWN, ids=[shown for _, shown in SHOWN])
def test_a_directive_is_shown_as_the_call_that_makes_it(directive: Directive, shown: str) -> None:
    assert repr(directive) == shown
    assert eval(shown) == directive


def test_a_schedule_over_filters() -> None:
    stages = [at(LAYER=range(0, 3)), at(LAYER=[3, 4])]
    assert schedules.one_f_one_b(2, 2, stage=stages) == [
        order([
            [at(LAYER=range(0, 3), MB=0, PASS="F")],
            [at(LAYER=range(0, 3), MB=1, PASS="F")],
            [at(LAYER=range(0, 3), MB=0, PASS="B")],
            [at(LAYER=range(0, 3), MB=1, PASS="B")],
        ]),
        order([
            [at(LAYER=[3, 4], MB=0, PASS="F")],
            [at(LAYER=[3, 4], MB=0, PASS="B")],
            [at(LAYER=[3, 4], MB=1, PASS="F")],
            [at(LAYER=[3, 4], MB=1, PASS="B")],
        ]),
    ]  # fmt: skip


def test_every_builder_takes_filters() -> None:
    four = [at(LAYER=index) for index in range(4)]
    built = [
        schedules.gpipe(4, 4, stage=four),
        schedules.one_f_one_b(4, 4, stage=four),
        schedules.zero_bubble(4, 4, stage=four),
        schedules.interleaved_1f1b(2, 4, stage=four),
        schedules.interleaved_zero_bubble(2, 4, stage=four),
        schedules.zbv(2, 4, stage=four),
        schedules.dualpipe_v(2, 4, stage=four),
    ]
    by_tag = [
        schedules.gpipe(4, 4, stage="LAYER"),
        schedules.one_f_one_b(4, 4, stage="LAYER"),
        schedules.zero_bubble(4, 4, stage="LAYER"),
        schedules.interleaved_1f1b(2, 4, stage="LAYER"),
        schedules.interleaved_zero_bubble(2, 4, stage="LAYER"),
        schedules.zbv(2, 4, stage="LAYER"),
        schedules.dualpipe_v(2, 4, stage="LAYER"),
    ]
    assert built == by_tag


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            [at(LAYER=0)],
            """
            orders: 2 stages, and filters for 1
              filters: at(LAYER=0)
              hint:    give stage one filter for each stage, or the tag that numbers them
            """,
        ),
        (
            [at(LAYER=0), at(LAYER=1, PASS="F")],
            """
            orders: the filter of a stage names PASS
              filter: at(LAYER=1, PASS="F")
              hint:   leave PASS and MB out: the schedule gives both
            """,
        ),
        (
            [at(LAYER=0, MB=0), at(LAYER=1)],
            """
            orders: the filter of a stage names MB
              filter: at(LAYER=0, MB=0)
              hint:   leave PASS and MB out: the schedule gives both
            """,
        ),
        (
            [range(0, 2), range(2, 4)],
            """
            orders: stage=[range(0, 2), range(2, 4)] is neither a tag nor a list of filters
              hint: give the tag that numbers the stages, stage="PP", or a filter for each: stage=[at(LAYER=range(0, 4)), at(LAYER=range(4, 8))]
            """,
        ),
        (
            at(LAYER=0),
            """
            orders: stage=at(LAYER=0) is neither a tag nor a list of filters
              hint: give the tag that numbers the stages, stage="PP", or a filter for each: stage=[at(LAYER=range(0, 4)), at(LAYER=range(4, 8))]
            """,
        ),
    ],
)
def test_filters_that_are_no_stages(stage: Stage, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.one_f_one_b(2, 2, stage=stage)
    assert str(caught.value) == cleandoc(message)
