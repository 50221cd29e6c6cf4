"""The proof: it accepts what lowering makes, and finds whatever is spoilt afterwards."""

from collections.abc import Callable
from dataclasses import replace
from inspect import cleandoc

import pytest

from piper.directives import apply, replicate, shard, split
from piper.ir.graph import start
from piper.ir.select import at
from piper.plan.instr import Instr
from piper.plan.plan import Comm, Plan, Plans, Slot
from piper.plan.prove import ProofError, prove
from piper.schedules import one_f_one_b
from tests.chain import chain
from tests.lower.lowering import lower
from tests.slots import slot, slots


def pipeline() -> Plans:
    """Two stages of two devices, two microbatches, 1F1B."""
    strategy = [replicate(at(PP=0), [0, 1], zero=2), replicate(at(PP=1), [2, 3]), split(at(), parts=2)]
    return lower(apply(start(chain(2, width=8)), [*strategy, *one_f_one_b(2, 2)]))[0]


def experts() -> Plans:
    """Two stages of two devices with divided experts, two microbatches, zero=3."""
    strategy = [split(at(), parts=2)]
    for stage in range(2):
        devices = [2 * stage, 2 * stage + 1]
        strategy += [replicate(at(PP=stage), devices, zero=3), shard(at(EP=stage), devices)]  # type: ignore[list-item]
    return lower(apply(start(chain(2, width=8, experts=4)), strategy))[0]


def spoilt(plans: Plans, device: int, change: Callable[[list[Instr]], object]) -> str:
    """What the proof says once one device's instructions are changed."""
    edited = []
    for plan in plans:
        instrs = list(plan.instrs)
        if device in plan.devices:
            change(instrs)
        edited.append(replace(plan, instrs=tuple(instrs)))
    with pytest.raises(ProofError) as caught:
        prove(replace(plans, plans=tuple(edited)))
    return str(caught.value)


def find(instrs: list[Instr], op: str, node: str) -> int:
    """The place of an instruction."""
    return next(i for i, ins in enumerate(instrs) if ins.op == op and node in ins.node)


def test_what_lowering_makes_is_proven() -> None:
    prove(pipeline())
    prove(experts())


def test_a_dropped_wait() -> None:
    def drop(instrs: list[Instr]) -> None:
        place = find(instrs, "compute", "B[PP=0 MB=0]")
        instrs[place] = replace(instrs[place], waits=())

    assert spoilt(pipeline(), 0, drop) == cleandoc("""
        the plans cannot be proven:
        B[PP=0 MB=0] reads PP=1.din0@0,1[MB=0] without waiting for who writes it, at 6
                4  compute        F[PP=0 MB=1]
                5  send           transfer[PP=0.out0[MB=1] @0,1 -> @2,3]
                6  recv           transfer[PP=1.din0[MB=0] @2,3 -> @0,1]
        -->     7  compute        B[PP=0 MB=0]
                8  accumulate     accumulate[B[PP=0 MB=0] into PP=0/0.grad[B[PP=0 MB=0]]]
                9  recv           transfer[PP=1.din0[MB=1] @2,3 -> @0,1]
               10  compute        B[PP=0 MB=1]
        B[PP=0 MB=0] frees PP=1.din0@0,1[MB=0] while transfer[PP=1.din0[MB=0] @2,3 -> @0,1] may still use it
                4  compute        F[PP=0 MB=1]
                5  send           transfer[PP=0.out0[MB=1] @0,1 -> @2,3]
                6  recv           transfer[PP=1.din0[MB=0] @2,3 -> @0,1]
        -->     7  compute        B[PP=0 MB=0]
                8  accumulate     accumulate[B[PP=0 MB=0] into PP=0/0.grad[B[PP=0 MB=0]]]
                9  recv           transfer[PP=1.din0[MB=1] @2,3 -> @0,1]
               10  compute        B[PP=0 MB=1]
    """)


