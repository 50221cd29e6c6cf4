"""The proof of values: it accepts what lowering makes, and each of its complaints can be provoked."""

from collections.abc import Callable
from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.ir.ids import Pass, SlotId, Tags, read_slot
from piper.ir.sharding import Sharding
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import Field, OfBucket, Routing, Rows
from piper.plan.plan import Plans, Slot
from piper.plan.prove import ProofError
from piper.proof.values import prove_values, value_problems
from tests.proof.plans import (
    Made,
    changing,
    crossing,
    edited,
    experts,
    find,
    pipeline,
    recomputed,
    said,
    tied,
    typed,
    unequal,
    weighted,
    without,
)

Edit = Callable[[list[Instr]], object]
MB0, MB1 = (("MB", 0),), (("MB", 1),)


def labels(*, name: str = "y", part: Tags = MB0, devices: tuple[int, ...] = (2, 3)) -> Field:
    """Return what the load of the labels takes, with something changed."""
    return Field(name=name, part=part, devices=devices)


def forward(chunk: str, part: Tags = MB0) -> Pass:
    """Return the forward of a chunk."""
    return Pass(phase="F", chunk=chunk, part=part)


def again(op: str, node: str, **fields: object) -> Edit:
    """Return an edit that repeats an instruction right after itself."""

    def edit(instrs: list[Instr]) -> None:
        place = find(instrs, op, node)
        instrs.insert(place, replace(instrs[place], frees=(), **typed(fields)))  # type: ignore[arg-type]

    return edit


def earlier(op: str, node: str, before: tuple[str, str]) -> Edit:
    """Return an edit that moves an instruction before another."""

    def edit(instrs: list[Instr]) -> None:
        moved = instrs.pop(find(instrs, op, node))
        instrs.insert(find(instrs, *before), moved)

    return edit


def copied(source: str, target: str, before: tuple[str, str]) -> Edit:
    """Return an edit that overwrites a slot before an instruction."""

    def edit(instrs: list[Instr]) -> None:
        read, written = (read_slot(text, ("MB",)) for text in (source, target))
        copy = Instr(op="copy", node="copy", stream="compute", reads=(read,), writes=(written,))
        instrs.insert(find(instrs, *before), copy)

    return edit


def adding(instrs: list[Instr]) -> None:
    """Let the second backward add to the sum itself, in place of the accumulation behind it."""
    del instrs[find(instrs, "accumulate", "B[PP=1 MB=1] into")]
    place, total = find(instrs, "compute", "B[PP=1 MB=1]"), SlotId("grad", "PP=1/0")
    ins = instrs[place]
    writes = tuple(total if slot.kind == "gradient" else slot for slot in ins.writes)
    instrs[place] = replace(ins, reads=(*ins.reads, total), writes=writes)


@pytest.mark.parametrize("make", [pipeline, tied, unequal, experts, weighted, recomputed, crossing])
def test_what_lowering_makes_is_proven(make: Callable[[], Made]) -> None:
    plans, graph = make()
    prove_values(plans, graph)


def test_a_counterexample_names_the_node_the_slot_and_both_values() -> None:
    plans, graph = pipeline()
    reads = ("PP=0.out0@2,3[MB=0]", "PP=1/0.param")
    wrong = edited(plans, 2, changing("compute", "F[PP=1 MB=1]", reads=reads))
    with pytest.raises(ProofError) as caught:
        prove_values(wrong, graph)
    assert str(caught.value) == cleandoc("""
        the plans compute something else:
        F[PP=1 MB=1] reads PP=0.out0@2,3[MB=0], which holds output 0 of PP=0 on MB=0; it should hold output 0 \
of PP=0 on MB=1
                4  compute        B[PP=1 MB=0]
                5  accumulate     accumulate[B[PP=1 MB=0] into PP=1/0.grad]
                6  send           transfer[PP=1.din0[MB=0] @2,3 -> @0,1]
        -->     7  compute        F[PP=1 MB=1]
                8  accumulate     accumulate[F[PP=1 MB=1] into loss]
                9  compute        B[PP=1 MB=1]
               10  accumulate     accumulate[B[PP=1 MB=1] into PP=1/0.grad]
    """)


