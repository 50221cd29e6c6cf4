"""What directives refuse, each message whole."""

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Any, cast

import pytest

from piper.directives import Directive, apply, order, place, replicate, shard, split
from piper.errors import ScheduleError
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.ir.select import At, at
from tests.chain import chain

DENSE = chain(2)
EXPERTS = chain(2, experts=4)


def said(outline: CapturedModel, *strategy: Directive) -> str:
    """The error of a strategy, with every source line called `here`."""
    with pytest.raises(ScheduleError) as caught:
        apply(start(outline), strategy)
    return re.sub(r"test_\w+\.py:\d+", "here", str(caught.value))


def refused(make: Callable[[], object]) -> str:
    """The error of a directive that cannot even be written."""
    with pytest.raises(ScheduleError) as caught:
        make()
    return re.sub(r"test_\w+\.py:\d+", "here", str(caught.value))


def test_an_unknown_tag_close_to_one_that_exists() -> None:
    assert said(DENSE, place(at(pp=0), [0])) == cleandoc("""
        place #0 (here): there is no tag 'pp'
          asked: at(pp=0)
          tags:  PP
          hint:  did you mean 'PP'?
    """)


def test_an_unknown_tag_far_from_all() -> None:
    assert said(DENSE, place(at(), [0]), order([[at(MB=0)]])) == cleandoc("""
        order #1 (here): there is no tag 'MB'
          asked: at(MB=0)
          tags:  PP
          hint:  annotate the model with it, or split along it first
    """)


def test_an_unknown_tag_of_a_backward_in_halves() -> None:
    assert said(DENSE, order([[at(XX=0, PASS="BI")]])) == cleandoc("""
        order #0 (here): there is no tag 'XX'
          asked: at(XX=0, PASS="BI")
          tags:  PP
          hint:  annotate the model with it, or split along it first
    """)


def test_a_tag_in_a_model_without_any() -> None:
    bare = CapturedModel(chunks=(), loss=DENSE.loss)
    assert said(bare, place(at(PP=0), [0])) == cleandoc("""
        place #0 (here): there is no tag 'PP'
          asked: at(PP=0)
          tags:  none: the model has no annotations
          hint:  annotate the model with it, or split along it first
    """)


def test_a_filter_that_matches_nothing() -> None:
    assert said(EXPERTS, replicate(at(PP=2, EP=None), [0])) == cleandoc("""
        replicate #0 (here): the filter matches no node
          asked: at(EP=None, PP=2)
          known: EP=0..1, PP=0..1
          hint:  use an index that exists; only an order that asks for halves makes a backward BI and BW
    """)


def test_a_filter_in_an_order_that_matches_nothing() -> None:
    assert said(DENSE, split(at(), parts=1), order([[at(MB=1, PASS="BW")]])) == cleandoc("""
        order #1 (here): the filter matches no node
          asked: at(MB=1, PASS="BW")
          known: MB=0, PP=0..1
          hint:  use an index that exists; only an order that asks for halves makes a backward BI and BW
    """)


@pytest.mark.parametrize("make", [place, replicate, shard])
def test_no_devices(make: Callable[..., Directive]) -> None:
    assert said(EXPERTS, make(at(EP="*"), [])) == cleandoc(f"""
        {make.__name__.lower()} #0 (here): no devices are given
          asked: devices=[]
          hint:  devices are whole numbers from 0, at least one, each once: the i-th takes the i-th slice
    """)


@pytest.mark.parametrize("bad", [-1, 1.0, "0", None, True])
def test_a_bad_device(bad: int) -> None:
    assert said(DENSE, place(at(), [0, bad])) == cleandoc(f"""
        place #0 (here): {bad!r} is not a device
          asked: devices=[0, {bad!r}]
          hint:  devices are whole numbers from 0, at least one, each once: the i-th takes the i-th slice
    """)


def test_a_device_given_twice() -> None:
    assert said(DENSE, replicate(at(), [0, 1, 0])) == cleandoc("""
        replicate #0 (here): device 0 is given twice
          asked: devices=[0, 1, 0]
          hint:  devices are whole numbers from 0, at least one, each once: the i-th takes the i-th slice
    """)


