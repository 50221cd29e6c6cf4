"""One device of a recipe by itself: how long its steps take, and its memory, next to what was predicted."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

from piper.compiler import compile
from piper.data.taking import batches_of
from piper.errors import ConfigError
from piper.recipe import load_recipe
from piper.run.single_rank_run import SingleRankRun, launch_single_rank
from piper.runtime.worker import Options

STEPS = 5  # that are run where none are asked for: the first ones take their memory and are left out
WARM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRankOptions:
    """The arguments of `piper train --on rank:N`."""

    recipe: str
    on: str
    strategy: Path | None = None  # a JSON file that takes the place of the job's own
    steps: int | None = None
    device: str | None = None
    cluster: str | None = None
    compile: bool = False  # chunks run as Inductor compiles them
    graphs: bool = False  # each step is one graph, after the first few


def train_alone(wanted: SingleRankOptions) -> str:
    """Run a few steps of one device, and return a summary of its times and memory. Write no files."""
    steps = STEPS if wanted.steps is None else wanted.steps
    warm = WARM + wanted.graphs  # the step after the first ones is captured
    if steps <= warm:
        raise ConfigError(
            f"--steps {steps}", by=wanted.on, hint=f"the first {warm} are not timed: take {warm + 1} or more"
        )
    job = replace(load_recipe(wanted.recipe, wanted.strategy), checkpoint=None)
    program = compile(job, device=wanted.device, compile=wanted.compile)
    options = Options(graphs=wanted.graphs)
    with launch_single_rank(program, wanted.on, options, cluster=wanted.cluster) as run:
        for batch in islice(batches_of(job.data), steps):
            run.step(batch)
        return summary(run, wanted.on, warm)


def summary(run: SingleRankRun, on: str, warm: int) -> str:
    """Return the times and the memory of a device's steps as text, without the first ones."""
    times = run.seconds[warm:] or run.seconds
    peak = run.peak()
    lines = [
        f"{on} of {len(run.plans.devices)}, on {run.network.name}: "
        f"{median(times) * 1e3:.1f} ms a step (median of {len(times)})",
        f"  memory: {mib(peak.planned)} planned, {mib(peak.predicted)} with streams side by side",
    ]
    if peak.measured is not None:
        off = peak.measured / peak.predicted - 1
        lines.append(f"  measured: {mib(peak.measured)} at the peak ({off:+.1%})")
    return "\n".join(lines) + "\n"


def mib(nbytes: int) -> str:
    """Format bytes in MiB."""
    return f"{nbytes / 2**20:,.1f} MiB"
