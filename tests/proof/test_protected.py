"""Plans that protect the state: a copy left out, made too late or kept in the wrong place is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from piper.directives import Directive, protect, replicate, split
from piper.ir.ids import SlotId
from piper.ir.select import at
from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans
from piper.plan.protected import survival
from piper.plan.prove import ProofError, prove
from piper.plan.text import read_plans, show_plans
from piper.proof.values import value_problems
from tests.chain import chain
from tests.lower.outlines import normed
from tests.proof.plans import Made, made

STAGES = [replicate(at(PP=0), [0, 1], zero=2), replicate(at(PP=1), [2, 3]), split(at(), parts=2)]


@cache
def machines() -> Made:
    """Two stages of two devices, the first one sharded, each a machine: the copies go to the other."""
    return made(chain(2, width=8), [*STAGES, protect(at(), copies=1, devices_per_machine=2)])


@cache
def buffers() -> Made:
    """Two replicas with buffers that a step writes, on one machine."""
    return made(normed(), [replicate(at(), [0, 1], zero=1), protect(at())])


def edited(plans: Plans, change: Callable[[Plan], Plan]) -> Plans:
    return replace(plans, plans=tuple(map(change, plans.plans)))


def each(
    plans: Plans, wanted: Callable[[Instr], bool], new: Callable[[Instr], Instr | None]
) -> Iterator[Plans]:
    """Plans in which one instruction of some kind is changed, or left out where the change is None."""
    for number, plan in enumerate(plans):
        for place, ins in enumerate(plan.instrs):
            if wanted(ins):
                found = new(ins)
                kept = (*plan.instrs[:place], *([found] if found else []), *plan.instrs[place + 1 :])
                every = [*plans.plans]
                every[number] = replace(plan, instrs=kept)
                yield replace(plans, plans=tuple(every))


def mutants(plans: Plans) -> Iterator[tuple[str, Plans]]:
    def named(what: str, found: Iterator[Plans]) -> Iterator[tuple[str, Plans]]:
        for number, mutant in enumerate(found):
            yield f"{what} {number}", mutant

    def is_protect(ins: Instr) -> bool:
        return ins.op == "protect"

    def is_mirror(ins: Instr) -> bool:
        return ins.op == "mirror"

    yield from named("copy left out", each(plans, is_protect, lambda ins: None))
    for number, plan in enumerate(plans):
        events = {ins.signals for ins in plan.instrs if is_protect(ins) and ins.signals is not None}
        for place, ins in enumerate(plan.instrs):
            if not events.isdisjoint(ins.waits):
                left = replace(ins, waits=tuple(event for event in ins.waits if event not in events))
                instrs = (*plan.instrs[:place], left, *plan.instrs[place + 1 :])
                every = [*plans.plans]
                every[number] = replace(plan, instrs=instrs)
                yield f"wait dropped from {ins.node}", replace(plans, plans=tuple(every))
    yield from named(
        "event not signalled",
        each(
            plans,
            lambda ins: is_protect(ins) and ins.signals is not None,
            lambda ins: replace(ins, signals=None),
        ),
    )
    yield from named(
        "without its optimizer state",
        each(
            plans,
            lambda ins: is_protect(ins) and any(slot.kind == "state" for slot in ins.reads),
            lambda ins: replace(ins, reads=tuple(slot for slot in ins.reads if slot.kind != "state")),
        ),
    )
    yield from named("reads nothing", each(plans, is_protect, lambda ins: replace(ins, reads=())))
    yield (
        "copied last",
        edited(plans, lambda plan: replace(plan, instrs=tuple(sorted(plan.instrs, key=is_protect)))),
    )
    yield "not said how", replace(plans, protection=None)
    yield from named(
        "not sent",
        each(
            plans,
            lambda ins: is_mirror(ins) and bool(ins.reads),
            lambda ins: replace(ins, reads=ins.reads[1:]),
        ),
    )
    yield from named("not mirrored", each(plans, is_mirror, lambda ins: None))
    if any(is_mirror(ins) for plan in plans for ins in plan.instrs):
        yield (
            "mirrored nowhere",
            edited(
                plans,
                lambda plan: replace(plan, instrs=tuple(ins for ins in plan.instrs if not is_mirror(ins))),
            ),
        )
        (name,) = {ins.comm for plan in plans for ins in plan.instrs if is_mirror(ins)}
        assert name is not None
        inside = replace(plans.comms[name], groups=((0, 1), (2, 3)))
        yield "sent within a machine", replace(plans, comms={**plans.comms, name: inside})
        assert plans.protection is not None
        yield "one machine", replace(plans, protection=replace(plans.protection, devices_per_machine=4))
        yield (
            "sent before it is copied",
            edited(
                plans,
                lambda plan: replace(plan, instrs=tuple(sorted(plan.instrs, key=lambda i: not is_mirror(i)))),
            ),
        )


def refused(plans: Plans, graph: Made) -> str | None:
    try:
        prove(plans)
    except ProofError as error:
        return str(error)
    return next(value_problems(plans, graph[1]), None)


def test_every_mutant_is_refused() -> None:
    found = [(name, mutant, from_) for from_ in (machines(), buffers()) for name, mutant in mutants(from_[0])]
    accepted = [name for name, mutant, from_ in found if refused(mutant, from_) is None]
    assert accepted == []
    assert len(found) == 43


def test_the_plans_themselves_are_accepted_and_survive_as_text() -> None:
    for from_ in (machines(), buffers()):
        assert refused(from_[0], from_) is None
        assert read_plans(show_plans(from_[0])) == from_[0]


def test_a_counterexample_names_the_parameter() -> None:
    plans, _ = machines()
    without = edited(
        plans,
        lambda plan: replace(plan, instrs=tuple(ins for ins in plan.instrs if ins.op != "mirror")),
    )
    with pytest.raises(ProofError) as caught:
        prove(without)
    assert str(caught.value).splitlines()[-2:] == [
        "stages.0.0 is lost with the machine of devices 0,1: no other machine holds a copy of these elements of PP=0/0.param",
        "stages.1.0 is lost with the machine of devices 2,3: no other machine holds a copy of these elements of PP=1/0.param",
    ]


def test_what_a_job_survives() -> None:
    found = survival(machines()[0])
    assert found is not None and (found.machines, found.losable) == (2, (0, 1))
    assert str(survival(buffers()[0])) == (
        "survives: any worker; no machine (copies=0); host memory 480 B per machine"
    )


def test_replicas_make_the_second_copy_where_they_are_far_enough_away() -> None:
    """Only the shards of the first stage, which one machine holds, are sent."""
    stages: list[Directive] = [replicate(at(PP=0), [0, 1], zero=1), replicate(at(PP=1), [1, 2])]
    plans, _ = made(chain(2, width=8), [*stages, protect(at(), copies=1, apart="device")])
    copies = {
        (device, ins.node, ins.writes)
        for plan in plans
        for device in plan.devices
        for ins in plan.instrs
        if ins.op == "protect"
    }
    sent = (SlotId("copy", "PP=0/0"),)
    assert copies == {
        (0, "protect[PP=0/0 @0,1]", sent),
        (1, "protect[PP=0/0 @0,1]", sent),
        (1, "protect[PP=1/0 @1,2]", ()),
        (2, "protect[PP=1/0 @1,2]", ()),
    }
