"""Plans that offload activations: a copy left out, not waited for or read in the wrong place is refused."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from piper.directives import offload, protect, remat, replicate, split
from piper.ir.ids import SlotId
from piper.ir.select import at
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.plan.text import read_plans, show_plans
from piper.proof.values import value_problems
from piper.schedules import gpipe, zero_bubble
from tests.chain import chain
from tests.proof.plans import Made, made
from tests.proof.test_protected import each, refused

STAGES = [replicate(at(PP=0), [0, 1], zero=3), replicate(at(PP=1), [2, 3], zero=1)]


@cache
def saved() -> Made:
    """Two stages of two devices, whose activations are on the host between forward and backward."""
    asked = offload(at(), least_mb=0)
    return made(chain(2, width=8), [*STAGES, split(at(), parts=4), *gpipe(2, 4), asked])


@cache
def halves() -> Made:
    """Backwards in halves, which read what is saved at different times."""
    asked = offload(at(PP=1), least_mb=0)
    stages = [replicate(at(PP=stage), [stage]) for stage in range(3)]
    return made(chain(3, width=8), [*stages, split(at(), parts=5), *zero_bubble(3, 5), asked])


@cache
def inputs() -> Made:
    """Stages that run their forwards a second time, from inputs that were on the host."""
    again = remat(at(), 1, across="PP")
    return made(
        chain(2, width=8), [*STAGES, split(at(), parts=4), *gpipe(2, 4), again, offload(at(), least_mb=0)]
    )


@cache
def state() -> Made:
    """A stage of two devices whose optimizer state is on the host, in two buckets, and another without."""
    stages = [replicate(at(PP=0), [0, 1], zero=1, bucket_mb=1e-4), replicate(at(PP=1), [2, 3])]
    strategy = [*stages, split(at(), parts=2), offload(at(PP=0), what="optimizer"), protect(at())]
    return made(chain(2, width=8, layers=2), strategy)


def moves(ins: Instr) -> bool:
    return ins.op in ("offload", "fetch")


def without_waits(plans: Plans) -> Iterator[tuple[str, Plans]]:
    """Plans in which a copy does not wait for one of its events, or something else not for a copy."""
    for number, plan in enumerate(plans):
        events = {ins.signals: ins for ins in plan.instrs if ins.signals is not None}
        for place, ins in enumerate(plan.instrs):
            for event in ins.waits:
                if moves(ins) or moves(events[event]):
                    left = replace(ins, waits=tuple(other for other in ins.waits if other != event))
                    instrs = (*plan.instrs[:place], left, *plan.instrs[place + 1 :])
                    every = [*plans.plans]
                    every[number] = replace(plan, instrs=instrs)
                    yield f"{ins.node} without {events[event].node}", replace(plans, plans=tuple(every))


def from_the_host(plans: Plans) -> Iterator[Plans]:
    """Plans in which a backward reads a copy on the host itself."""
    for plan in plans:
        source = {
            made: read
            for ins in plan.instrs
            if ins.op == "fetch"
            for read, made in zip(ins.reads, ins.writes, strict=False)
        }
        names: set[SlotId] = {*source}

        def reads_it(ins: Instr, names: set[SlotId] = names) -> bool:
            return ins.op == "compute" and not names.isdisjoint(ins.reads)

        def changed(ins: Instr, source: dict[SlotId, SlotId] = source) -> Instr:
            return replace(ins, reads=tuple(source.get(name, name) for name in ins.reads))

        yield from each(plans, reads_it, changed)


def mutants(plans: Plans) -> Iterator[tuple[str, Plans]]:
    def named(what: str, found: Iterator[Plans]) -> Iterator[tuple[str, Plans]]:
        for number, mutant in enumerate(found):
            yield f"{what} {number}", mutant

    def first(plan_ins: Instr) -> tuple[SlotId, ...]:
        return plan_ins.reads[::-1] if len(plan_ins.reads) > 1 else ()

    yield from named("copy left out", each(plans, moves, lambda ins: None))
    yield from without_waits(plans)
    yield from named("reads others", each(plans, moves, lambda ins: replace(ins, reads=first(ins))))
    yield from named("writes nothing", each(plans, moves, lambda ins: replace(ins, writes=())))
    freeing = each(plans, lambda ins: moves(ins) and bool(ins.frees), lambda ins: replace(ins, frees=()))
    yield from named("not freed", freeing)
    yield from named("read on the host", from_the_host(plans))
    yield from named(
        "updated without its state",
        each(
            plans,
            lambda ins: ins.op == "update" and any(slot.kind == "fetched" for slot in ins.reads),
            lambda ins: replace(ins, reads=tuple(slot for slot in ins.reads if slot.kind != "fetched")),
        ),
    )


def test_every_mutant_is_refused() -> None:
    found = [
        (name, mutant, one)
        for one in (saved(), halves(), inputs(), state())
        for name, mutant in mutants(one[0])
    ]
    accepted = [name for name, mutant, one in found if refused(mutant, one) is None]
    assert accepted == []
    assert len(found) == 292


def test_the_plans_themselves_are_accepted_and_survive_as_text() -> None:
    for one in (saved(), halves(), inputs(), state()):
        assert refused(one[0], one) is None
        assert read_plans(show_plans(one[0])) == one[0]
        assert any(ins.op == "fetch" for plan in one[0] for ins in plan.instrs)


def test_a_read_of_a_host_copy_is_named() -> None:
    plans, graph = saved()
    kept = [
        replace(plan, instrs=tuple(replace(ins, frees=()) for ins in plan.instrs)) for plan in plans
    ]  # so that the copy is still there
    problem = next(value_problems(next(from_the_host(replace(plans, plans=tuple(kept)))), graph))
    assert "reads PP=0.saved.host[MB=0], which holds PP=0.saved.host[MB=0], on the host" in problem
