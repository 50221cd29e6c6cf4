"""Memory along a plan: what is held, storage by storage, and where it peaks."""

from dataclasses import replace

from piper.directives import Directive, apply, place, replicate, split
from piper.ir.graph import start
from piper.ir.ids import SlotId
from piper.ir.select import at
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.memory_timeline import timeline
from piper.plan.plan import Plan, Slot
from piper.plan.updates import Piece
from piper.schedules import gpipe, one_f_one_b
from tests.chain import chain
from tests.lower.lowering import lower
from tests.slots import slot, slots


def plan_of(*instrs: Instr, **held: Slot) -> Plan:
    sizes = {slot(name): size for name, size in held.items()}
    return Plan(devices=(0,), instrs=instrs, slots=sizes, residents={slot("w"): Slot(nbytes=100)})


def held_at(plan: Plan, place: int) -> int:
    """Return the bytes that are held while an instruction runs, by the slots that are live then."""
    live: set[SlotId] = set()
    for ins in plan.instrs[:place]:
        live = (live | {*ins.writes}) - {*ins.frees}
    live |= {*plan.instrs[place].writes}
    slots = [plan.slots[each] for each in live if each in plan.slots]
    shared = {storage: nbytes for each in slots for storage, nbytes in each.shares}
    resident = sum(each.nbytes for each in plan.residents.values())
    own = sum(each.nbytes for each in slots) + sum(shared.values())
    return resident + own + plan.instrs[place].workspace


def test_slots_count_from_their_first_write_to_their_end() -> None:
    found = timeline(
        plan_of(
            Instr(
                op="compute",
                node="f",
                stream="compute",
                reads=slots("w"),
                writes=slots("a", "b"),
                workspace=7,
            ),
            Instr(
                op="compute",
                node="g",
                stream="compute",
                reads=slots("a"),
                writes=slots("c"),
                frees=slots("a"),
            ),
            Instr(
                op="accumulate",
                node="h",
                stream="compute",
                reads=slots("b", "c"),
                writes=slots("c"),
                frees=slots("b", "c"),
            ),
            a=Slot(nbytes=10),
            b=Slot(nbytes=20),
            c=Slot(nbytes=40),
        )
    )
    assert found.resident == 100
    assert found.live == (137, 170, 160)
    assert (found.peak, found.peak_at) == (170, 1)


def test_a_shared_storage_counts_once_until_its_last_slot_is_freed() -> None:
    found = timeline(
        plan_of(
            Instr(op="compute", node="f", stream="compute", writes=slots("a", "b"), workspace=1),
            Instr(op="send", node="s", stream="send", reads=slots("a"), frees=slots("a")),
            Instr(op="compute", node="g", stream="compute", reads=slots("b"), frees=slots("b")),
            a=Slot(nbytes=1, shares=((slot("PP=0.storage0"), 50),)),
            b=Slot(nbytes=0, shares=((slot("PP=0.storage0"), 50),)),
        )
    )
    assert found.live == (152, 151, 150)


def test_of_equal_peaks_the_first_is_told() -> None:
    instrs = [
        Instr(op="compute", node=name, stream="compute", writes=slots(name), frees=slots(name))
        for name in "ab"
    ]
    found = timeline(plan_of(*instrs, a=Slot(nbytes=10), b=Slot(nbytes=10)))
    assert (found.live, found.peak_at) == ((110, 110), 0)


def test_only_a_sharded_bucket_is_padded() -> None:
    whole = Bucket(
        name="b",
        pieces=(Piece(name="w", shape=(5,), offset=0),),
        devices=(0, 1),
        groups=((0, 1),),
        chunks=("PP=0",),
        dtype="float32",
        itemsize=4,
    )
    assert (whole.nbytes, whole.padded, whole.elements()) == (20, 6, 5)
    sharded = replace(whole, zero=1)
    assert (sharded.nbytes, sharded.elements()) == (24, 3)


def test_a_plan_without_instructions_holds_what_is_resident() -> None:
    found = timeline(plan_of())
    assert (found.peak, found.live) == (100, ())


def peaks(*strategy: Directive) -> list[int]:
    plans, _ = lower(apply(start(chain(4, width=64, rows=64)), strategy))
    found = [timeline(plan) for plan in plans]
    for one, plan in zip(found, plans, strict=True):
        assert held_at(plan, one.peak_at) == one.peak == max(one.live)
    return [one.peak - one.resident for one in found]


def test_1f1b_holds_less_than_gpipe() -> None:
    pipeline = [*(place(at(PP=stage), [stage]) for stage in range(4)), split(at(), parts=16)]
    piled, in_turn = peaks(*pipeline, *gpipe(4, 16)), peaks(*pipeline, *one_f_one_b(4, 16))
    assert all(mine < other for mine, other in zip(in_turn, piled, strict=True))
    assert sorted(in_turn, reverse=True) == in_turn
    assert peaks(*pipeline) == in_turn  # what the compiler picks is 1f1b


def test_zero_holds_less_and_less_between_steps() -> None:
    held = []
    for zero in range(4):
        plans, _ = lower(apply(start(chain(2, width=64)), [replicate(at(), range(4), zero=zero)]))
        held.append(timeline(plans.of(0)).resident)
    params, state = 2 * 64 * 64 * 4, 2 * 64 * 64 * 8
    extra = 8 + 24  # the seed and the total
    assert held == [
        params + state + extra,
        params + state // 4 + extra,
        params + state // 4 + extra,
        params // 4 + state // 4 + extra,
    ]