GRAD = "PP=1/0.grad"
READS: dict[str, tuple[Callable[[], Made], int, Edit, str]] = {
    "an accumulation done twice": (
        pipeline,
        2,
        again("accumulate", "B[PP=1 MB=1] into"),
        "reads PP=1/0.grad, which holds (PP=1 MB=0 + 2 x PP=1 MB=1) over cells 0-1; "
        "it should hold (PP=1 MB=0 + PP=1 MB=1) over cells 0-1",
    ),
    "a sum begun again": (
        pipeline,
        2,
        changing("accumulate", "B[PP=1 MB=1] into", reads=("PP=1/0.g[MB=1]",)),
        "reads PP=1/0.grad, which holds (PP=1 MB=1) over cells 0-1; it should hold (PP=1 MB=0 + PP=1 MB=1)",
    ),
    "a backward that adds to a sum, which its code cannot": (
        pipeline,
        2,
        adding,
        "B[PP=1 MB=1] adds to PP=1/0.grad, which its code cannot",
    ),
    "a gradient that is not reduced": (
        pipeline,
        2,
        without("all_reduce", "PP=1/0"),
        "reads PP=1/0.grad, which holds (PP=1 MB=0 + PP=1 MB=1) over cells 0-0; "
        "it should hold (PP=1 MB=0 + PP=1 MB=1) over cells 0-1",
    ),
    "a gradient reduced twice": (
        pipeline,
        2,
        again("all_reduce", "PP=1/0"),
        "which holds (PP=1 MB=0 + PP=1 MB=1) over cells 0-1 2 times; it should hold",
    ),
    "a loss that is counted twice": (
        pipeline,
        2,
        again("accumulate", "F[PP=1 MB=1] into loss"),
        "norm[@2,3] reads loss, which holds (PP=1 MB=0 + 2 x PP=1 MB=1) over cells 0-0; "
        "it should hold (PP=1 MB=0 + PP=1 MB=1) over cells 0-0",
    ),
    "two reads exchanged": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", reads=("PP=1/0.param", "PP=0.out0@2,3[MB=0]")),
        "F[PP=1 MB=0] reads PP=1/0.param, which holds the old parameters of PP=1/0; "
        "it should hold output 0 of PP=0 on MB=0",
    ),
    "two writes exchanged": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", writes=("PP=1.saved[MB=0]", "PP=1.out0[MB=0]")),
        "B[PP=1 MB=0] reads PP=1.saved[MB=0], which holds output 0 of PP=1 on MB=0; "
        "it should hold PP=1.saved on MB=0",
    ),
    "a dropped gather after the update": (
        pipeline,
        0,
        without("gather", "for update"),
        "at the end of the step PP=0/0.param on device 0 holds the partly new parameters of PP=0/0; "
        "it should hold the new parameters of PP=0/0",
    ),
    "an update that is left out": (
        pipeline,
        2,
        without("update", "update"),
        "at the end of the step PP=1/0.param on device 2 holds the old parameters of PP=1/0; "
        "it should hold the new parameters of PP=1/0",
    ),
    "an update done twice": (
        pipeline,
        2,
        again("update", "update"),
        "update[@2,3] updates PP=1/0.param, which holds the new parameters of PP=1/0, a second time",
    ),
    "an update before the norm": (
        pipeline,
        2,
        earlier("update", "update", ("norm", "norm")),
        "norm[@2,3] reads PP=1/0.grad, which holds a gradient that an update has used up; "
        "it should hold gradients of stages.1.0",
    ),
    "an update before the last use": (
        pipeline,
        2,
        earlier("update", "update", ("compute", "B[PP=1 MB=1]")),
        "B[PP=1 MB=1] reads PP=1/0.param, which holds the new parameters of PP=1/0; "
        "it should hold the old parameters of PP=1/0",
    ),
    "a step without a total": (
        pipeline,
        2,
        without("total", "total"),
        "total waits for what never happens",
    ),
    "another field": (
        weighted,
        2,
        changing("load", "y MB=0", payload=labels(name="x")),
        "F[PP=2 MB=0] reads batch.y@2,3[MB=0], which holds field x on MB=0; it should hold field y on MB=0",
    ),
    "another microbatch of a field": (
        weighted,
        2,
        changing("load", "y MB=0", payload=labels(part=MB1)),
        "F[PP=2 MB=0] reads batch.y@2,3[MB=0], which holds field y on MB=1; it should hold field y on MB=0",
    ),
    "a microbatch that does not exist": (
        weighted,
        2,
        changing("load", "y MB=0", payload=labels(part=(("MB", 2),))),
        "load[y MB=0 @2,3] loads a microbatch that does not exist, (('MB', 2),)",
    ),
    "the samples of other devices": (
        weighted,
        2,
        changing("load", "y MB=0", payload=labels(devices=(3, 2))),
        "which holds field y on MB=0, on device 2 of cells 1-1; "
        "it should hold field y on MB=0, on device 2 of cells 0-0",
    ),
    "devices that do not load": (
        weighted,
        2,
        changing("load", "y MB=0", payload=labels(devices=(0, 1))),
        "load[y MB=0 @2,3] loads the samples of devices that it does not run on",
    ),
    "another chunk": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", payload=forward("PP=0")),
        "F[PP=1 MB=0] has run=F[PP=0 MB=0], which this device must not run",
    ),
    "no chunk": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", payload=forward("PP=7")),
        "F[PP=1 MB=0] has run=F[PP=7 MB=0], which this device must not run",
    ),
    "no phase": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", payload=None),
        "F[PP=1 MB=0] has nothing, which is not what compute needs",
    ),
    "a compute on a microbatch that does not exist": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", payload=forward("PP=1", (("MB", 5),))),
        "F[PP=1 MB=0] runs on a microbatch that does not exist, (('MB', 5),)",
    ),
    "too few reads": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", reads=("PP=1/0.param",)),
        "F[PP=1 MB=0] reads 1 slots; it should read 2",
    ),
    "too few writes": (
        pipeline,
        2,
        changing("compute", "F[PP=1 MB=0]", writes=("PP=1.out0[MB=0]",)),
        "F[PP=1 MB=0] writes 1 slots; it should write 2",
    ),
    "a send of nothing": (
        pipeline,
        0,
        changing("send", "out0[MB=0]", reads=()),
        "transfer[PP=0.out0[MB=0] @0,1 -> @2,3] reads 0 slots; it should read 1",
    ),
    "a send of another value": (
        pipeline,
        0,
        changing("send", "out0[MB=0]", reads=("PP=0.saved[MB=0]",)),
        "F[PP=1 MB=0] reads PP=0.out0@2,3[MB=0], which holds PP=0.saved on MB=0; "
        "it should hold output 0 of PP=0 on MB=0",
    ),
    "rows that cut a cell": (
        pipeline,
        0,
        changing("send", "out0[MB=0]", payload=Rows(start=0, stop=1, of=2)),
        "takes rows=0:1/2 of output 0 of PP=0 on MB=0, which cannot be cut there",
    ),
    "a cut through parameters": (
        pipeline,
        0,
        changing("send", "out0[MB=0]", payload=Rows(start=0, stop=1, of=2), reads=("PP=0/0.param",)),
        "takes rows=0:1/2 of the old parameters of PP=0/0, which cannot be cut there",
    ),
    "other rows": (
        unequal,
        0,
        changing("send", "PP=0.out0[MB=0] @0 -> @1,2", payload=Rows(start=1, stop=2, of=2)),
        "F[PP=1 MB=0] reads PP=0.out0@1,2[MB=0], which holds output 0 of PP=0 on MB=0, on device 1 of cells "
        "2-3; it should hold output 0 of PP=0 on MB=0, on device 1 of cells 0-1",
    ),
    "pieces in another order": (
        unequal,
        0,
        changing("concat", "PP=1.din1[MB=0]", reads=("PP=1.din1@0[MB=0].piece1", "PP=1.din1@0[MB=0].piece0")),
        "joins what are not neighbouring pieces of one value: the gradient of output 0 of PP=0 #1 on MB=0 "
        "from input 1 of PP=1, the gradient",
    ),
    "a gradient added twice": (
        unequal,
        0,
        changing("add", "PP=0.grad0.1@0[MB=0]", reads=("PP=0 #1.din0[MB=0]", "PP=0 #1.din0[MB=0]")),
        "it should hold the gradient of output 0 of PP=0 on MB=0 from input 0 of PP=0 #1 + input 0 of PP=1 + "
        "input 0 of PP=1 #1 + input 1 of PP=0 #1 + input 1 of PP=2",
    ),
    "gradients of different values added": (
        unequal,
        0,
        changing("add", "PP=0.grad0.1@0[MB=0]", reads=("PP=0 #1.din0[MB=0]", "PP=1.din1@0[MB=0]")),
        "adds what are not gradients of one value: the gradient of output 0 of PP=0 on MB=0 from input 0 of "
        "PP=0 #1 and the gradient of output 0 of PP=0 #1 on MB=0 from input 1 of PP=1",
    ),
    "gradients of different microbatches added": (
        unequal,
        0,
        changing("add", "PP=0.grad0.3@0[MB=1]", reads=("PP=2.din1@0[MB=0]", "PP=0.grad0.1@0[MB=1]")),
        "adds what are not gradients of one value: the gradient of output 0 of PP=0 on MB=0 from input 1 of "
        "PP=2 and the gradient of output 0 of PP=0 on MB=1 from input 0 of PP=0 #1",
    ),
    "an accumulation into another slot": (
        pipeline,
        2,
        changing("accumulate", "B[PP=1 MB=1] into", reads=("PP=1/0.g[MB=1]", "loss")),
        "adds to another slot than it writes",
    ),
    "an accumulation of something else": (
        pipeline,
        2,
        changing("accumulate", "B[PP=1 MB=1] into", reads=("PP=1.din0[MB=1]", GRAD)),
        "adds PP=1.din0[MB=1], which holds the gradient of output 0 of PP=0 on MB=1 from input 0 of PP=1, to "
        "PP=1/0.grad",
    ),
    "a loss added to a gradient": (
        pipeline,
        2,
        changing("accumulate", "F[PP=1 MB=1] into loss", reads=("PP=1.out0[MB=1]", GRAD), writes=(GRAD,)),
        "adds PP=1.out0[MB=1], which holds output 0 of PP=1 on MB=1, to PP=1/0.grad",
    ),
    "a loss added to what is no sum": (
        weighted,
        2,
        changing(
            "accumulate", "F[PP=2 MB=1] into loss", reads=("PP=2.out0[MB=1]", "weight"), writes=("weight",)
        ),
        "adds PP=2.out0[MB=1], which holds output 0 of PP=2 on MB=1, to weight",
    ),
    "a sum that holds another sum": (
        weighted,
        2,
        copied("weight", "loss", before=("accumulate", "F[PP=2 MB=1] into loss")),
        "reads loss, which holds the sum of the weight; it should hold the sum of the loss",
    ),
    "a norm that counts a gradient twice": (
        pipeline,
        2,
        changing("norm", "norm", reads=(GRAD, GRAD, "loss")),
        "norm[@2,3] counts PP=1/0.grad twice, or should not count it",
    ),
    "a norm that leaves out a gradient": (
        pipeline,
        2,
        changing("norm", "norm", reads=("loss",)),
        "norm[@2,3] leaves out PP=1/0",
    ),
    "a norm that leaves out the loss": (
        pipeline,
        2,
        changing("norm", "norm", reads=(GRAD,)),
        "norm[@2,3] leaves out loss",
    ),
    "an update that does not know the weight": (
        weighted,
        2,
        changing("update", "update", reads=("PP=2/0.grad",)),
        "update[@2,3] does not read the sums over all devices, by which it scales",
    ),
    "an update before the sums are known": (
        weighted,
        2,
        earlier("update", "update", ("total", "total")),
        "update[@2,3] reads total, which holds the stale sums over all devices; "
        "it should hold the fresh sums over all devices",
    ),
    "an update of fewer buckets": (
        pipeline,
        2,
        changing("update", "update", writes=()),
        "update[@2,3] updates 0 buckets by 1 gradients",
    ),
    "an update of what does not train": (
        weighted,
        0,
        changing("update", "update", writes=("PP=0/0.param",)),
        "update[@0,1] updates PP=0/0.param, which this device must not train",
    ),
    "a collective over pairs": (
        pipeline,
        2,
        changing("all_reduce", "PP=1/0", comm="0,1>2,3"),
        "goes over 0,1>2,3, which joins pairs",
    ),
    "a send within a group": (
        pipeline,
        0,
        changing("send", "out0[MB=0]", comm="0,1:reduce"),
        "sends over 0,1:reduce, which joins no pairs",
    ),
    "rows counted for a chunk without experts": (
        experts,
        0,
        changing("counts", "PP=0 EP=0 route MB=0", payload=Routing(run=forward("PP=0"))),
        "counts the rows of PP=0, which has no sharded experts here",
    ),
    "rows moved for a chunk without experts": (
        experts,
        0,
        changing("exchange", "F[PP=0 EP=0 route MB=0]", payload=Routing(run=forward("PP=0"))),
        "has run=F[PP=0 MB=0] outward=1, which must not happen here",
    ),
    "rows moved back instead of out": (
        experts,
        0,
        changing(
            "exchange",
            "F[PP=0 EP=0 route MB=0]",
            payload=Routing(run=forward("PP=0 EP=0 route"), outward=False),
        ),
        "F[PP=0 EP=0 route MB=0] reads PP=0.out0[MB=0], which holds output 0 of PP=0 on MB=0; it should hold "
        "the gradient of output 0 of PP=0 EP=0 route on MB=0 from input 0 of PP=0 EP=0",
    ),
    "rows moved by other counts": (
        experts,
        0,
        changing(
            "exchange", "F[PP=0 EP=0 route MB=1]", reads=("PP=0.out0[MB=1]", "PP=0 EP=0 route.splits[MB=0]")
        ),
        "F[PP=0 EP=0 route MB=1] reads PP=0 EP=0 route.splits[MB=0], which holds the row counts of PP=0 EP=0 "
        "route on MB=0; it should hold the row counts of PP=0 EP=0 route on MB=1",
    ),
    "rows moved among other devices": (
        experts,
        0,
        changing("exchange", "F[PP=0 EP=0 route MB=0]", comm="0,2x2:reduce"),
        "goes over 0,2x2:reduce, groups 0,2 and 1,3; it should be 0,1 and 2,3",
    ),
    "a gather of no bucket": (
        pipeline,
        0,
        changing("gather", "for update", payload=OfBucket(bucket="PP=1/0")),
        "gathers PP=0/0.param into PP=0/0.param for 'PP=1/0'",
    ),
    "a gather from another slot": (
        pipeline,
        0,
        changing("gather", "for update", reads=("PP=0/0.state",)),
        "gathers PP=0/0.state into PP=0/0.param for 'PP=0/0'",
    ),
    "a gather into another slot": (
        lambda: pipeline(zero=3),
        0,
        changing("gather", "for F[PP=0 MB=0]", writes=("PP=0/0.param",)),
        "gathers PP=0/0.param into PP=0/0.param for 'PP=0/0'",
    ),
    "a gather among other devices": (
        experts,
        0,
        changing("gather", "PP=0/0 for update", comm="0,2x2:gather"),
        "goes over 0,2x2:gather, groups 0,2 and 1,3; it should be 0-3",
    ),
    "a reduction into another bucket": (
        experts,
        0,
        changing("reduce_scatter", "PP=1/0 after B[PP=1 MB=0]", payload=OfBucket(bucket="PP=0/0")),
        "reads PP=1/0.g[MB=0], which holds gradients of pre.1; it should hold gradients of pre.0",
    ),
    "a reduction of no bucket": (
        pipeline,
        0,
        changing("reduce_scatter", "PP=0/0", payload=OfBucket(bucket="PP=1/0")),
        "into PP=0/0.grad_shard for 'PP=1/0'",
    ),
    "a reduction that adds to another slot": (
        experts,
        0,
        changing("reduce_scatter", "PP=1/0 after B[PP=1 MB=1]", reads=("PP=1/0.g[MB=1]", "loss")),
        "scatters PP=1/0.g[MB=1], loss into PP=1/0.grad_shard for 'PP=1/0'",
    ),
    "a reduction added to another shard": (
        experts,
        0,
        changing(
            "reduce_scatter",
            "PP=1/0 after B[PP=1 MB=1]",
            reads=("PP=1/0.g[MB=1]", "PP=0 #1/0.grad_shard"),
            writes=("PP=0 #1/0.grad_shard",),
        ),
        "reads PP=0 #1/0.grad_shard, which holds a shard of gradients of post.0; "
        "it should hold a shard of gradients of pre.1",
    ),
    "a reduction of something else": (
        pipeline,
        2,
        changing("all_reduce", "PP=1/0", reads=("loss",)),
        "sums loss into PP=1/0.grad for PP=1/0",
    ),
    "a reduction of a slot that holds something else": (
        pipeline,
        2,
        changing("compute", "B[PP=1 MB=1]", writes=(GRAD, "PP=1.din0[MB=1]")),
        "adds PP=1/0.g[MB=1], which holds nothing, to PP=1/0.grad",
    ),
    "a tied sum of different shards": (
        tied,
        0,
        changing("all_reduce", "after tied", reads=(), writes=("shared@PP=0.grad",)),
        "sums gradients of different parameters, or shards with whole ones",
    ),
    "a tied sum without a copy": (
        tied,
        0,
        changing("all_reduce", "after tied", reads=()),
        "reads shared@PP=0.grad_shard, which holds (PP=1 MB=0 + PP=1 MB=1) over cells 0-1; "
        "it should hold (PP=0 MB=0 + PP=0 MB=1 + PP=1 MB=0 + PP=1 MB=1) over cells 0-1",
    ),
    "a total of something else": (
        pipeline,
        2,
        changing("total", "total", reads=("loss",)),
        "total reads loss, which holds the sum of the loss; it should hold the norm and the loss of this device",
    ),
    "a total of one device": (
        recomputed,
        1,
        changing("total", "total", comm=None),
        "total sums over one device; it should sum over all",
    ),
    "a total elsewhere": (
        pipeline,
        2,
        changing("total", "total", writes=("norm",)),
        "total writes norm; it should write total",
    ),
    "a broadcast of something else": (
        weighted,
        0,
        changing("broadcast", "PP=1", reads=("buffer.fixed",), writes=("buffer.fixed",)),
        "gives away buffer.fixed, which holds the buffer fixed; it should be a buffer that is written",
    ),
    "a broadcast into another slot": (
        weighted,
        0,
        changing("broadcast", "PP=1", writes=("buffer.fixed",)),
        "gives other slots than it takes, or has no communicator",
    ),
    "a dropped broadcast": (
        weighted,
        0,
        without("broadcast", "PP=1"),
        "at the end of the step buffer.mean on device 0 holds the buffer of each replica; "
        "it should hold that of the first replica",
    ),
    "a buffer that is not written": (
        weighted,
        0,
        changing(
            "compute",
            "F[PP=1 MB=1]",
            writes=("PP=1.out0[MB=1]", "PP=1.out1[MB=1]", "PP=1.kept[MB=1]", "batch.x@0,1[MB=0]"),
        ),
        "at the end of the step buffer.mean on device 0 holds what PP=1 MB=0 wrote; "
        "it should hold what PP=1 MB=0, PP=1 MB=1 write",
    ),
    "a resident that is overwritten": (
        weighted,
        2,
        again("load", "y MB=0", writes=("PP=2/0.state",)),
        "at the end of the step PP=2/0.state on device 2 holds field y on MB=0; "
        "it should hold the resident PP=2/0.state",
    ),
}