def test_a_gather_that_could_run_ahead() -> None:
    def drop(instrs: list[Instr]) -> None:
        place = find(instrs, "gather", "for B[PP=0 MB=0]")
        instrs[place] = replace(instrs[place], waits=())

    sharded = [replicate(at(), [0, 1], zero=3), split(at(), parts=2)]
    plans = lower(apply(start(chain(2, width=8)), [*sharded]))[0]
    assert "gather[PP=0/0 for B[PP=0 MB=0]] may run ahead of F[PP=1 MB=0] and fill the memory" in spoilt(
        plans, 0, drop
    )


@pytest.mark.parametrize("make", [pipeline, experts])
def test_every_single_wait_is_needed(make: Callable[[], Plans]) -> None:
    plans = make()
    assert sum(len(ins.waits) for plan in plans for ins in plan.instrs) > 10
    for plan in plans:
        for place, ins in enumerate(plan.instrs):
            for event in ins.waits:
                fewer = replace(ins, waits=tuple(other for other in ins.waits if other != event))

                def drop(instrs: list[Instr], place: int = place, fewer: Instr = fewer) -> None:
                    instrs[place] = fewer

                assert ins.node in spoilt(plans, plan.devices[0], drop)


def test_two_sends_swapped() -> None:
    def swap(instrs: list[Instr]) -> None:
        first, second = (i for i, ins in enumerate(instrs) if ins.op == "send")
        instrs[first], instrs[second] = instrs[second], instrs[first]

    assert cleandoc("""
        on 0,1>2,3, operation 0: device 0 does transfer transfer[PP=0.out0[MB=1] @0,1 -> @2,3] of 32 bytes, \
device 2 does transfer transfer[PP=0.out0[MB=0] @0,1 -> @2,3] of 32 bytes
    """) in spoilt(pipeline(), 0, swap)


def test_a_slot_freed_early() -> None:
    def move(instrs: list[Instr]) -> None:
        late, early = find(instrs, "compute", "B[PP=0 MB=0]"), find(instrs, "compute", "F[PP=0 MB=1]")
        saved = slot("PP=0.saved[MB=0]")
        instrs[late] = replace(instrs[late], frees=tuple(s for s in instrs[late].frees if s != saved))
        instrs[early] = replace(instrs[early], frees=(*instrs[early].frees, saved))

    assert spoilt(pipeline(), 0, move) == cleandoc("""
        the plans cannot be proven:
        B[PP=0 MB=0] reads PP=0.saved[MB=0], freed at 4
                4  compute        F[PP=0 MB=1]
                5  send           transfer[PP=0.out0[MB=1] @0,1 -> @2,3]
                6  recv           transfer[PP=1.din0[MB=0] @2,3 -> @0,1]
        -->     7  compute        B[PP=0 MB=0]
                8  accumulate     accumulate[B[PP=0 MB=0] into PP=0/0.grad[B[PP=0 MB=0]]]
                9  recv           transfer[PP=1.din0[MB=1] @2,3 -> @0,1]
               10  compute        B[PP=0 MB=1]
    """)


def test_a_slot_freed_while_another_stream_uses_it() -> None:
    def move(instrs: list[Instr]) -> None:
        send, compute = find(instrs, "send", "out0[MB=0]"), find(instrs, "compute", "F[PP=0 MB=1]")
        instrs[send] = replace(instrs[send], frees=())
        instrs[compute] = replace(instrs[compute], frees=slots("PP=0.out0[MB=0]"))

    said = "F[PP=0 MB=1] frees PP=0.out0[MB=0] while transfer[PP=0.out0[MB=0] @0,1 -> @2,3] may still use it"
    assert said in spoilt(pipeline(), 0, move)


def test_a_slot_freed_twice() -> None:
    def again(instrs: list[Instr]) -> None:
        place = find(instrs, "compute", "B[PP=0 MB=1]")
        instrs[place] = replace(instrs[place], frees=(*instrs[place].frees, slot("PP=0.saved[MB=0]")))

    assert "B[PP=0 MB=1] frees PP=0.saved[MB=0], freed at 7" in spoilt(pipeline(), 0, again)