@pytest.mark.parametrize("zero", [4, -1, "3", 1.0, True, None])
def test_a_bad_zero_level(zero: int) -> None:
    assert said(DENSE, replicate(at(), [0], zero=zero)) == cleandoc(f"""
        replicate #0 (here): zero must be 0, 1, 2 or 3, got {zero!r}
          hint: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too
    """)


def test_a_type_that_gradients_do_not_travel_in() -> None:
    assert said(DENSE, replicate(at(), [0], reduce="fp16")) == cleandoc("""
        replicate #0 (here): reduce must be "fp32" or "bf16", got 'fp16'
          hint: gradients travel in it; "bf16" is half the bytes
    """)


@pytest.mark.parametrize(
    ("given", "names", "kind"),
    [
        ({"axis": "TP", "weights": {"*": 0}, "clones": 1}, "clones", "along an axis"),
        ({"batch": {"x": 1}, "capacity": 1.5, "clones": 2}, "clones and capacity", "along an axis"),
        ({"between": 1}, "between", "by expert"),
        ({"attention": "ring", "balance": "zigzag"}, "attention and balance", "by expert"),
    ],
)
def test_an_argument_of_the_other_kind_of_shard(given: dict[str, Any], names: str, kind: str) -> None:
    with pytest.raises(ScheduleError, match=f"{names} would be ignored: this shards {kind}"):
        shard(at(), [0, 1], **given)


@pytest.mark.parametrize("size", [0, -1.5, float("nan"), "25", True])
def test_a_bad_bucket(size: float) -> None:
    assert said(DENSE, replicate(at(), [0], bucket_mb=size)) == cleandoc(f"""
        replicate #0 (here): bucket_mb must be a size in MiB above 0, got {size!r}
          hint: leave it out for one bucket per chunk
    """)


def test_shard_on_a_region_without_experts() -> None:
    assert said(DENSE, shard(at(PP=1), [0, 1])) == cleandoc("""
        shard #0 (here): nothing here can be sharded by expert
          asked: at(PP=1)
          but:   PP=1 has no route ... unroute
          hint:  call piper.route and piper.unroute inside the region, and select it by its tag
    """)


@pytest.mark.parametrize("ways", [3, 0, "2", 2.0, True])
def test_ways_that_do_not_divide_the_devices(ways: int) -> None:
    assert said(EXPERTS, shard(at(EP=0), [0, 1, 2, 3], ways=ways)) == cleandoc(f"""
        shard #0 (here): 4 devices cannot form groups of {ways!r}
          asked: ways={ways!r}, devices=[0, 1, 2, 3]
          hint:  ways is the size of one expert group: a divisor of the number of devices
    """)


def test_experts_that_do_not_divide() -> None:
    assert said(EXPERTS, shard(at(EP="*"), [0, 1, 2])) == cleandoc("""
        shard #0 (here): 4 experts do not divide by 3
          region: PP=0 EP=0 route
          asked:  ways=3
          hint:   choose ways among the divisors of the number of experts
    """)


@pytest.mark.parametrize("parts", [0, -2, 1.5, "4", True, None])
def test_a_bad_number_of_parts(parts: int) -> None:
    assert said(DENSE, split(at(), parts=parts)) == cleandoc(f"""
        split #0 (here): parts must be a whole number from 1, got {parts!r}
          hint: it is the number of microbatches
    """)


@pytest.mark.parametrize("axis", ["PP", "MB", "PASS", "two words", "", 3])
def test_an_axis_that_cannot_name_parts(axis: str) -> None:
    assert said(DENSE, split(at(), parts=2), split(at(), axis=axis, parts=2)) == cleandoc(f"""
        split #1 (here): {axis!r} cannot name the parts
          taken: MB, PASS, PP
          hint:  choose a word that no annotation and no earlier split uses
    """)


def test_a_split_that_cuts_through_a_chunk() -> None:
    assert said(DENSE, split(at(PASS="F"), parts=2)) == cleandoc("""
        split #0 (here): the filter cuts through a chunk
          matched:  F[PP=0]
          left out: B[PP=1]
          hint:     select whole regions: leave PASS and axes of split out of the filter
    """)