@pytest.mark.parametrize("name", READS)
def test_an_edited_instruction(name: str) -> None:
    make, device, edit, wanted = READS[name]
    assert wanted in said(make(), (device, edit))


def test_microbatches_in_another_order_leave_another_buffer() -> None:
    def swap(instrs: list[Instr]) -> None:
        """Issue both loads and first stages, then the second stage on MB=1 and on MB=0, then both sends."""
        order = [
            ("load", "x MB=0"),
            ("load", "x MB=1"),
            ("compute", "F[PP=0 MB=0]"),
            ("compute", "F[PP=0 MB=1]"),
        ]
        order += [("compute", "F[PP=1 MB=1]"), ("compute", "F[PP=1 MB=0]")]
        order += [("send", "PP=1.out0[MB=0]"), ("send", "PP=1.out0[MB=1]")]
        first = [instrs[find(instrs, *which)] for which in order]
        instrs[:] = [*first, *(ins for ins in instrs if ins not in first)]

    assert said(weighted(), (0, swap)) == (
        "at the end of the step buffer.mean on device 0 holds what PP=1 MB=1, PP=1 MB=0 wrote; "
        "it should hold what PP=1 MB=0, PP=1 MB=1 write"
    )


def test_a_second_run_that_writes_buffers() -> None:
    def repeat(instrs: list[Instr]) -> None:
        place = find(instrs, "compute", "F[PP=1 MB=0]")
        run = Pass(phase="F", chunk="PP=1", part=MB0, again=True)
        instrs.insert(place + 1, replace(instrs[place], node="R[PP=1 MB=0]", payload=run))

    assert "R[PP=1 MB=0] runs a second time and writes buffers a second time" in said(weighted(), (0, repeat))


