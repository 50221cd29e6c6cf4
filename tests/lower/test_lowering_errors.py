"""What lowering refuses, each message whole."""

import re
from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.directives import Directive, apply, order, place, remat, replicate, shard, split
from piper.errors import ScheduleError
from piper.ir.chunk import CapturedModel, Output
from piper.ir.graph import start
from piper.ir.select import at
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.outlines import (
    EXPERTS,
    HIDDEN,
    ROWS,
    SCALAR,
    WIDTH,
    Drawing,
    X,
    Y,
    fitted,
    mixture,
    normed,
    pp,
)

DENSE = chain(3, rows=ROWS)


def said(outline: CapturedModel, *strategy: Directive, samples: int | None = None) -> str:
    """The error of a strategy, with every source line called `here`."""
    graph = apply(start(outline), strategy)
    with pytest.raises(ScheduleError) as caught:
        lower(graph, outline=fitted(graph), samples=samples)
    return re.sub(r"test_\w+\.py:\d+", "here", str(caught.value))


def test_a_node_left_unplaced() -> None:
    assert said(DENSE, place(at(PP=1), [0]), split(at(), parts=2)) == cleandoc("""
        strategy: F[PP=0 MB=0] is placed on no device
          unplaced: F[PP=0 MB=0], F[PP=0 MB=1], F[PP=2 MB=0], and 5 more
          placed:   F[PP=1 MB=0] on 0
          hint:     place every region, or none for a single device
    """)
    assert said(DENSE, place(at(PASS="F"), [0]), place(at(PP=0), [0]), place(at(PP=1), [0])) == cleandoc("""
        strategy: B[PP=2] is placed on no device
          unplaced: B[PP=2]
          placed:   F[PP=0] on 0
          hint:     place every region, or none for a single device
    """)


def test_a_chunk_on_two_sets() -> None:
    strategy = [place(at(), [0]), place(at(PP=1, PASS="B"), [1]), order([[at(PP=1, PASS="B")]])]
    assert said(DENSE, *strategy) == cleandoc("""
        place #1 (here): PP=1 would live in two places
          F[PP=1]: on 0
          B[PP=1]: on 1
          hint:    place all passes of a microbatch on the same devices
    """)


def test_an_expert_region_cut_apart_by_its_devices() -> None:
    tags = (("PP", 0), ("EP", 0), ("PART", 0))
    outline = mixture()
    inner = replace(outline.chunks[2], tags=tags)
    outline = replace(outline, chunks=(*outline.chunks[:2], inner, *outline.chunks[3:]))
    assert said(outline, place(at(), [0, 1]), place(at(PART=0), [2, 3])) == cleandoc("""
        place #1 (here): an expert region would be cut apart
          PP=0 EP=0 route: on 0,1, ways 1
          PP=0 EP=0:       on 2,3, ways 1
          hint:            select the whole region from its route to its unroute
    """)
    assert said(outline, place(at(), [0, 1]), shard(at(PART=0), [0, 1])) == cleandoc("""
        shard #1 (here): an expert region would be cut apart
          PP=0 EP=0 route: on 0,1, ways 1
          PP=0 EP=0:       on 0,1, ways 2
          hint:            select the whole region from its route to its unroute
    """)


def test_a_divided_region_on_devices_that_do_not_form_groups() -> None:
    strategy = [shard(at(EP=0), [0, 1]), place(at(), [0, 1, 2])]
    assert said(mixture(), *strategy) == cleandoc("""
        place #1 (here): 3 devices cannot form groups of 2
          region:  PP=0 EP=0 route
          devices: 0-2
          hint:    place the region on a multiple of 2 devices, or choose other `ways`
    """)


def test_what_writes_a_buffer_cannot_run_again() -> None:
    strategy = [split(at(), parts=2), remat(at(), 0.5), remat(at(), 1, across="PP"), place(at(), [0])]
    assert said(normed(), *strategy) == cleandoc("""
        remat #2 (here): PP=1 uses buffers that change, so its forward cannot run again
          buffers: mean
          hint:    leave this region out of the filter, or leave across= out
    """)
    fine = apply(start(normed()), [remat(at(), 1, across="PP"), remat(at(PP=1), 0.5)])
    lower(fine, outline=fitted(fine))


def test_what_reads_a_buffer_that_another_writes_cannot_run_again() -> None:
    outline = normed()
    third = replace(outline.chunks[2], buffers=("mean", "fixed"))
    outline = replace(outline, chunks=(*outline.chunks[:2], third))
    assert said(outline, remat(at(PP=2), 1, across="PP")) == cleandoc("""
        remat #0 (here): PP=2 uses buffers that change, so its forward cannot run again
          buffers: mean
          hint:    leave this region out of the filter, or leave across= out
    """)