def test_a_slot_never_freed() -> None:
    def keep(instrs: list[Instr]) -> None:
        place = find(instrs, "compute", "B[PP=0 MB=1]")
        instrs[place] = replace(instrs[place], frees=instrs[place].frees[1:])

    assert "load[x MB=1 @0,1] writes batch.x@0,1[MB=1], which is never freed" in spoilt(pipeline(), 0, keep)


def test_a_resident_freed_or_a_slot_nobody_wrote() -> None:
    def free(instrs: list[Instr]) -> None:
        instrs[-1] = replace(instrs[-1], frees=slots("PP=0/0.param", "nothing"))

    said = spoilt(pipeline(), 0, free)
    assert "gather[PP=0/0 for update] frees PP=0/0.param, which outlives the step" in said
    assert "gather[PP=0/0 for update] frees nothing.out0, which nothing has written" in said


def test_a_dropped_receive() -> None:
    said = spoilt(pipeline(), 2, lambda instrs: instrs.pop(find(instrs, "recv", "out0[MB=1]")))
    assert "F[PP=1 MB=1] reads PP=0.out0@2,3[MB=1], which nothing has written" in said
    assert "F[PP=1 MB=1] waits for event 3, which nothing before it signals" in said
    assert (
        "on 0,1>2,3, operation 1: device 0 does transfer transfer[PP=0.out0[MB=1] @0,1 -> @2,3] of 32 bytes, "
        "device 2 does nothing"
    ) in said


def test_an_event_signalled_twice() -> None:
    def repeat(instrs: list[Instr]) -> None:
        first, then = find(instrs, "load", "MB=0"), find(instrs, "load", "MB=1")
        instrs[then] = replace(instrs[then], signals=instrs[first].signals)

    assert "load[x MB=1 @0,1] signals event 0, which is signalled already" in spoilt(pipeline(), 0, repeat)


def test_a_write_while_another_stream_reads() -> None:
    def rush(instrs: list[Instr]) -> None:
        update = instrs.pop(find(instrs, "update", "update"))
        instrs.insert(find(instrs, "gather", "for F[PP=0 MB=0]") + 1, replace(update, reads=(), frees=()))

    said = "update[@0,1] writes PP=0/0.param while gather[PP=0/0 for F[PP=0 MB=0]] may still use it"
    assert said in spoilt(experts(), 0, rush)


def test_a_circle_through_two_communicators() -> None:
    def plan(device: int, *nodes: str) -> Plan:
        instrs = [Instr(op="total", node=node, stream=node, comm=node) for node in nodes]
        return Plan(devices=(device,), instrs=tuple(instrs), slots={}, residents={})

    comms = {name: Comm(name=name, kind="groups", groups=((0, 1),)) for name in "abc"}
    plans = Plans(
        plans=(plan(0, "c", "a", "b"), plan(1, "c", "b", "a")),
        comms=comms,
        buckets={},
        seed=1.0,
        weighted=False,
    )
    with pytest.raises(ProofError) as caught:
        prove(plans)
    assert str(caught.value) == cleandoc("""
        the plans cannot be proven:
        these wait for each other in a circle:
          total a on 0
          total b on 0
    """)


def test_two_receives_swapped() -> None:
    def swap(instrs: list[Instr]) -> None:
        first, second = (i for i, ins in enumerate(instrs) if ins.op == "recv")
        a, b = instrs[first], instrs[second]
        instrs[first], instrs[second] = replace(b, signals=a.signals), replace(a, signals=b.signals)

    assert (
        "on 2,3>0,1, operation 0: device 2 does transfer transfer[PP=1.din0[MB=0] @2,3 -> @0,1] of 32 bytes, "
        "device 0 does transfer transfer[PP=1.din0[MB=1] @2,3 -> @0,1] of 32 bytes"
    ) in spoilt(pipeline(), 0, swap)