def test_clipping_needs_the_sums() -> None:
    plans, graph = pipeline()
    assert "update[@0,1] does not read the sums over all devices, by which it scales" in "\n".join(
        value_problems(plans, graph, clip=True)
    )


def test_operations_that_differ_between_devices() -> None:
    edit = changing("total", "total", op="broadcast")
    assert "total is another operation on other devices" in said(pipeline(), (2, edit))


def test_a_collective_about_different_things() -> None:
    edit = changing("all_reduce", "after tied", payload=OfBucket(bucket="shared@PP=1"))
    wanted = "reduce[shared@PP=0 after tied] is about different things on its devices: bucket=shared@PP=0 and bucket=shared@PP=1"
    assert wanted in said(tied(), (2, edit))


def test_shards_of_different_elements() -> None:
    plans, graph = tied()
    comm = plans.comms["0,2x2:reduce"]
    crossed = {**plans.comms, comm.name: replace(comm, groups=((0, 3), (1, 2)))}
    assert "reduce[shared@PP=0 after tied] sums shards of different elements" in "\n".join(
        value_problems(replace(plans, comms=crossed), graph)
    )


def test_a_pipe_to_another_device() -> None:
    plans, graph = pipeline()
    comm = plans.comms["0,1>2,3"]
    crossed = {**plans.comms, comm.name: replace(comm, groups=((0, 3), (1, 2)))}
    assert (
        "F[PP=1 MB=0] reads PP=0.out0@2,3[MB=0], which holds output 0 of PP=0 on MB=0, on device 2 of cells 1-1; "
        "it should hold output 0 of PP=0 on MB=0, on device 2 of cells 0-0"
    ) in "\n".join(value_problems(replace(plans, comms=crossed), graph))


