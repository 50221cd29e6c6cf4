"""The subject of drawings and pages: plans, their times, and what made each node: directives and recipe.

A run saves the background as `view.json` next to `plan.txt`, so that `piper view` can draw the run without
its recipe.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from piper.errors import CONTENT, file_errors
from piper.ir.chunk import CapturedModel, PhaseSpec, Tags
from piper.ir.devices import Devices
from piper.ir.graph import Ordering
from piper.ir.json_fields import from_json, to_json
from piper.plan.plan import Plans
from piper.plan.text import show_plans
from piper.simulate.account import Timeline
from piper.simulate.costs import type_of
from piper.simulate.measured import Prices
from piper.simulate.profile import Profile
from piper.simulate.simulate import Simulation, simulate
from piper.view.cells import stage_tags


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLine:
    """One directive of a strategy: its name in messages, its arguments, and its place in the recipe."""

    title: str  # "replicate #0 (llama.py:41)"
    text: str  # "replicate(at(PP=0), devices=[0, 1], zero=3)"
    source: str  # "llama.py:41"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """A compiled recipe without its plans. An outline that was read back has only what costs depend on."""

    title: str  # "llama.py:job"
    outline: CapturedModel
    orderings: tuple[Ordering, ...] = ()
    strategy: tuple[StrategyLine, ...] = ()
    origins: Mapping[str, tuple[int, ...]]  # by node: directives, by number
    temporal: tuple[tuple[str, str, int], ...] = ()  # earlier node, later node, directive
    source: str = ""  # the recipe's text; empty if it is not known
    source_name: str = ""  # and the name of its file
    device: str = ""  # the kind of device that it was compiled for

    @property
    def tags(self) -> Mapping[str, Tags]:
        """Return the annotations of each chunk, as stages of a pipeline."""
        return stage_tags(self.outline, self.orderings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(Provenance):
    """A program, or a run, as drawings and pages need it."""

    plans: Plans
    planned: Simulation
    usable: tuple[float | None, ...]  # bytes of a device that each program may use. None: not known
    clock: str  # the costs behind the planned times: "h100"
    measured: Mapping[int, Timeline] = field(default_factory=dict)  # by device: one step of a run
    on: str = ""  # the launcher, if devices share the machine's CPUs
    about: str = ""  # the run, and which of its steps is shown
    losses: tuple[tuple[int, float], ...] = ()  # of a run: each step and its loss

    @property
    def devices(self) -> Devices:
        return self.plans.devices


FILE, METRICS = "view.json", "metrics.jsonl"
FORM = 1  # of the file
COLUMNS = ("flops", "bytes_moved", "kernels")  # of a phase


def subject_from(
    background: Provenance,
    plans: Plans,
    prices: Prices,
    profile: Profile | None = None,
    losses: tuple[tuple[int, float], ...] = (),
) -> Subject:
    """Return plans with their background, timed at some prices. profile, losses: what a run measured."""
    prices.check(background.outline)
    kept = {field.name: getattr(background, field.name) for field in fields(background)}
    return Subject(
        **kept,
        plans=plans,
        planned=simulate(plans, background.outline, prices.costs),
        usable=prices.usable(plans),
        clock=prices.name,
        measured=profile.timelines() if profile else {},
        on=profile.on if profile and profile.accelerator == "cpu" else "",
        about=about_run(profile) if profile else "",
        losses=losses,
    )


def about_run(profile: Profile) -> str:
    """Return which step is shown, and how far the devices' clocks can be trusted."""
    where = f" on {profile.on}" if profile.on else ""
    which = f", the typical of {profile.count}" if profile.count > 1 else ""
    error = f", clocks within {profile.error * 1e6:.0f} µs" if profile.error else ""
    return f"measured{where} in step {profile.first + profile.typical}{which}{error}"


