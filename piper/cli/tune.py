"""`piper tune`: searches for the strategy with the shortest step that fits."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.options import AsJson, Compile, CostsFile, Recipe


def tune(
    recipe: Recipe,
    cluster: Annotated[
        str, typer.Option(help="The machines: a100, h100, h200, cpu, or a TOML file.", metavar="NAME|FILE")
    ],
    devices: Annotated[int, typer.Option(help="How many devices there are.", metavar="N")],
    memory: Annotated[
        str | None,
        typer.Option(help="What a device may hold, such as 74GiB; else all it has.", metavar="BYTES"),
    ] = None,
    costs: CostsFile = None,
    trials: Annotated[
        int,
        typer.Option(
            help="How many candidates to compile at most in the search; its last steps compile a few more.",
            metavar="N",
        ),
    ] = 80,
    start: Annotated[
        Path | None,
        typer.Option(help="A JSON strategy that you have: none is chosen that takes longer.", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the best strategy as JSON.", metavar="FILE")] = None,
    python: Annotated[
        Path | None, typer.Option(help="Write the best strategy as Python.", metavar="FILE")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write a page with the time-memory front.", metavar="FILE")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that evaluate candidates; else one a core.", metavar="N")
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(help="Run the best K on this machine too, and choose the fastest.", metavar="K"),
    ] = None,
    compiled: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Search for the strategy of a recipe with the shortest simulated step that fits in memory.

    With --measure the best few then run on this machine, and the fastest of them is chosen.
    Ctrl-C ends the search and gives the best strategy so far.
    """
    from piper.cli.tune_report import print_tuned, progress_on, read_size, tuned_report
    from piper.directives.json import load_strategy
    from piper.ir.format import wide_console
    from piper.process.files import refuse_existing, write_output
    from piper.recipe import load_recipe  # torch is paid for only where it is used
    from piper.tuning.page import MARK, tuning_page
    from piper.tuning.tune import tune as search

    for file in (out, python):
        if file is not None:
            refuse_existing(file)
    limit = None if memory is None else read_size(memory)
    first = None if start is None else load_strategy(start)
    job = load_recipe(recipe)
    with progress_on(wide_console(stderr=True), trials) as progress:
        found = search(
            job,
            cluster,
            devices,
            memory=limit,
            costs=costs,
            trials=trials,
            start=first,
            compile=compiled,
            progress=progress,
            workers=workers,
            measure=measure,
        )
    if out is not None:
        refuse_existing(out)
        out.write_text(found.json, encoding="utf-8")
    if python is not None:
        refuse_existing(python)
        python.write_text(found.python, encoding="utf-8")
    if page is not None:
        write_output(page, tuning_page(found, recipe), MARK)
    if as_json:
        sys.stdout.write(json.dumps(tuned_report(found)) + "\n")
        return
    print_tuned(found, wide_console(), recipe, out)