def test_one_receiver_of_two_senders_that_send_different_values() -> None:
    assert len({plan.devices for plan in crossing()[0]} & {(0,), (1,), (2, 3)}) == 3
    edit = changing("send", "PP=0.out0[MB=0]", reads=("PP=0.saved[MB=0]",))
    wanted = "receives different values from different devices: PP=0.saved on MB=0, output 0 of PP=0 on MB=0"
    assert wanted in said(crossing(), (0, edit))


def test_shards_of_which_some_are_not_updated() -> None:
    wanted = (
        "gather[PP=0/0 for update] gathers shards of different steps: "
        "the new parameters of PP=0/0 and the old parameters of PP=0/0"
    )
    assert wanted in said(crossing(zero=1), (1, without("update", "update")))


def test_a_reduction_of_a_slot_that_was_overwritten() -> None:
    wanted = (
        "reduce[PP=1/0 after B[PP=1 MB=1]] reads PP=1/0.grad, which holds the gradient of output 0 of PP=0 on "
        "MB=1 from input 0 of PP=1; it should hold gradients of stages.1.0"
    )
    assert wanted in said(pipeline(), (2, copied("PP=1.din0[MB=1]", GRAD, before=("all_reduce", "PP=1/0"))))


def with_bucket(plans: Plans, name: str, **fields: object) -> Plans:
    """Return plans with one bucket changed."""
    changed: Bucket = replace(plans.buckets[name], **fields)  # type: ignore[arg-type]
    return replace(plans, buckets={**plans.buckets, name: changed})


