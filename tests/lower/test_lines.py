"""Lowering in small pictures: what a device issues, in order."""

import subprocess
import sys
from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.directives import Directive, apply, order, place, replicate, shard, split
from piper.ir.chunk import Buffer, CapturedModel
from piper.ir.dtypes import itemsize
from piper.ir.graph import start
from piper.ir.ids import Pass
from piper.ir.select import at
from piper.lower.state import Settings
from piper.plan.plan import Plan, Plans
from piper.plan.prove import prove
from piper.schedules import dualpipe_v, gpipe, one_f_one_b, zero_bubble
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.outlines import SCALAR, Drawing, X, Y, pp


def compiled(outline: CapturedModel, *strategy: Directive, clip: bool = False) -> Plans:
    plans, _ = lower(apply(start(outline), strategy), Settings(clip=clip))
    prove(plans)
    return plans


def shown(plan: Plan, *ops: str) -> str:
    """The instructions of some kinds, one a line; compute by its node alone."""
    return "\n".join(
        ins.node if ins.op in ("compute", "exchange") else f"{ins.op} {ins.node}"
        for ins in plan.instrs
        if ins.op in ops
    )


def computes(plans: Plans, device: int) -> str:
    """What a device computes, shortly: `F0 F1 B0`."""
    shorts = []
    for ins in plans.of(device).instrs:
        if ins.op == "compute":
            shorts.append(ins.computes.phase + ".".join(str(index) for _, index in ins.part))
    return " ".join(shorts)


def stages(count: int, parts: int) -> list[Directive]:
    return [*(place(at(PP=stage), [stage]) for stage in range(count)), split(at(), parts=parts)]


def test_without_a_place_all_runs_on_device_0() -> None:
    plans = compiled(chain(2))
    assert [plan.devices for plan in plans] == [(0,)]
    assert computes(plans, 0) == "F F B B"