def test_a_batch_that_does_not_divide() -> None:
    strategy = [
        replicate(at(), [0, 1]),
        replicate(at(PP=0), [0, 1, 2]),
        split(at(), parts=2),
        split(at(), "K", 5),
    ]
    assert said(DENSE, *strategy, samples=90) == cleandoc("""
        strategy: 90 samples do not divide into 60 equal pieces
          devices: 6 slices of the samples
          parts:   10 in each slice (MB=2 x K=5)
          hint:    use a batch that is a multiple of 60, fewer parts or fewer devices
    """)
    assert said(DENSE, replicate(at(), [0, 1]), samples=3) == cleandoc("""
        strategy: 3 samples do not divide into 2 equal pieces
          devices: 2 slices of the samples
          parts:   1 in each slice
          hint:    use a batch that is a multiple of 2, fewer parts or fewer devices
    """)


def test_an_order_that_crosses_devices() -> None:
    strategy = [place(at(), [0]), place(at(PP=1), [1]), order([[at(PP=0, PASS="F")], [at(PP=1, PASS="F")]])]
    assert said(DENSE, *strategy) == cleandoc("""
        order #2 (here): the order crosses devices
          before: F[PP=0] on 0
          after:  F[PP=1] on 1
          hint:   order the nodes of one device at a time; data already orders them across devices
    """)


def test_an_order_against_the_data() -> None:
    assert said(DENSE, order([[at(PP=2, PASS="F")], [at(PP=0, PASS="F")]])) == cleandoc("""
        order #0 (here): this order can never run
          asked: F[PP=2] before F[PP=0]
          but:   F[PP=0] --> F[PP=1] --> F[PP=2]
          hint:  put F[PP=0] first, or order only one of them
    """)


def test_an_order_against_the_data_across_devices() -> None:
    strategy: list[Directive] = [place(at(PP=i), [i]) for i in range(3)]
    strategy += [order([[at(PP=0, PASS="B")], [at(PP=0, PASS="F")]])]
    assert said(DENSE, *strategy) == cleandoc("""
        order #3 (here): this order can never run
          asked: B[PP=0] before F[PP=0]
          but:   F[PP=0] --> B[PP=0]
          hint:  put F[PP=0] first, or order only one of them
    """)


def test_a_long_way_round_is_shortened() -> None:
    first = "F[PP=0] --> F[PP=1] --> F[PP=2] --> F[PP=3] --> F[PP=4] --> F[PP=5]"
    last = "F[PP=34] --> F[PP=35] --> F[PP=36] --> F[PP=37] --> F[PP=38] --> F[PP=39]"
    assert said(chain(40), order([[at(PP=39, PASS="F")], [at(PP=0, PASS="F")]])) == cleandoc(f"""
        order #0 (here): this order can never run
          asked: F[PP=39] before F[PP=0]
          but:   {first} --> ... 28 more ... --> {last}
          hint:  put F[PP=0] first, or order only one of them
    """)


def test_two_orders_against_each_other() -> None:
    strategy = [
        place(at(), [0]),
        place(at(PP=1), [1]),
        split(at(), parts=2),
        order([[at(PP=2, MB=0, PASS="F")], [at(PP=0, MB=1, PASS="F")]]),
        order([[at(PP=2, MB=1, PASS="F")], [at(PP=2, MB=0, PASS="F")]]),
    ]
    there = "transfer[PP=0.out0[MB=1] @0 -> @1] --> F[PP=1 MB=1]"
    back = "transfer[PP=1.out0[MB=1] @1 -> @0] --> F[PP=2 MB=1]"
    assert said(DENSE, *strategy) == cleandoc(f"""
        order #4 (here): this order can never run
          asked: F[PP=2 MB=1] before F[PP=2 MB=0]
          but:   F[PP=2 MB=0] ..> F[PP=0 MB=1] --> {there} --> {back}
          with:  order #3 (here)
          hint:  put F[PP=2 MB=0] first, or order only one of them
    """)


def test_rows_in_expert_order_cannot_be_sliced_anew() -> None:
    before = [place(at(), [0, 1]), place(at(EP=0), [0, 1, 2, 3])]
    assert said(mixture(), *before) == cleandoc(f"""
        place #1 (here): PP=0.out0 cannot be resliced by samples
          on 0,1: (360360, {WIDTH}), rows in the order of their experts
          on 0-3: (180180, {WIDTH}), for PP=0 EP=0
          hint:   place both regions on sets of devices of the same size
    """)
    assert said(mixture(), *before, shard(at(EP=0), [0, 1, 2, 3])) == cleandoc(f"""
        shard #2 (here): PP=0.out0 cannot be resliced by samples
          on 0,1: (360360, {WIDTH}), rows in the order of their experts
          on 0-3: (180180, {WIDTH}), for PP=0 EP=0 route
          hint:   place both regions on sets of devices of the same size
    """)


