"""Draws the pictures of README and of the pages about directives: `make pictures`."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from heights import MemoryRow, heights
from lanes import lanes
from placement import placement

from piper import Directive, Job, at, compile, place, remat, replicate, shard, split
from piper.directives import apply
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.devices import Devices
from piper.ir.graph import start
from piper.lower.lower import lower
from piper.lower.state import LoweringState
from piper.lower.validate import validate
from piper.models import decoder
from piper.plan.ops import Op
from piper.plan.plan import Plans
from piper.schedules import dualpipe_v, one_f_one_b
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline, Talk, Unit
from piper.simulate.simulate import simulate
from piper.strategies import tensor
from piper.view.cells import of_plans
from piper.view.svg import grid

sys.path.append(str(Path(__file__).parents[2]))  # where `tests` is found
from tests.chain import UNIT, chain

HERE = Path(__file__).parent


def pictures() -> Mapping[str, str]:
    """Every picture by the name of its file."""
    stages: list[Directive] = [place(at(PP=stage), [stage]) for stage in range(2)]
    pipeline = [*stages, split(at(), parts=4), *one_f_one_b(2, 4)]
    experts = [replicate(at(), [0, 1]), shard(at(EP="*"), [0, 1])]
    deep = [*(place(at(PP=stage), [stage]) for stage in range(4)), split(at(), parts=5), *one_f_one_b(4, 5)]
    return {
        "composed.svg": timetable(composed(), "PP x DP x EP x ZeRO-3, DualPipe-V", stages=4, experts=8),
        "place.svg": holdings(stages, "Two stages, each on a device of its own"),
        "replicate.svg": holdings([replicate(at(), [0, 1])], "replicate: whole on both devices"),
        "zero.svg": holdings([replicate(at(), [0, 1], zero=3)], "replicate with zero=3: a half on each"),
        "shard.svg": holdings(experts, "shard: the experts divided", stages=1, experts=4),
        "ring.svg": ring(),
        "tensor.svg": layer(),
        "split.svg": holdings(
            [replicate(at(), [0, 1]), split(at(), parts=2)],
            "split: two microbatches on each device",
        ),
        "order.svg": timetable(pipeline, "order: one forward, one backward"),
        "remat.svg": heights(
            [kept("all kept", remat(at(), budget=1)), kept("budget=0.25", remat(at(), budget=0.25))],
            title="remat: fewer bytes kept, more made again",
        ),
        "remat-across.svg": heights(
            [
                kept("all kept", remat(at(), budget=1), *deep),
                kept('across="PP"', remat(at(), budget=1, across="PP"), *deep),
            ],
            title="remat across a stage: the first of four, 1F1B",
        ),
    }


def composed() -> list[Directive]:
    """Four stages in a V on two pairs of devices, which shard their parameters and divide their experts."""
    strategy: list[Directive] = []
    for stage in range(4):
        devices = [0, 1] if stage in (0, 3) else [2, 3]
        strategy += [replicate(at(PP=stage), devices, zero=3), shard(at(PP=stage, EP="*"), devices)]
    return [*strategy, split(at(), parts=4), *dualpipe_v(2, 4)]


def lowered(strategy: list[Directive], stages: int, experts: int) -> tuple[Plans, LoweringState]:
    """The plans of a chain of stages under a strategy."""
    return lower(validate(apply(start(chain(stages, experts=experts, rows=8)), strategy)))


def holdings(strategy: list[Directive], title: str, stages: int = 2, experts: int = 0) -> str:
    """Who holds what."""
    return placement(lowered(strategy, stages, experts)[0], title=title)


def timetable(strategy: list[Directive], title: str, stages: int = 2, experts: int = 0) -> str:
    """Who computes what, and when."""
    plans, work = lowered(strategy, stages, experts)
    tags = {chunk.name: chunk.tags for chunk in work.graph.outline.chunks}
    return grid(of_plans(plans, tags, title, work.graph.orderings))


def ring() -> str:
    """The forward and the backward of a layer on one of four devices, whose sequence goes round a ring."""
    sizes = decoder.Config(
        vocab=512, dim=512, layers=1, heads=32, kv_heads=8, head_dim=128, hidden=1024, stages=1
    )
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    fields = {"tokens": 1, "labels": 1}
    job = Job(
        model=lambda: decoder.Decoder(sizes),
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=[shard(at(), range(4), axis="CP", batch=fields, attention="ring", balance="zigzag")],
        precision="bf16",
    )
    program = compile(job, device="cpu")
    found = simulate(program.plans, program.outline, Roofline(load_cluster("h200")))
    plan = program.plans.plans[0]
    layer = [
        place
        for place, ins in enumerate(plan.instrs)
        if ins.op in ("compute", "collect") and ins.does != "all_reduce"
    ][1:-1]  # without the ends of the loss
    title = "attention on a ring of four: blocks of keys and values travel while others are attended to"
    return lanes(plan, found.timelines[0], title=title, only=layer)


class OfLayer(Unit):
    """A unit for attention and for the feed-forward, a quarter for a norm, half a unit for a collective."""

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        assert chunk is not None
        return 1.0 if len(chunk.params) > 1 else 0.25

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        return Talk(seconds=0.5)


def layer() -> str:
    """The forward of one layer under tensor and sequence parallelism, for two microbatches at a time."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    weights = {
        "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
        "*attention.out|*ffn.down": 1,
    }
    sizes = replace(decoder.Config.tiny(layers=1, stages=1), by_layer=True)
    made = compile(
        Job(
            model=lambda: decoder.Decoder(sizes),
            loss=decoder.token_loss,
            data=lambda: [{"tokens": tokens, "labels": tokens}],
            strategy=tensor(layers=1, tp=2, weights=weights, overlap=True),
        ),
        device="cpu",
    )
    times = simulate(made.plans, made.outline, OfLayer())
    plan = made.plans.plans[0]
    drawn = [
        place
        for place, ins in enumerate(plan.instrs)
        if ins.op in ("compute", "collect") and ins.run is not None
        if ins.run.phase == "F" and "LAYER=0" in ins.run.chunk
    ]
    title = "A layer under tensor and sequence parallelism: two microbatches against each other"
    return lanes(plan, times.timelines[0], title=title, only=drawn)


