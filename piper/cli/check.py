"""`piper check`: a recipe compared with plain PyTorch on one device."""

import json
import sys
from dataclasses import replace
from itertools import islice
from typing import Annotated

import typer

from piper.cli.exit_codes import NO, SUCCESS
from piper.cli.options import AsJson, Compile, Device, Recipe, StrategyFile
from piper.workers.rank_zero import on_rank_zero


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
    as_json: AsJson = False,
) -> None:
    """Compare a recipe, in fp64, with plain PyTorch on one device: losses, gradients and parameters."""
    from piper.check.check import check as compare
    from piper.cli.plan_report import check_report, check_text
    from piper.compiler import compile
    from piper.data.taking import batches_of
    from piper.recipe import load_recipe
    from piper.run.launch import check_launcher, launcher

    check_launcher(on, "piper check")
    job = replace(load_recipe(recipe, strategy), precision="fp64")
    program = compile(job, device=device, compile=compiled)
    batches = list(islice(batches_of(job.data), steps))
    report = compare(program, lambda started, options: launcher(started, on, options), batches, tol)
    if as_json:
        sys.stdout.write(json.dumps(check_report(report)) + "\n")
    else:
        sys.stdout.write(check_text(report, f"{len(batches)} steps on {on}"))
    sys.exit(SUCCESS if report.ok else NO)