def test_without_an_order_a_pipeline_runs_1f1b() -> None:
    plans = compiled(chain(3), *stages(3, 5))
    assert computes(plans, 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert computes(plans, 1) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert computes(plans, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_an_order_is_kept() -> None:
    gpipe = order(
        [[at(PP=0, PASS="F")], [at(PP=0, MB=i, PASS="B")] if (i := 1) else [], [at(PP=0, MB=0, PASS="B")]]
    )
    assert computes(compiled(chain(1), split(at(), parts=2), gpipe), 0) == "F0 F1 B1 B0"


def test_an_order_made_before_a_split_holds_on_each_part() -> None:
    plans = compiled(chain(2), order([[at(PP=1, PASS="BW")], [at(PP=0, PASS="BI")]]), split(at(), parts=2))
    nodes = [ins.node for ins in plans.of(0).instrs]
    for part in range(2):
        assert nodes.index(f"BW[PP=1 MB={part}]") < nodes.index(f"BI[PP=0 MB={part}]")


def test_an_order_made_before_a_split_of_one_part_of_the_graph() -> None:
    d = Drawing()
    loss = d.chunk("PP=0", pp(0), [X], [d.param("a")], [SCALAR])
    weight = d.chunk("TT=0", (("TT", 0),), [Y], outputs=[SCALAR])
    asked = order([[at(TT=0, PASS="F")], [at(PP=0, PASS="F")]])
    plans = compiled(d.outline(loss, weight), asked, split(at(PP=0), parts=2))
    assert shown(plans.of(0), "compute") == cleandoc("""
        F[TT=0]
        F[PP=0 MB=0]
        B[PP=0 MB=0]
        F[PP=0 MB=1]
        B[PP=0 MB=1]
    """)


def test_an_order_of_a_backward_also_orders_its_halves() -> None:
    plans = compiled(
        chain(1),
        split(at(), parts=2),
        order([[at(MB=1, PASS="B")], [at(MB=0, PASS="B")]]),
        order([[at(PASS="BW")]]),
    )
    assert computes(plans, 0) == "F0 F1 BI1 BW1 BI0 BW0"


def test_backwards_in_halves_where_the_schedule_asks() -> None:
    plans = compiled(chain(2), *stages(2, 2), *zero_bubble(2, 2))
    assert computes(plans, 0) == "F0 F1 BI0 BW0 BI1 BW1"
    assert computes(plans, 1) == "F0 BI0 F1 BI1 BW0 BW1"


def test_members_of_a_group_interleave_and_groups_do_not() -> None:
    row = [[at(PP=0, MB=0), at(PP=0, MB=1)], [at(PP=0, MB=2)]]
    ran = computes(compiled(chain(1), split(at(), parts=3), order(row)), 0)
    assert ran == "F0 B0 F1 B1 F2 B2"


def test_zero_0_reduces_once_and_updates_all() -> None:
    plans = compiled(chain(1, width=4), replicate(at(), [0, 1]), split(at(), parts=2))
    assert shown(plans.of(0), "compute", "accumulate", "all_reduce", "norm", "total", "update") == cleandoc("""
        F[PP=0 MB=0]
        accumulate accumulate[F[PP=0 MB=0] into loss]
        B[PP=0 MB=0]
        accumulate accumulate[B[PP=0 MB=0] into PP=0/0.grad]
        F[PP=0 MB=1]
        accumulate accumulate[F[PP=0 MB=1] into loss]
        B[PP=0 MB=1]
        accumulate accumulate[B[PP=0 MB=1] into PP=0/0.grad]
        all_reduce reduce[PP=0/0 after B[PP=0 MB=1]]
        norm norm[@0,1]
        total total
        update update[@0,1]
    """)


def test_a_gradient_that_stays_on_its_device_begins_the_sum() -> None:
    plan = compiled(chain(1, width=4), split(at(), parts=2)).of(0)
    assert shown(plan, "accumulate") == cleandoc("""
        accumulate accumulate[F[PP=0 MB=0] into loss]
        accumulate accumulate[F[PP=0 MB=1] into loss]
        accumulate accumulate[B[PP=0 MB=1] into PP=0/0.grad]
    """)
    first = next(ins for ins in plan.instrs if ins.node == "B[PP=0 MB=0]")
    assert "PP=0/0.grad" in first.writes


def test_a_scatter_counts_the_memory_it_needs_beside_its_slots() -> None:
    plans = compiled(chain(1, width=4), replicate(at(), [0, 1], zero=2), split(at(), parts=2))
    (bucket,) = plans.buckets.values()
    found = [ins.workspace for ins in plans.of(0).instrs if ins.op == "reduce_scatter"]
    laid_out = 0 if len(bucket.pieces) == 1 else bucket.numel * bucket.itemsize
    assert found == [laid_out, laid_out + bucket.elements() * bucket.itemsize]


def test_zero_3_gathers_two_nodes_ahead_where_one_of_them_holds_nothing_gathered() -> None:
    at_last = replicate(at(PP=2), [0, 1], zero=3)
    plans = compiled(
        chain(3, width=4), replicate(at(PP=0), [0, 1], zero=3), replicate(at(PP=1), [0, 1]), at_last
    )
    assert shown(plans.of(0), "compute", "gather").splitlines()[:5] == [
        "gather gather[PP=0/0 for F[PP=0]]",
        "gather gather[PP=2/0 for F[PP=2]]",
        "F[PP=0]",
        "F[PP=1]",
        "F[PP=2]",
    ]


def test_zero_3_gathers_for_each_run_of_uses_one_node_ahead() -> None:
    plans = compiled(chain(2, width=4), replicate(at(), [0, 1], zero=3))
    assert shown(plans.of(1), "compute", "gather", "reduce_scatter", "update") == cleandoc("""
        gather gather[PP=0/0 for F[PP=0]]
        gather gather[PP=1/0 for F[PP=1]]
        F[PP=0]
        F[PP=1]
        gather gather[PP=0/0 for B[PP=0]]
        B[PP=1]
        B[PP=0]
        reduce_scatter reduce[PP=1/0 after B[PP=1]]
        reduce_scatter reduce[PP=0/0 after B[PP=0]]
        update update[@0,1]
    """)


def test_zero_2_reduces_after_each_run_of_backwards_and_gathers_after_the_update() -> None:
    strategy = [
        replicate(at(PP=0), [0, 1], zero=2),
        replicate(at(PP=1), [2, 3], zero=2),
        split(at(), parts=3),
    ]
    plans = compiled(chain(2, width=4), *strategy, *one_f_one_b(2, 3))
    assert shown(plans.of(0), "compute", "gather", "reduce_scatter", "update") == cleandoc("""
        F[PP=0 MB=0]
        F[PP=0 MB=1]
        B[PP=0 MB=0]
        F[PP=0 MB=2]
        reduce_scatter reduce[PP=0/0 after B[PP=0 MB=0]]
        B[PP=0 MB=1]
        B[PP=0 MB=2]
        reduce_scatter reduce[PP=0/0 after B[PP=0 MB=2]]
        update update[@0,1]
        gather gather[PP=0/0 for update]
    """)


def test_experts_are_counted_and_exchanged() -> None:
    strategy = [replicate(at(), range(4)), shard(at(EP=0), range(4), ways=2)]
    plans = compiled(chain(1, width=4, experts=4), *strategy)
    assert shown(plans.of(0), "compute", "counts", "exchange") == cleandoc("""
        F[PP=0]
        counts counts[PP=0 EP=0 route]
        F[PP=0 EP=0 route]
        F[PP=0 EP=0]
        F[PP=0 EP=0 unroute]
        F[PP=0 #1]
        B[PP=0 #1]
        B[PP=0 EP=0 unroute]
        B[PP=0 EP=0]
        B[PP=0 EP=0 route]
        B[PP=0]
    """)
    comms = {ins.comm for ins in plans.of(0).instrs if ins.op in ("counts", "exchange")}
    assert comms == {"0,1x2:exchange"}
    assert plans.comms["0,1x2:exchange"].groups == ((0, 1), (2, 3))
    assert plans.buckets["PP=0 EP=0/0"].groups == ((0, 2), (1, 3))


def test_clipping_makes_the_update_wait_for_the_norm() -> None:
    for clip in (False, True):
        update = next(ins for ins in compiled(chain(1), clip=clip).of(0).instrs if ins.op == "update")
        assert ("total" in update.reads) == clip


def test_streams_as_asked() -> None:
    plans = compiled(
        chain(2, width=4, experts=2),
        replicate(at(PP=0), [0, 1], zero=1, reduce_stream="dp", gather_stream="ag"),
        place(at(PP=1), [2, 3], stream="pp"),
        shard(at(EP=0), [0, 1], stream="ep"),
    )
    streams = {ins.op: ins.stream for ins in plans.of(0).instrs}
    assert streams["send"] == "pp.send" and streams["recv"] == "recv"
    assert (streams["reduce_scatter"], streams["gather"], streams["exchange"]) == ("dp", "ag", "ep")


def test_buckets_hold_at_most_what_was_asked() -> None:
    plans = compiled(chain(1, width=256, layers=5), replicate(at(), [0, 1], bucket_mb=0.5))
    assert [[piece.name for piece in bucket.pieces] for bucket in plans.buckets.values()] == [
        ["stages.0.0", "stages.0.1"],
        ["stages.0.2", "stages.0.3"],
        ["stages.0.4"],
    ]
    assert [piece.offset for piece in plans.buckets["PP=0/1"].pieces] == [0, 256 * 256]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("int64", 8), ("float8_e4m3fn", 1), ("complex64", 8), ("bool", 1)],
)
def test_the_bytes_of_an_element(dtype: str, size: int) -> None:
    assert itemsize(dtype) == size


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    code = cleandoc("""
        from piper.directives import *
        from piper.directives import apply
        from tests.chain import chain
        from piper.ir.graph import start
        from piper.ir.select import at
        from tests.lower.lowering import lower
        from piper.plan.text import show_plans
        strategy = [replicate(at(PP=0), [0, 1], zero=2), replicate(at(PP=1), [1, 2, 3, 4], zero=3)]
        strategy += [shard(at(EP="*", PP=1), [1, 2, 3, 4], ways=2), place(at(PP=2), [0, 3])]
        strategy += [replicate(at(EP=None, PP=1), [1, 2, 3, 4], zero=1), place(at(PP=1), [1, 2]), split(at(), parts=3)]
        print(show_plans(lower(apply(start(chain(3, width=4, experts=4, tied=True)), strategy))[0]))
    """)
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(texts) == 1 and len(texts.pop()) > 1000