def show_background(background: Provenance, plans: Plans) -> str:
    """Return the background as JSON text. Each node is named once and then referred to by its number."""
    number = {name: place for place, name in enumerate(background.origins)}
    data = {
        "piper_view": FORM,
        "plans": digest(plans),
        "title": background.title,
        "source_name": background.source_name,
        "source": background.source,
        "device": background.device,
        "strategy": to_json(background.strategy),
        **outline_columns(background.outline),
        "orderings": [
            {"by": o.by, "groups": [[[s.chunk, s.phase, s.part] for s in group] for group in o.groups]}
            for o in background.orderings
        ],
        "nodes": list(number),
        "origins": list(background.origins.values()),
        "temporal": [[number[first], number[then], by] for first, then, by in background.temporal],
    }
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n"


def outline_columns(outline: CapturedModel) -> dict[str, object]:
    """Return the parts of an outline that costs depend on, and the parameters that identify the model."""
    return {
        "parameters": [[p.name, p.shape, p.dtype] for p in outline.parameters],
        "loss": [outline.loss.chunk, outline.loss.index],
        "chunks": [
            {
                "name": chunk.name,
                "tags": chunk.tags,
                "key": chunk.key,
                "dtype": type_of(chunk),
                "phases": {phase: phase_columns(spec) for phase, spec in chunk.phases.items()},
            }
            for chunk in outline.chunks
        ],
    }


def phase_columns(spec: PhaseSpec) -> list[object]:
    """Return the parts of a phase that its cost depends on."""
    counts = Counter(spec.kernels)
    kernels = [[k.kind, k.dtype, k.flops, k.nbytes, k.count * n, k.shape] for k, n in counts.items()]
    return [spec.flops, spec.bytes_moved, kernels]


def digest(plans: Plans) -> str:
    """Return a hash of the text of plans."""
    return hashlib.blake2b(show_plans(plans).encode(), digest_size=16).hexdigest()


def read_background(folder: Path, plans: Plans) -> Provenance | None:
    """Read the background of these plans from a folder. None: there is none, or it belongs to other plans."""
    path = folder / FILE
    if not path.is_file():
        return None
    hint = "a run that is trained now writes it; `piper view file.py:function` shows the recipe"
    with file_errors("what this run kept for its page cannot be read", path, hint, *CONTENT):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["piper_view"] != FORM:
            raise ValueError(f"it is of form {data['piper_view']}, not {FORM}")
        return from_object(data) if data["plans"] == digest(plans) else None


def from_object(data: Mapping[str, Any]) -> Provenance:
    """Build a background from the object in its file. A chunk has one output, of the type it computes in."""
    nodes: Sequence[str] = data["nodes"]
    chunks = [
        {
            **chunk,
            "outputs": [{"shape": (), "dtype": chunk["dtype"], "nbytes": 0}],
            "phases": {name: dict(zip(COLUMNS, row, strict=True)) for name, row in chunk["phases"].items()},
        }
        for chunk in data["chunks"]
    ]
    rebuilt = {
        "orderings": [{**one, "groups": [*map(passes_of, one["groups"])]} for one in data["orderings"]],
        "outline": {"loss": data["loss"], "parameters": data["parameters"], "chunks": chunks},
        "origins": dict(zip(nodes, data["origins"], strict=True)),
        "temporal": [(nodes[first], nodes[then], by) for first, then, by in data["temporal"]],
    }
    return from_json(Provenance, {**data, **rebuilt})


def passes_of(group: Sequence[Sequence[object]]) -> list[dict[str, object]]:
    """Return the fields of each pass in an ordered group."""
    return [{"chunk": chunk, "phase": phase, "part": part} for chunk, phase, part in group]


def read_losses(folder: Path) -> tuple[tuple[int, float], ...]:
    """Read the steps of a run and their losses, but for those that are not finite or not yet written."""
    file, losses = folder / METRICS, dict[int, float]()
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            measure = json.loads(line)
        except ValueError:  # the run is writing it
            continue
        if isfinite(measure["loss"]):
            losses[measure["step"]] = measure["loss"]
    return tuple(sorted(losses.items()))
