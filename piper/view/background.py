"""What stands behind plans: what made each node, what chunks cost, and the strategy with the recipe's text.

A run keeps it as `view.json` beside its `plan.txt`, so that it is drawn in full when its recipe is gone.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.errors import ConfigError
from piper.ir.chunk import PHASES, Chunk, Outline, Output, Parameter, PhaseSpec, Tags, TensorSpec
from piper.ir.graph import Ordering, Step
from piper.plan.plan import Plans
from piper.plan.text import show_plans
from piper.simulate.costs import type_of
from piper.view.subject import Said

FILE = "view.json"
FORM = 1  # of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """A compiled recipe without its plans. Of an outline read back, only what costs depend on is there."""

    title: str  # "llama.py:job"
    outline: Outline
    orderings: tuple[Ordering, ...] = ()
    strategy: tuple[Said, ...] = ()
    origins: Mapping[str, tuple[int, ...]]  # by node: directives, by number
    temporal: tuple[tuple[str, str, int], ...] = ()  # this node, before that one, said by this directive
    source: str = ""  # the recipe's text
    source_name: str = ""  # and the name of its file


def show_background(background: Background, plans: Plans) -> str:
    """Write it down as one object; nodes are named once and then meant by their numbers."""
    number = {name: place for place, name in enumerate(background.origins)}
    told = {
        "piper_view": FORM,
        "plans": digest(plans),
        "title": background.title,
        "source_name": background.source_name,
        "source": background.source,
        "strategy": [{"title": s.title, "text": s.text, "source": s.source} for s in background.strategy],
        **outline_columns(background.outline),
        "orderings": [
            {"by": o.by, "groups": [[[s.chunk, s.phase, s.part] for s in group] for group in o.groups]}
            for o in background.orderings
        ],
        "nodes": list(number),
        "origins": list(background.origins.values()),
        "temporal": [[number[first], number[then], by] for first, then, by in background.temporal],
    }
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False) + "\n"


def outline_columns(outline: Outline) -> dict[str, object]:
    """What costs depend on, and whose model it is."""
    return {
        "parameters": [[p.name, p.shape, p.dtype] for p in outline.parameters],
        "loss": [outline.loss.chunk, outline.loss.index],
        "chunks": [
            {
                "name": chunk.name,
                "tags": chunk.tags,
                "key": chunk.key,
                "dtype": type_of(chunk),
                "phases": {
                    phase: [chunk.phases[phase].flops, chunk.phases[phase].bytes_moved]
                    for phase in PHASES
                    if phase in chunk.phases
                },
            }
            for chunk in outline.chunks
        ],
    }


def digest(plans: Plans) -> str:
    """Plans in a few characters."""
    return hashlib.blake2b(show_plans(plans).encode(), digest_size=16).hexdigest()


def read_background(folder: Path, plans: Plans) -> Background | None:
    """What a folder keeps of these plans; none, if it keeps nothing, or what it keeps is of others."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["piper_view"] != FORM:
            raise ValueError(f"it is of form {told['piper_view']}, not {FORM}")
        return from_object(told) if told["plans"] == digest(plans) else None
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(
            "what this run kept for its page cannot be read",
            by=str(path),
            facts={"why": f"{type(error).__name__}: {error}"},
            hint=f"delete {FILE}: the page is then made of the recipe, or of the plan alone",
        ) from None


def from_object(told: Mapping[str, Any]) -> Background:
    """The object that the file holds, read back."""
    nodes: Sequence[str] = told["nodes"]
    return Background(
        title=str(told["title"]),
        outline=outline_of(told),
        orderings=tuple(
            Ordering(by=ordering["by"], groups=tuple(tuple(map(step_of, g)) for g in ordering["groups"]))
            for ordering in told["orderings"]
        ),
        strategy=tuple(
            Said(title=said["title"], text=said["text"], source=said["source"]) for said in told["strategy"]
        ),
        origins={node: tuple(by) for node, by in zip(nodes, told["origins"], strict=True)},
        temporal=tuple((nodes[first], nodes[then], by) for first, then, by in told["temporal"]),
        source=str(told["source"]),
        source_name=str(told["source_name"]),
    )


def outline_of(told: Mapping[str, Any]) -> Outline:
    """An outline whose chunks have their costs and annotations, and no values."""
    chunk, index = told["loss"]
    return Outline(
        chunks=tuple(map(chunk_of, told["chunks"])),
        loss=Output(chunk=chunk, index=index),
        parameters=tuple(
            Parameter(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in told["parameters"]
        ),
    )


def chunk_of(told: Mapping[str, Any]) -> Chunk:
    """A chunk as costs see it: one value stands for the type it computes in."""
    return Chunk(
        name=told["name"],
        tags=tags_of(told["tags"]),
        key=told["key"],
        outputs=(TensorSpec(shape=(), dtype=told["dtype"], nbytes=0),),
        phases={
            phase: PhaseSpec(flops=int(told["phases"][phase][0]), bytes_moved=int(told["phases"][phase][1]))
            for phase in PHASES
            if phase in told["phases"]
        },
    )


def step_of(told: Sequence[Any]) -> Step:
    """A member of an ordered group."""
    chunk, phase, part = told
    return Step(chunk=chunk, phase=phase, part=tags_of(part))


def tags_of(told: Sequence[Sequence[Any]]) -> Tags:
    """Names with their numbers."""
    return tuple((str(name), int(number)) for name, number in told)