@pytest.mark.parametrize("ordered", [True, False])
def test_parts_that_write_a_buffer_stay_in_step(ordered: bool) -> None:
    outline = chain(1, experts=4)
    first, *rest = outline.chunks
    spec = replace(first.phases["F"], buffers=("seen",))
    phases = {**first.phases, "F": spec}
    first = replace(first, buffers=("seen",), mutated=("seen",), phases=phases)
    buffer = Buffer(name="seen", shape=(4,), dtype="int64", nbytes=32)
    outline = replace(outline, chunks=(first, *rest), buffers=(buffer,))
    strategy: list[Directive] = [
        replicate(at(), [0, 1]),
        shard(at(EP="*"), [0, 1]),
        split(at(), parts=4),
        *(gpipe(1, 4) if ordered else []),
    ]
    plans = compiled(outline, *strategy)
    forwards = [
        ins.part for ins in plans.of(0).instrs if ins.run == Pass(phase="F", chunk="PP=0", part=ins.part)
    ]
    assert forwards == [(("MB", part),) for part in range(4)]
    if ordered:  # each part's pieces come before the next part's
        pieces = [
            ins.part[0][1] for ins in plans.of(0).instrs if ins.op == "compute" and ins.computes.phase == "F"
        ]
        assert pieces == sorted(pieces)


def test_a_pair_with_experts_interleaves_region_by_region() -> None:
    """Rows of one direction travel while the other computes, also while the host learns their number."""
    homes = [[0, 1], [2, 3], [2, 3], [0, 1]]
    strategy: list[Directive] = [replicate(at(PP=stage), home) for stage, home in enumerate(homes)]
    strategy += [shard(at(PP=stage, EP="*"), home) for stage, home in enumerate(homes)]
    plans = compiled(chain(4, experts=4), *strategy, split(at(), parts=8), *dualpipe_v(2, 8))
    lines = shown(plans.of(0), "compute", "counts", "exchange")
    first, last = "B[PP=3 #1 MB=3]", "F[PP=0 #1 MB=5]"
    assert lines[lines.index(first) : lines.index(last) + len(last)] == cleandoc("""
        B[PP=3 #1 MB=3]
        B[PP=3 EP=3 unroute MB=3]
        F[PP=0 MB=5]
        counts counts[PP=0 EP=0 route MB=5]
        B[PP=3 EP=3 MB=3]
        F[PP=0 EP=0 route MB=5]
        B[PP=3 EP=3 route MB=3]
        F[PP=0 EP=0 MB=5]
        F[PP=0 EP=0 unroute MB=5]
        B[PP=3 MB=3]
        F[PP=0 #1 MB=5]
    """)