@pytest.mark.parametrize("divided", [False, True])
def test_rows_from_experts_cannot_be_sliced_anew(divided: bool) -> None:
    outline = mixture()
    post = replace(outline.chunks[4], tags=(("POST", 0),), inputs=outline.chunks[4].inputs[:1])
    phases = {phase: replace(spec, inputs=(), grad_inputs=(0,)) for phase, spec in post.phases.items()}
    post = replace(post, input_specs=post.input_specs[:1], phases=phases)
    outline = replace(outline, chunks=(*outline.chunks[:4], post, *outline.chunks[5:]))
    strategy: list[Directive] = [place(at(), [0, 1]), place(at(POST=0), [2])]
    strategy += [shard(at(EP=0), [0, 1])] if divided else []
    value, who = ("PP=0 EP=0 unroute.out0", "place #1") if divided else ("PP=0 EP=0.out0", "place #1")
    assert said(outline, *strategy) == cleandoc(f"""
        {who} (here): {value} cannot be resliced by samples
          on 0,1: (360360, {WIDTH}), rows in the order of their experts
          on 2:   (720720, {WIDTH}), for PP=0 #1
          hint:   place both regions on sets of devices of the same size
    """)


def test_a_number_of_one_slice_means_nothing_on_another() -> None:
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a")], [HIDDEN, replace(SCALAR, dtype="int64")])
    count = Output(chunk="PP=0", index=1)
    last = d.chunk("PP=1", pp(1), [first, count, Y], [d.param("b")], [SCALAR])
    assert said(d.outline(last), place(at(PP=0), [0, 1]), place(at(PP=1), [2])) == cleandoc("""
        place #1 (here): PP=0.out1 cannot be resliced by samples
          on 0,1: ()
          on 2:   (), for PP=1
          hint:   place both regions on sets of devices of the same size
    """)


def test_a_number_of_one_slice_means_nothing_where_samples_are_divided_otherwise() -> None:
    """The two regions are on the same devices: the message names them instead."""
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a")], [HIDDEN, replace(SCALAR, dtype="int64")])
    count = Output(chunk="PP=0", index=1)
    last = d.chunk("PP=1", pp(1), [first, count, Y], [d.param("b")], [SCALAR])
    tensor = shard(at(PP=0), [0, 1], axis="TP", weights={"w": 0})
    assert said(d.outline(last), place(at(), [0, 1]), tensor) == cleandoc("""
        place #0 (here): PP=0.out1 cannot be resliced by samples
          PP=0:   ()
          on 0,1: (), for PP=1
          hint:   shard both regions along axes of the same degrees
    """)


def test_a_mean_over_a_slice_means_nothing_on_another() -> None:
    """A vector of one shape on both sides may still be that of one slice."""
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a")], [HIDDEN, replace(HIDDEN, shape=(WIDTH,))])
    mean = Output(chunk="PP=0", index=1)
    last = d.chunk("PP=1", pp(1), [first, mean, Y], [d.param("b")], [SCALAR])
    assert said(d.outline(last), place(at(PP=0), [0, 1]), place(at(PP=1), [2])) == cleandoc(f"""
        place #1 (here): PP=0.out1 cannot be resliced by samples
          on 0,1: ({WIDTH},)
          on 2:   ({WIDTH},), for PP=1
          hint:   place both regions on sets of devices of the same size
    """)


def test_a_gradient_summed_over_samples_cannot_be_sliced_anew() -> None:
    d = Drawing()
    first = d.chunk("PP=0", pp(0), [X], [d.param("a")], [replace(HIDDEN, shape=(3, WIDTH))])
    d.chunks[0] = replace(d.chunks[0], fixed=(0,))
    last = d.chunk("PP=1", pp(1), [first, Y], [d.param("b")], [SCALAR])
    assert said(d.outline(last), place(at(PP=0), [0, 1]), place(at(PP=1), [2])) == cleandoc(f"""
        place #0 (here): PP=1.din0 cannot be resliced by samples
          on 2:   (3, {WIDTH})
          on 0,1: (3, {WIDTH}), for PP=0
          hint:   place both regions on sets of devices of the same size
    """)


def test_tied_experts_divided_on_two_sets() -> None:
    strategy = [shard(at(PP=0), [0, 1]), shard(at(PP=1), [2, 3])]
    assert said(mixture(tied=True), *strategy) == cleandoc("""
        shard #0 (here): the tied experts experts are not sharded alike
          PP=0 EP=0: on 0,1, ways 2
          PP=1 EP=1: on 2,3, ways 2
          hint:      shard the regions that share experts alike, on the same devices
    """)


def test_tied_experts_divided_in_one_place_only() -> None:
    strategy = [place(at(), [0, 1]), shard(at(EP=1), [0, 1])]
    assert said(mixture(tied=True), *strategy) == cleandoc("""
        shard #1 (here): the tied experts experts are not sharded alike
          PP=0 EP=0: on 0,1, ways 1
          PP=1 EP=1: on 0,1, ways 2
          hint:      shard the regions that share experts alike, on the same devices
    """)
    assert EXPERTS == 4