class ByWork(Unit):
    """Units of time by the arithmetic that a phase has to do."""

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        assert chunk is not None
        return chunk.phases[phase].flops / UNIT


def kept(name: str, *strategy: Directive) -> MemoryRow:
    """The first device under a strategy that says what four regions keep."""
    graph = apply(start(chain(4, width=64, rows=4096)), strategy)
    outline = made_again(graph.outline, graph.chosen(lambda options: options.budget))
    plans, _ = lower(replace(validate(graph), outline=outline))
    found = simulate(plans, outline, ByWork())
    return MemoryRow(name=name, plan=plans.plans[0], timeline=found.timelines[0], memory=found.memories[0])


def made_again(outline: CapturedModel, budgets: Mapping[str, float]) -> CapturedModel:
    """What capture makes of budgets: less is saved, and a backward does part of its forward once more."""
    chunks = []
    for chunk in outline.chunks:
        (saved,), forward, backward = chunk.saved, chunk.phases["F"], chunk.phases["B"]
        whole = 6 * saved.nbytes  # a block of a transformer saves several times the size of its input
        again = round((1 - budgets[chunk.name]) * whole)
        work = backward.flops + forward.flops * again // whole
        chunks.append(
            replace(
                chunk,
                saved=(replace(saved, nbytes=whole - again),),
                phases={**chunk.phases, "B": replace(backward, flops=work, workspace=again)},
            )
        )
    return replace(outline, chunks=tuple(chunks))


def main() -> None:
    for name, text in pictures().items():
        (HERE / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/pictures/{name}\n")


if __name__ == "__main__":
    main()
