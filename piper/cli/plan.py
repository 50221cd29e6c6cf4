"""`piper plan`: the plans of a recipe, compiled and proven."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from piper.cli.options import AsJson, Compile, Recipe, StrategyFile


def plan(
    recipe: Recipe,
    device: Annotated[int | None, typer.Option(help="Print this device's instructions.")] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Say what the compiler decided against, and why.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Write the plans in their text form to this file.")
    ] = None,
    strategy: StrategyFile = None,
    compiled: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Compile a recipe, prove its plans and show them."""
    from piper.recipe import load_recipe

    job = load_recipe(recipe, strategy)
    from piper.cli.plan_report import plan_report, print_plan, write_text
    from piper.compiler import compile  # torch is paid for only where it is used

    program = compile(job, compile=compiled)
    if text is not None:
        write_text(program, text)
    if as_json:
        sys.stdout.write(json.dumps(plan_report(program)) + "\n")
        return
    print_plan(program, Console(highlight=False, soft_wrap=True), device=device, why=why)