def divided(plans: Plans, name: str, sharding: Sharding) -> Plans:
    """Return plans with the pieces of one bucket said to be divided in another way."""
    pieces = tuple(replace(piece, shardings=(sharding,)) for piece in plans.buckets[name].pieces)
    return with_bucket(plans, name, pieces=pieces)


def with_buffer(plans: Plans, name: str, **fields: object) -> Plans:
    """Return plans with one buffer held in another way by the first program that has it."""
    slot = SlotId("buffer", name)
    place, plan = next((i, plan) for i, plan in enumerate(plans) if slot in plan.residents)
    held: Slot = replace(plan.residents[slot], **fields)  # type: ignore[arg-type]
    edited = replace(plan, residents={**plan.residents, slot: held})
    return replace(plans, plans=(*plans.plans[:place], edited, *plans.plans[place + 1 :]))


TABLES: dict[str, tuple[Callable[[], Made], Callable[[Plans], Plans], str]] = {
    "seed": (
        pipeline,
        lambda plans: replace(plans, seed=1.0),
        "the plans say seed=1.0; it should be 0.25",
    ),
    "weighted": (
        pipeline,
        lambda plans: replace(plans, weighted=True),
        "the plans say weighted=True; it should be False",
    ),
    "sums": (
        pipeline,
        lambda plans: replace(plans, sums={"squares": 1, "loss": 1, "weight": 1, "overflows": 1}),
        "the plans say sums={'squares': 1, 'loss': 1, 'weight': 1, 'overflows': 1}; "
        "it should be {'squares': 1, 'loss': 1, 'weight': 1}",
    ),
    "cells": (
        pipeline,
        lambda plans: replace(plans, cells=4),
        "the plans say cells=4; it should be 2",
    ),
    "axes": (
        pipeline,
        lambda plans: replace(plans, axes={"MB": 4}),
        "the plans say axes={'MB': 4}; it should be {'MB': 2}",
    ),
    "devices": (
        pipeline,
        lambda plans: replace(plans, plans=plans.plans[:1]),
        "the plans are for devices 0,1; they should be for 0-3",
    ),
    "pairs": (
        pipeline,
        lambda plans: replace(
            plans, comms={**plans.comms, "0,1>2,3": replace(plans.comms["0,1>2,3"], groups=((0, 2), (0, 3)))}
        ),
        "0,1>2,3 does not join each sender to one receiver",
    ),
    "chunks": (
        pipeline,
        lambda plans: with_bucket(plans, "PP=1/0", chunks=()),
        "PP=1 finds stages.1.0 in 0 of its buckets",
    ),
    "devices of a bucket": (
        pipeline,
        lambda plans: with_bucket(plans, "PP=1/0", devices=(0, 1), groups=((0, 1),)),
        "PP=1/0 does not lie on all devices of its chunks",
    ),
    "ways": (
        experts,
        lambda plans: divided(plans, "PP=0/0", Sharding(dim=0, degree=2)),
        "PP=0/0 holds pre.0 0:2; it should be whole",
    ),
    "a dimension": (
        experts,
        lambda plans: divided(plans, "PP=0 EP=0/0", Sharding(dim=1, degree=2)),
        "PP=0 EP=0/0 holds experts.0 1:2; it should be 0:2",
    ),
    "a buffer": (
        weighted,
        lambda plans: with_buffer(plans, "fixed", sharding=Sharding(dim=0, degree=2), placed=(0, 1)),
        "PP=1 finds buffer.fixed 0:2 on 0,1; it should be whole on all",
    ),
    "groups": (
        experts,
        lambda plans: with_bucket(plans, "PP=0 EP=0/0", groups=((0, 1), (2, 3))),
        "PP=0 EP=0/0 reduces within 0,1 and 2,3; it should be 0,2 and 1,3",
    ),
    "siblings": (
        tied,
        lambda plans: with_bucket(plans, "shared@PP=0", siblings=()),
        "shared@PP=0 has siblings (); it should have ('shared@PP=1',)",
    ),
    "copies": (
        pipeline,
        lambda plans: with_bucket(plans, "PP=1/0", copies=1),
        "PP=1/0 says that 1 devices hold its gradient; it should be 2",
    ),
    "zero": (
        recomputed,
        lambda plans: with_bucket(plans, "PP=1/0", zero=1),
        "PP=1/0 is sharded, zero=1, over groups of 1",
    ),
    "offsets": (
        pipeline,
        lambda plans: with_bucket(
            plans, "PP=1/0", pieces=(replace(plans.buckets["PP=1/0"].pieces[0], offset=8),)
        ),
        "the parameters of PP=1/0 do not lie one after another",
    ),
    "a parameter": (
        pipeline,
        lambda plans: with_bucket(
            plans, "PP=1/0", pieces=(replace(plans.buckets["PP=1/0"].pieces[0], name="other"),)
        ),
        "PP=1/0 holds other, which the model does not have",
    ),
    "a shape": (
        pipeline,
        lambda plans: with_bucket(
            plans, "PP=1/0", pieces=(replace(plans.buckets["PP=1/0"].pieces[0], shape=(4, 8)),)
        ),
        "PP=1/0 holds stages.1.0 as (4, 8) of float32; it should be (8, 8) of float32",
    ),
    "trainable": (
        pipeline,
        lambda plans: with_bucket(plans, "PP=1/0", trainable=False),
        "PP=1/0 says trainable=False of stages.1.0; the model says otherwise",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_an_edited_table(name: str) -> None:
    make, edit, wanted = TABLES[name]
    plans, graph = make()
    assert wanted in list(value_problems(edit(plans), graph))
