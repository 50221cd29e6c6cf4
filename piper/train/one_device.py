"""One device of a recipe by itself: how long its steps take, and its memory, next to what was predicted."""

from dataclasses import replace
from itertools import islice
from statistics import median

from piper.compiler import compile
from piper.data.taking import batches_of
from piper.errors import ConfigError
from piper.recipe import load_recipe
from piper.run.single_rank_run import SingleRankRun, launch_single_rank
from piper.runtime.worker import Options
from piper.train.train_options import TrainOptions

STEPS = 5  # that are run where none are asked for: the first ones take their memory and are left out
WARM = 2


def train_alone(asked: TrainOptions) -> str:
    """Run a few steps of one device, `--on rank:N`, and return its times and memory. Write no files."""
    steps = STEPS if asked.steps is None else asked.steps
    warm = WARM + asked.graphs  # the step after the first ones is captured
    if steps <= warm:
        raise ConfigError(
            f"--steps {steps}", by=asked.on, hint=f"the first {warm} are not timed: take {warm + 1} or more"
        )
    job = replace(load_recipe(asked.recipe, asked.strategy), checkpoint=None)
    program = compile(job, device=asked.device, compile=asked.compile)
    options = Options(graphs=asked.graphs)
    with launch_single_rank(program, asked.on, options, cluster=asked.cluster) as run:
        for batch in islice(batches_of(job.data), steps):
            run.step(batch)
        return summary(run, asked.on, warm)


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
