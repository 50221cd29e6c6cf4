"""Draws the gallery: every schedule, and what the papers show, as SVG with a page around it.

`make gallery` runs this. A test draws everything again and compares it byte for byte.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pictures.lanes import lanes
from pictures.placement import placement

from piper import at, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.chunk import CapturedModel
from piper.ir.devices import Devices
from piper.ir.graph import start
from piper.lower.lower import lower
from piper.lower.state import LoweringState
from piper.lower.validate import validate
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.plan.plan import Plans
from piper.schedules.grid import grid_for
from piper.schedules.synthesis.synthesise import synthesised
from piper.simulate.costs import Talk, Unit
from piper.simulate.simulate import simulate
from piper.view.cells import of_plans, of_schedule
from piper.view.facts import shade_of
from piper.view.svg import grid

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is found
from tests.chain import chain

DOCS = Path(__file__).parent
RANKS, MICROBATCHES = 4, 8
SCHEDULES = {
    "gpipe": (
        "GPipe",
        "All forwards, then all backwards. The simplest schedule; it holds the most activations.",
    ),
    "1f1b": (
        "1F1B",
        "One backward for each forward once the pipeline is full. As long as GPipe, but a rank holds at most"
        " as many microbatches as there are stages from it to the end.",
    ),
    "interleaved-1f1b": (
        "Interleaved 1F1B",
        "Each rank holds several stages, so that the pipeline fills in smaller steps and idles less.",
    ),
    "zero-bubble": (
        "Zero bubble (ZB-H1)",
        "A backward is split: input gradients at once, because other ranks wait for them; weight gradients"
        " later, where a rank would be idle.",
    ),
    "interleaved-zero-bubble": (
        "Interleaved zero bubble",
        "Both ideas together: several stages on a rank, and weight gradients that fill the gaps.",
    ),
    "zbv": (
        "ZB-V",
        "Stages go down the ranks and up again, so that the first rank also computes the loss.",
    ),
    "v-half": (
        "V-Half",
        "The same V with about half of 1F1B's activations: a microbatch turns back sooner, and a rank idles"
        " longer.",
    ),
    "v-min": (
        "V-Min",
        "About a third of 1F1B's activations: every microbatch moves on without a pause.",
    ),
    "dualpipe-v": (
        "DualPipe-V",
        "The same V, in which a forward of one direction and a backward of the other overlap: the"
        " communication of each hides behind the computation of the other.",
    ),
    "dualpipe": (
        "DualPipe",
        "Both directions at once, as in DeepSeek-V3: microbatches 0 to 3 enter at rank 0, microbatches 4 to 7"
        " at rank 3, and each stage lives on two ranks. A DualPipe-V over half of the ranks, and its mirror"
        " image over the rest.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One drawing of the gallery."""

    name: str  # of its file, without the ending
    heading: str
    text: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Unit):
    """Unit costs, with communication that takes time, as figures draw it."""

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """All-to-alls take most of a forward."""
        return Talk(seconds={"exchange": 0.8, "counts": 0.15}.get(op, 0.3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A small mixture of experts under DualPipe-V, compiled."""

    outline: CapturedModel
    plans: Plans
    work: LoweringState


@cache
def example() -> Example:
    """Four stages with experts in a V over two ranks, each of two devices; four microbatches."""
    outline = chain(4, experts=4)
    strategy: list[Directive] = []
    for stage in range(4):
        rank = min(stage, 3 - stage)
        devices = (2 * rank, 2 * rank + 1)
        strategy += [replicate(at(PP=stage), devices, zero=1), shard(at(PP=stage, EP="*"), devices)]
    strategy += [split(at(), parts=4), *schedules.dualpipe_v(2, 4)]
    plans, work = lower(validate(apply(start(outline), strategy)))
    return Example(outline=outline, plans=plans, work=work)


def schedule_pictures() -> Iterator[Picture]:
    """Every schedule, for four ranks and eight microbatches."""
    for name, (heading, text) in SCHEDULES.items():
        title = f"{heading}, {RANKS} ranks, {MICROBATCHES} microbatches"
        yield Picture(
            name=f"gallery-{name}",
            heading=heading,
            text=text,
            svg=grid(of_schedule(grid_for(name, RANKS, MICROBATCHES), title)),
        )


def synthesised_picture() -> Picture:
    """A schedule that the search found, for a memory at which no named schedule is as short."""
    found, _ = synthesised(RANKS, MICROBATCHES, memory=0.625)
    return Picture(
        name="gallery-synthesised",
        heading="A synthesised schedule",
        text="Found by a search for at most five eighths of 1F1B's activations:"
        " `piper schedule synthesised --ranks 4 --microbatches 8 --memory 0.625`. It takes"
        f" {found.makespan:g} units of time, where V-Min, the only named schedule that fits, takes 59.",
        svg=grid(of_schedule(found.grid, "Synthesised, 5/8 of 1F1B's activations", found.costs)),
    )


def paper_pictures() -> Iterator[Picture]:
    """What the papers show: a small DualPipe-V, and one of its pairs with its streams."""
    yield Picture(
        name="gallery-paper-dualpipe-v",
        heading="DualPipe-V for two ranks and four microbatches",
        text="The smallest grid that shows every part of it: the V fills, pairs overlap, the V drains.",
        svg=grid(of_schedule(grid_for("dualpipe-v", 2, 4), "DualPipe-V, 2 ranks, 4 microbatches")),
    )
    found = example()
    plan = found.plans.plans[0]
    times = simulate(found.plans, found.outline, Figure())
    yield Picture(
        name="gallery-paper-overlap",
        heading="An overlapped pair and its streams",
        text="One pair of that schedule, as compiled for a mixture of experts: a forward of stage 0 on"
        " microbatch 3 and a backward of stage 3 on microbatch 1. While the rows of one travel, the other"
        " computes.",
        svg=lanes(
            plan,
            times.timelines[0],
            title="F of stage 0 on microbatch 3 with B of stage 3 on microbatch 1, devices 0 and 1",
            only=[number for number, ins in enumerate(plan.instrs) if in_pair(ins)],
        ),
    )


def in_pair(ins: Instr) -> bool:
    """Whether an instruction is of the pair that is drawn."""
    shade = shade_of(ins)
    forward = shade.phase == "F" and shade.part == (3,) and "PP=0" in ins.node
    backward = shade.phase == "B" and shade.part == (1,) and "PP=3" in ins.node
    return ins.op in ("compute", "exchange", "counts") and (forward or backward)


def program_pictures() -> Iterator[Picture]:
    """The whole program that the pair is from, and who holds what under two strategies."""
    found = example()
    tags = {chunk.name: chunk.tags for chunk in found.outline.chunks}
    yield Picture(
        name="gallery-program",
        heading="A compiled program",
        text="The plans of the same mixture of experts. Every device of a row runs the same program. Of a"
        " recipe: `piper view recipes/moe_dualpipe.py:demo --svg demo.svg`.",
        svg=grid(
            of_plans(found.plans, tags, "DualPipe-V with experts, as compiled", found.work.graph.orderings)
        ),
    )
    yield Picture(
        name="gallery-placement",
        heading="Who holds what",
        text="Two stages, each on two devices: stage 0 replicated, stage 1 with its parameters, gradients and"
        " optimizer state sharded (ZeRO-3). Each device sees half of the samples, in four microbatches.",
        svg=placement(placed(), title="Two stages on two devices each"),
    )


def placed() -> Plans:
    """Two stages on two devices each, the second sharded."""
    strategy: list[Directive] = [
        replicate(at(PP=0), [0, 1]),
        replicate(at(PP=1), [2, 3], zero=3),
        split(at(), parts=4),
    ]
    return lower(validate(apply(start(chain(2)), strategy)))[0]


def pictures() -> list[Picture]:
    """The whole gallery, in the order of its page."""
    return [*paper_pictures(), *schedule_pictures(), synthesised_picture(), *program_pictures()]


def page(drawn: list[Picture]) -> str:
    """The page around the pictures."""
    lines = [
        "# Gallery",
        "",
        "Every schedule, drawn by the tool. Forwards cost one unit of time, whole backwards two, each half of"
        " a backward one; transfers are free. `make gallery` draws this page again. One schedule, of any"
        " size:",
        "",
        "```bash",
        "piper schedule dualpipe-v --ranks 4 --microbatches 12 --svg dualpipe-v.svg",
        "```",
    ]
    for picture in drawn:
        lines += ["", f"## {picture.heading}", "", picture.text, ""]
        lines.append(f"![{picture.heading}](pictures/{picture.name}.svg)")
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """What the gallery consists of, by path below `docs/`."""
    drawn = pictures()
    return {"gallery.md": page(drawn), **{f"pictures/{picture.name}.svg": picture.svg for picture in drawn}}


def main() -> None:
    """Write the gallery, and remove pictures that are no longer in it."""
    made = files()
    for path in (DOCS / "pictures").glob("gallery-*.svg"):
        if f"pictures/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
