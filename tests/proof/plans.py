"""Plans made by hand-drawn models, without torch, each with the graph it was made from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast

from piper.directives import Directive, apply, place, remat, replicate, shard, split
from piper.ir.chunk import CapturedModel
from piper.ir.graph import Graph, start
from piper.ir.ids import read_slot
from piper.ir.select import at
from piper.lower.state import Settings
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.proof.values import value_problems
from piper.schedules import one_f_one_b
from tests.chain import chain
from tests.lower.lowering import lower
from tests.lower.outlines import fitted, mixture, normed, skips

Made = tuple[Plans, Graph]


def made(outline: CapturedModel, strategy: list[Directive], *, clip: bool = False) -> Made:
    """Lower a model under a strategy; return the plans and their specification."""
    graph = apply(start(outline), strategy)
    plans, work = lower(graph, Settings(clip=clip), fitted(graph))
    return plans, work.graph


@cache
def pipeline(zero: int = 2) -> Made:
    """Two stages of two devices, two microbatches, 1F1B; the first stage sharded."""
    strategy = [replicate(at(PP=0), [0, 1], zero=zero), replicate(at(PP=1), [2, 3]), split(at(), parts=2)]
    return made(chain(2, width=8), [*strategy, *one_f_one_b(2, 2)])


@cache
def tied(zero: int = 1) -> Made:
    """Two stages of two devices that share a parameter, sharded alike."""
    strategy = [replicate(at(PP=i), [2 * i, 2 * i + 1], zero=zero) for i in range(2)]
    return made(chain(2, width=8, tied=True), [*strategy, split(at(), parts=2)])


@cache
def unequal() -> Made:
    """Stages on one, two and four devices, values that skip stages, two microbatches."""
    sets = ([0], [1, 2], [3, 4, 5, 6])
    strategy = [*(replicate(at(PP=i), s, zero=1) for i, s in enumerate(sets)), split(at(), parts=2)]
    return made(skips(), strategy)


@cache
def experts() -> Made:
    """Experts divided over two groups of two devices, zero=2."""
    strategy = [replicate(at(), range(4), zero=2), shard(at(EP="*"), range(4), ways=2), split(at(), parts=2)]
    return made(mixture(), strategy)


@cache
def weighted() -> Made:
    """A loss that is a sum and a weight, buffers, two devices a stage, two microbatches."""
    strategy = [replicate(at(), [0, 1]), place(at(PP=2), [2, 3]), split(at(), parts=2)]
    return made(normed(), strategy)


@cache
def recomputed() -> Made:
    """Two stages that run their forwards a second time."""
    strategy = [*(replicate(at(PP=i), [i]) for i in range(2)), split(at(), parts=2)]
    return made(chain(2, width=8), [*strategy, remat(at(), 0.5, across="PP")])


@cache
def crossing(zero: int = 0) -> Made:
    """Stages on the devices 0 and 1, 2 and 3, 0 and 4: 0 and 1 are two programs that share a stage."""
    sets = ([0, 1], [2, 3], [0, 4])
    stages = [replicate(at(PP=i), devices, zero=zero) for i, devices in enumerate(sets)]
    strategy = [*stages, split(at(), parts=2)]
    return made(chain(3, width=8), strategy)


def edited(plans: Plans, device: int, edit: Callable[[list[Instr]], object]) -> Plans:
    """Return plans with one device's instructions edited in place, and nothing freed.

    Order and frees are another proof's concern; what a wrong read finds is shown only where it is still there.
    """
    found = []
    for plan in plans:
        instrs = [replace(ins, frees=()) for ins in plan.instrs]
        if device in plan.devices:
            edit(instrs)
        found.append(replace(plan, instrs=tuple(instrs)))
    return replace(plans, plans=tuple(found))


def said(made: Made, *edits: tuple[int, Callable[[list[Instr]], object]], clip: bool = False) -> str:
    """Return what the proof of values says after some edits."""
    plans, graph = made
    for device, edit in edits:
        plans = edited(plans, device, edit)
    return "\n".join(value_problems(plans, graph, clip=clip))


def find(instrs: list[Instr], op: str, node: str) -> int:
    """Return the place of an instruction."""
    return next(i for i, ins in enumerate(instrs) if ins.op == op and node in ins.node)


def typed(fields: dict[str, object]) -> dict[str, object]:
    """Return fields of an instruction, with the ids of slots made of their texts."""
    found = dict(fields)
    for key in ("reads", "writes"):
        if key in found:
            texts = cast(tuple[str, ...], found[key])
            found[key] = tuple(read_slot(text, ("MB",)) for text in texts)
    return found


def changing(op: str, node: str, /, **fields: object) -> Callable[[list[Instr]], None]:
    """Return an edit of some fields of one instruction; slots are given as text."""

    def edit(instrs: list[Instr]) -> None:
        place = find(instrs, op, node)
        instrs[place] = replace(instrs[place], **typed(fields))  # type: ignore[arg-type]

    return edit


def without(op: str, node: str) -> Callable[[list[Instr]], object]:
    """Return an edit that leaves one instruction out."""
    return lambda instrs: instrs.pop(find(instrs, op, node))
