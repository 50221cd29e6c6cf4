"""Random strategies for a random model."""

import math
from dataclasses import dataclass
from random import Random

import piper
from piper.directives import Directive
from tests.fuzz.models import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A strategy, in words for a repro, and how large a batch must be."""

    lines: tuple[str, ...]  # Python source, each a list of directives
    rows: int
    clip: float | None
    optimizer: str


def draw_layout(rng: Random, spec: Spec) -> Layout:
    """Draw a strategy that fits the model: places, replicas, microbatches, a schedule, experts, remat."""
    stages = spec.count
    parts = rng.choice([2, 4, 4]) if stages == 4 else rng.choice([1, 1, 2, 2, 4])
    schedules, ranks = draw_schedule(rng, stages, parts)
    sizes = draw_sizes(rng, max(ranks) + 1)
    first = [sum(sizes[:rank]) for rank in range(len(sizes))]
    shape = "apart" if schedules else rng.choice(["apart", "apart", "together", "overlapping"])
    if shape == "together":  # every rank on the same devices
        sizes, first = [sizes[0]] * len(sizes), [0] * len(sizes)
    elif shape == "overlapping":  # neighbours share a device
        first = [begin - rank for rank, begin in enumerate(first)]
    outer = rng.random() < 0.1
    lines = []
    for stage, rank in enumerate(ranks):
        devices = [*range(first[rank], first[rank] + sizes[rank])]
        zero = rng.choice([0, 0, 1, 2, 3]) if len(devices) > 1 else 0
        at = f"at(PP={stage})"
        if len(devices) == 1:
            lines.append(f"[place({at}, {devices})]")
        else:
            bucket = rng.choice([None, None, 0.001])
            lines.append(f"[replicate({at}, {devices}, zero={zero}, bucket_mb={bucket})]")
            ways = rng.choice(
                [way for way in (2, 4) if len(devices) % way == 0 and spec.experts % way == 0] or [0]
            )
            if spec.layers and rng.random() < 0.5:  # one of its layers otherwise
                layer = rng.choice([i for i, where in enumerate(spec.stages) if where == stage])
                lines.append(f"[replicate(at(LAYER={layer}), {devices}, zero={rng.randrange(4)})]")
            own = [kind for kind, where in zip(spec.blocks, spec.stages, strict=True) if where == stage]
            if ways and "experts" in own and rng.random() < 0.6:
                lines.append(f'[shard(at(PP={stage}, EP="*"), {devices}, ways={ways})]')
    if outer:
        lines.append("[split(at(), axis='OUTER', parts=2)]")
    if parts > 1:
        lines.append(f"[split(at(), axis='MB', parts={parts})]")
    lines += schedules
    if rng.random() < 0.25:
        across = rng.choice(["None", "'PP'"])
        lines.append(
            f"[remat(at(PP={rng.randrange(stages)}), {rng.choice([0.0, 0.5, 1.0])}, across={across})]"
        )
    cells = math.lcm(*sizes)
    return Layout(
        lines=tuple(lines),
        rows=cells * parts * (2 if outer else 1) * rng.choice([1, 2]),
        clip=rng.choice([None, 0.1]),
        optimizer=rng.choice(
            ["torch.optim.SGD(params, lr=0.1, momentum=0.9)", "torch.optim.AdamW(params, lr=1e-2)"]
        ),
    )


def draw_sizes(rng: Random, ranks: int) -> list[int]:
    """Draw how many devices each rank has: mostly as many as the others."""
    if rng.random() < 0.8:
        return [rng.choice([1, 2, 2, 3, 4])] * ranks
    return [rng.choice([1, 2, 4]) for _ in range(ranks)]


def draw_schedule(rng: Random, stages: int, parts: int) -> tuple[list[str], list[int]]:
    """Draw a schedule, as source, and the rank of each stage."""
    straight = [*range(stages)]
    if parts == 1 or stages == 1 or rng.random() < 0.3:
        return [], straight if rng.random() < 0.8 else [stage // 2 for stage in straight]
    if stages == 4 and rng.random() < 0.8:
        half = rng.choice(["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"])
        folded = half in ("zbv", "dualpipe_v")
        ranks = [0, 1, 1, 0] if folded else [0, 1, 0, 1]
        if half != "dualpipe_v" or parts >= 4:
            return [f"schedules.{half}(2, {parts})"], ranks
    name = rng.choice(["gpipe", "one_f_one_b", "zero_bubble"])
    return [f"schedules.{name}({stages}, {parts})"], straight


def directives(layout: Layout) -> list[Directive]:
    """Make the strategy of its source."""
    names = {name: getattr(piper, name) for name in ("at", "place", "replicate", "shard", "split", "remat")}
    names["schedules"] = piper.schedules
    return [directive for line in layout.lines for directive in eval(line, names)]
