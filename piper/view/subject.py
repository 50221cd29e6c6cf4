"""The subject of drawings and pages: plans, their times, and the directives that made each node."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from piper.ir.chunk import CapturedModel, Tags
from piper.ir.devices import Devices
from piper.ir.graph import Ordering
from piper.plan.plan import Plans
from piper.simulate.simulate import Simulation
from piper.simulate.timeline import Timeline
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
    usable: tuple[float, ...] = ()  # bytes of a device that each program may use. Empty: not known
    clock: str  # the costs behind the planned times: "h100"
    measured: Mapping[int, Timeline] = field(default_factory=dict)  # by device: one step of a run
    on: str = ""  # the launcher, if devices share the machine's CPUs
    about: str = ""  # the run, and which of its steps is shown
    losses: tuple[tuple[int, float], ...] = ()  # of a run: each step and its loss

    @property
    def devices(self) -> Devices:
        return self.plans.devices