def test_a_split_next_to_something_unsplit() -> None:
    assert said(DENSE, split(at(PP=1), parts=2)) == cleandoc("""
        split #0 (here): a split part would meet an unsplit value
          split:   PP=1
          unsplit: PP=0
          hint:    split everything that is connected: split(at(), ...)
    """)
    assert said(DENSE, split(at(PP=0), parts=2)) == cleandoc("""
        split #0 (here): a split part would meet an unsplit value
          split:   PP=0
          unsplit: PP=1
          hint:    split everything that is connected: split(at(), ...)
    """)


def test_an_empty_order() -> None:
    assert said(DENSE, order([])) == cleandoc("""
        order #0 (here): an order needs groups, each with at least one filter
          groups: none
          hint:   order([[at(...)], [at(...), at(...)]])
    """)
    assert said(DENSE, order([[at(PP=0)], []])) == cleandoc("""
        order #0 (here): an order needs groups, each with at least one filter
          groups: 1, 0
          hint:   order([[at(...)], [at(...), at(...)]])
    """)


def test_a_node_in_two_groups() -> None:
    assert said(DENSE, order([[at(PP=0, PASS="B")], [at(PP=1)], [at(PP=0)]])) == cleandoc("""
        order #0 (here): a node is in two groups
          node:   B[PP=0]
          groups: 0 and 2
          hint:   name each node once: it runs once a step
    """)


def test_a_strategy_with_a_schedule_inside_it() -> None:
    schedule = [order([[at()]])]
    assert said(DENSE, place(at(), [0]), cast(Directive, schedule)) == cleandoc("""
        strategy[1]: list is not a directive
          hint: a strategy is a flat list of directives: add a schedule with +, not inside the list
    """)


@pytest.mark.parametrize("make", [place, replicate, shard])
@pytest.mark.parametrize("devices", ["0", {0, 1}, None, 1.5])
def test_devices_that_are_no_list(make: Callable[..., Directive], devices: object) -> None:
    assert refused(lambda: make(at(), devices)) == cleandoc(f"""
        {make.__name__.lower()} (here): devices={devices!r} is not a list
          hint: list the devices in order: devices=[0, 1]
    """)


@pytest.mark.parametrize("make", [place, replicate, shard, split])
def test_a_filter_that_is_none(make: Callable[..., Directive]) -> None:
    assert refused(lambda: make("PP=0", [0])) == cleandoc(f"""
        {make.__name__.lower()} (here): 'PP=0' is not a filter
          hint: select nodes with at(): at(PP=0), or at() for all of them
    """)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (place, "stream"),
        (shard, "stream"),
        (replicate, "reduce_stream"),
        (replicate, "gather_stream"),
    ],
)
@pytest.mark.parametrize("name", ["two words", "", 3])
def test_a_stream_that_is_no_name(make: Callable[..., Directive], key: str, name: object) -> None:
    assert refused(lambda: make(at(), [0], **{key: name})) == cleandoc(f"""
        {make.__name__.lower()} (here): {key}={name!r} is not a name
          hint: name the stream in one word: {key}="pp"
    """)


@pytest.mark.parametrize("groups", [at(PP=0), "PP", None, {"PP": 0}])
def test_an_order_of_no_groups(groups: list[At]) -> None:
    assert refused(lambda: order(groups)) == cleandoc(f"""
        order (here): {groups!r} is not a list of groups
          hint: order([[at(...)], [at(...), at(...)]])
    """)


@pytest.mark.parametrize("group", ["PP", 3, {"PP": 0}])
def test_a_group_of_no_filters(group: list[At]) -> None:
    assert refused(lambda: order([[at()], group])) == cleandoc(f"""
        order (here): {group!r} is not a group of filters
          hint: order([[at(...)], [at(...), at(...)]])
    """)


def test_a_member_that_is_no_filter() -> None:
    assert refused(lambda: order([[at(), cast(At, "PP=0")]])) == cleandoc("""
        order (here): 'PP=0' is not a filter
          hint: select nodes with at(): at(PP=0), or at() for all of them
    """)
