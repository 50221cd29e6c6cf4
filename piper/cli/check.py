"""`piper check`: a recipe compared with plain PyTorch on one device."""

import math
import sys
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from piper.cli.answer import Answer
from piper.cli.options import NO, SUCCESS, Compile, Device, Recipe, StrategyFile
from piper.cli.reports import CheckReport
from piper.workers.rank_zero import on_rank_zero

if TYPE_CHECKING:
    from piper.check.check import Report


@on_rank_zero
def check(
    recipe: Recipe,
    on: Annotated[
        str, typer.Option(help="The launcher: inline (threads), local (processes), ...")
    ] = "inline",
    strategy: StrategyFile = None,
    device: Device = None,
    compiled: Compile = False,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    tol: Annotated[float, typer.Option(help="The largest relative difference that passes.")] = 1e-9,
) -> Answer:
    """Compare a recipe, in fp64, with plain PyTorch on one device: losses, gradients and parameters."""
    from piper.check.check import check as compare
    from piper.compiler import compile
    from piper.data.taking import batches_of
    from piper.recipe import load_recipe
    from piper.run.launch import check_launcher, launcher

    check_launcher(on, "piper check")
    job = replace(load_recipe(recipe, strategy), precision="fp64")
    program = compile(job, device=device, compile=compiled)
    batches = list(islice(batches_of(job.data), steps))
    report = compare(program, lambda started, options: launcher(started, on, options), batches, tol)
    return Answer(
        report=check_report(report),
        show=lambda: sys.stdout.write(check_text(report, f"{len(batches)} steps on {on}")),
        code=SUCCESS if report.ok else NO,
    )


def check_report(report: "Report") -> CheckReport:
    """Return what `piper check --json` prints."""
    return {
        "ok": report.ok,
        "max_loss_diff": finite(report.max_loss_diff),
        "max_grad_diff": finite(report.max_grad_diff),
        "max_param_diff": finite(report.max_param_diff),
        "first_bad": report.first_bad,
        "notes": [*report.notes],
        "sliced": report.sliced,
        "groups": report.groups,
    }


def finite(difference: float) -> float | None:
    """Return a difference, or None if JSON has no number for it."""
    return difference if math.isfinite(difference) else None


def check_text(report: "Report", what: str) -> str:
    """Return what `piper check` says: the verdict, how far the numbers are apart, and notes."""
    apart = f"loss {report.max_loss_diff:.2g}, gradients {report.max_grad_diff:.2g}"
    summary = f"{what}; largest relative differences: {apart}, parameters {report.max_param_diff:.2g}"
    return "\n".join([report.verdict, summary, *(f"note: {note}" for note in report.notes)]) + "\n"
