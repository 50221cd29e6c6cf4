"""Plans of groups that train apart are refused where groups differ, meet elsewhere, or do not average."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from piper import at, average, replicate, shard
from piper.compiler import Program, compile
from piper.directives import Directive
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.proof.values import value_problems
from tests.runtime.averaging import job

Change = Callable[[Instr], list[Instr]]


@pytest.fixture(scope="module")
def program() -> Program:
    strategy: list[Directive] = [
        shard(at(), devices=[0, 1, 2, 3], ways=2, axis="TP", weights={"first": 0, "second": 1}),
        average(at(), across=[0, 2], every=2),
    ]
    return compile(job(*strategy), device="cpu")


def edited(plans: Plans, change: Change) -> Plans:
    plan = plans.plans[0]
    instrs = tuple(new for ins in plan.instrs for new in change(ins))
    return replace(plans, plans=(replace(plan, instrs=instrs), *plans.plans[1:]))


def first(op: str, new: Callable[[Instr], list[Instr]]) -> Change:
    done: list[Instr] = []

    def change(ins: Instr) -> list[Instr]:
        if ins.op != op or done:
            return [ins]
        done.append(ins)
        return new(ins)

    return change


def elsewhere(plans: Plans, name: str, groups: tuple[tuple[int, ...], ...]) -> Plans:
    return replace(plans, comms={**plans.comms, name: replace(plans.comms[name], groups=groups)})


def averages(plans: Plans) -> str:
    return next(ins.comm for ins in plans.plans[0].instrs if ins.op == "average" and ins.comm is not None)


def inside(plans: Plans) -> str:
    return next(ins.comm for ins in plans.plans[0].instrs if ins.op == "collect" and ins.comm is not None)


EDITS: dict[str, tuple[Callable[[Plans], Plans], str]] = {
    "dropped": (lambda p: edited(p, first("average", lambda ins: [])), "is not averaged with other groups"),
    "twice": (lambda p: edited(p, first("average", lambda ins: [ins, ins])), "a second time"),
    "early": (
        lambda p: edited(
            edited(
                p, first("norm", lambda ins: [next(i for i in p.plans[0].instrs if i.op == "average"), ins])
            ),
            lambda ins: [ins],
        ),
        "it should hold",
    ),
    "neighbours": (
        lambda p: elsewhere(p, averages(p), ((0, 1), (2, 3))),
        "it should join the counterparts alone",
    ),
    "across": (lambda p: elsewhere(p, inside(p), ((0, 3), (2, 1))), "differs between groups"),
    "one group": (lambda p: elsewhere(p, inside(p), ((0, 1),)), "differs between groups"),
    "every": (
        lambda p: replace(p, averaging=replace(p.averaging, every=3)),  # type: ignore[type-var]
        "the plans say averaging=",
    ),
    "samples": (
        lambda p: edited(
            p,
            first("load", lambda ins: [replace(ins, payload=replace(ins.loads, devices=(0, 1, 3, 2)))]),
        ),
        "differs between groups in load",
    ),
}


BEHIND: dict[str, tuple[Callable[[Plans], Plans], str]] = {
    "not sent": (lambda p: edited(p, first("average", lambda ins: [])), "has travelled"),
    "not merged": (lambda p: edited(p, first("merge", lambda ins: [])), "is not averaged with other groups"),
    "merged twice": (lambda p: edited(p, first("merge", lambda ins: [ins, ins])), "a second time"),
    "params": (
        lambda p: edited(
            p, first("merge", lambda ins: [replace(ins, reads=ins.reads[:1], writes=ins.writes[:1])])
        ),
        "it should average one trained bucket",
    ),
}


@pytest.fixture(scope="module")
def behind() -> Program:
    strategy: list[Directive] = [
        replicate(at(), devices=[0, 1, 2, 3], zero=1),
        average(at(), across=[0, 2], every=4, overlap=2),
    ]
    return compile(job(*strategy), device="cpu")


@pytest.mark.parametrize("edit", BEHIND)
def test_an_edit_of_an_average_that_travels_is_noticed(behind: Program, edit: str) -> None:
    change, said = BEHIND[edit]
    assert problems(behind, behind.plans) == []
    found = problems(behind, change(behind.plans))
    assert any(said in problem for problem in found), found[:3]


def problems(program: Program, plans: Plans) -> list[str]:
    return list(value_problems(plans, program.graph))


def test_plans_as_they_are_have_no_problem(program: Program) -> None:
    assert problems(program, program.plans) == []


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed(program: Program, edit: str) -> None:
    change, said = EDITS[edit]
    found = problems(program, change(program.plans))
    assert any(said in problem for problem in found), found[:3]


def test_gradients_are_of_one_group(program: Program) -> None:
    strategy: list[Directive] = [replicate(at(), devices=[0, 1, 2, 3]), average(at(), across=[0, 2])]
    plans = compile(job(*strategy), device="cpu").plans
    assert {bucket.groups for bucket in plans.buckets.values()} == {((0, 1), (2, 3))}
    crossing = {comm.name for comm in plans.comms.values() if (0, 2) in comm.groups}
    assert {ins.op for plan in plans for ins in plan.instrs if ins.comm in crossing} == {"average"}