def test_two_communications_issued_in_another_order_on_one_device() -> None:
    """Each communicator alone is in order, but the receive waits for what follows from the send."""

    def swap(instrs: list[Instr]) -> None:
        receive = find(instrs, "recv", "transfer[PP=1.din0[MB=0]")
        instrs.insert(find(instrs, "send", "out0[MB=0]"), instrs.pop(receive))

    assert spoilt(pipeline(), 0, swap) == cleandoc("""
        the plans cannot be proven:
        these wait for each other in a circle:
          recv transfer[PP=1.din0[MB=0] @2,3 -> @0,1] on 0
          send transfer[PP=0.out0[MB=0] @0,1 -> @2,3] on 0
          load load[x MB=1 @0,1] on 0
          compute F[PP=0 MB=1] on 0
          send transfer[PP=0.out0[MB=1] @0,1 -> @2,3] on 0
          compute B[PP=1 MB=0] on 2
          accumulate accumulate[B[PP=1 MB=0] into PP=1/0.grad] on 2
    """)


def test_a_communicator_that_is_missing_foreign_or_on_two_streams() -> None:
    def change(**fields: object) -> Callable[[list[Instr]], None]:
        def edit(instrs: list[Instr]) -> None:
            place = find(instrs, "send", "out0[MB=1]")
            instrs[place] = replace(instrs[place], **fields)  # type: ignore[arg-type]

        return edit

    assert "transfer[PP=0.out0[MB=1] @0,1 -> @2,3]: send without a communicator" in spoilt(
        pipeline(), 0, change(comm=None)
    )
    assert "there is no communicator nowhere" in spoilt(pipeline(), 0, change(comm="nowhere"))
    assert "device 0 uses 2,3>0,1 but is not in it" in spoilt(pipeline(), 0, change(comm="2,3>0,1"))
    assert (
        "0,1>2,3 is used on two streams, send and other, by transfer[PP=0.out0[MB=1] @0,1 -> @2,3]"
    ) in spoilt(pipeline(), 0, change(stream="other"))


def test_a_slot_without_a_size() -> None:
    plans = pipeline()
    first = replace(plans.plans[0], slots={k: v for k, v in plans.plans[0].slots.items() if "saved" not in k})
    with pytest.raises(ProofError, match=r"F\[PP=0 MB=0\] writes PP=0.saved\[MB=0\], which has no size"):
        prove(replace(plans, plans=(first, *plans.plans[1:])))


def test_a_storage_is_free_only_when_all_who_share_it_are_done() -> None:
    sizes = {slot(name): Slot(nbytes=0, shares=((slot("PP=0.storage0"), 8),)) for name in ("a", "b")}
    instrs = [
        Instr(op="compute", node="make", stream="compute", writes=slots("a", "b"), signals=0),
        Instr(
            op="send",
            node="send",
            stream="send",
            reads=slots("a"),
            frees=slots("a"),
            waits=(0,),
            comm="c",
            signals=1,
        ),
        Instr(op="compute", node="use", stream="compute", reads=slots("b"), frees=slots("b"), waits=(1,)),
    ]
    other = Plan(
        devices=(1,),
        instrs=(Instr(op="recv", node="send", stream="recv", writes=slots("a"), frees=slots("a"), comm="c"),),
        slots={slot("a"): Slot(nbytes=8)},
        residents={},
    )
    plan = Plan(devices=(0,), instrs=tuple(instrs), slots=sizes, residents={})
    comm = Comm(name="c", kind="pairs", groups=((0, 1),))
    plans = Plans(plans=(plan, other), comms={"c": comm}, buckets={}, seed=1.0, weighted=False)
    prove(plans)

    def rush(instrs: list[Instr]) -> None:
        instrs[2] = replace(instrs[2], waits=())

    assert "use frees PP=0.storage0 while send may still use it" in spoilt(plans, 0, rush)
