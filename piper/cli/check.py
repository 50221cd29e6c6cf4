"""`piper check`: a recipe compared with plain PyTorch on one device."""

import math
from dataclasses import asdict, replace
from itertools import islice
from typing import Annotated

from piper.cli.application import (
    NO,
    SUCCESS,
    Answer,
    Compile,
    Device,
    Recipe,
    StrategyFile,
    on_rank_zero,
    option,
)


@on_rank_zero
def check(
    recipe: Recipe,
    on: Annotated[str, option("The launcher: inline (threads), local (processes), ...")] = "inline",
    strategy: StrategyFile = None,
    device: Device = None,
    compiled: Compile = False,
    steps: Annotated[int, option("How many steps to compare.", min=1)] = 2,
    tol: Annotated[float, option("The largest relative difference that passes.")] = 1e-9,
) -> Answer:
    """Compare a recipe, in fp64, with plain PyTorch on one device: losses, gradients and parameters."""
    from piper.check.check import check as compare
    from piper.compiler import compile
    from piper.data.feed import one_epoch
    from piper.recipe import load_recipe
    from piper.run.launch import check_launcher, launcher

    check_launcher(on, "piper check")
    job = replace(load_recipe(recipe, strategy), precision="fp64")
    program = compile(job, device=device, compile=compiled)
    batches = list(islice(one_epoch(job.data, job.seed), steps))
    report = compare(program, lambda started, options: launcher(started, on, options), batches, tol)
    lines = [
        report.verdict,
        f"{len(batches)} steps on {on}; largest relative differences: loss {report.max_loss_diff:.2g}, "
        f"gradients {report.max_grad_diff:.2g}, parameters {report.max_param_diff:.2g}",
        *(f"note: {note}" for note in report.notes),
    ]
    fields = {**asdict(report), "notes": [*report.notes]}
    for name in ("max_loss_diff", "max_grad_diff", "max_param_diff"):
        fields[name] = fields[name] if math.isfinite(fields[name]) else None  # JSON has no number for it
    return Answer(
        report=fields,
        show="\n".join(lines) + "\n",
        code=SUCCESS if report.ok else NO,
    )
