"""`piper schedule`: a pipeline schedule as a grid, as CSV or as a picture."""

from pathlib import Path
from typing import Annotated, Any

import typer

from piper.cli.application import Answer, option
from piper.errors import ConfigError
from piper.process.files import write_output
from piper.schedules.grid import SYNTHESISED, Grid, grid_for, group_text, known
from piper.schedules.synthesis.synthesise import synthesised
from piper.schedules.timing import UNIT, Costs
from piper.schedules.torch_csv import to_csv
from piper.view.cells import of_schedule, picture
from piper.view.svg import MARK
from piper.view.svg import grid as draw_grid


def schedule(
    name: Annotated[str, typer.Argument(help=", ".join(known()), metavar="NAME")],
    ranks: Annotated[int, option("Devices in the pipeline.")],
    microbatches: Annotated[int, option("Parts of the batch.")],
    stages_per_rank: Annotated[
        int | None, option("Stages on each rank, where the schedule lets you choose.")
    ] = None,
    memory: Annotated[
        float | None, option("synthesised: the share of 1F1B's activations that a rank may hold; else 1.")
    ] = None,
    costs: Annotated[
        str | None, option("synthesised: the times of F, I and W; else 1,1,1.", metavar="F,I,W")
    ] = None,
    last: Annotated[
        float | None, option("synthesised: how many times slower the last stage is; else 1.")
    ] = None,
    csv: Annotated[bool, option("Print torch.distributed.pipelining's compute-only CSV.", "--csv")] = False,
    svg: Annotated[Path | None, option("Write it as an SVG picture instead.")] = None,
) -> Answer:
    """Show a pipeline schedule as a grid, as CSV that torch reads, or as a picture.

    `synthesised` searches for a short schedule within a memory limit, and says how far it is from the best.
    """
    grid: Grid
    times: Costs = UNIT
    below = ""
    options = {"memory": memory, "costs": costs, "last": last}
    given: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
    if name == SYNTHESISED:
        if costs is not None:
            given["costs"] = parsed_costs(costs)
        if stages_per_rank is not None:
            given["stages_per_rank"] = stages_per_rank
        synthesis, below = synthesised(ranks, microbatches, **given)
        grid, times = synthesis.grid, synthesis.costs
    elif given:
        raise ConfigError(
            f"{name} does not take --{next(iter(given))}",
            by="piper schedule",
            hint=f"leave it out, or use {SYNTHESISED}",
        )
    else:
        grid = grid_for(name, ranks, microbatches, stages_per_rank)
    if svg is not None:
        title = f"{name}, {ranks} ranks, {microbatches} microbatches"
        write_output(svg, draw_grid(of_schedule(grid, title, times)), MARK)
    text = to_csv(grid) if csv else f"{picture(grid, times)}\n" + (f"\n{below}\n" if below else "")
    return Answer(
        report={
            "name": name,
            "ranks": ranks,
            "microbatches": microbatches,
            "rows": [[*map(group_text, row)] for row in grid.rows],
            "summary": below or None,
            "svg": None if svg is None else str(svg),
        },
        show="" if svg is not None else text,
    )


def parsed_costs(text: str) -> tuple[float, float, float]:
    """Read the times of F, I and W."""
    try:
        forward, inputs, weights = (float(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--costs {text} is not three numbers",
            by="piper schedule",
            hint="give the times of F, I and W: --costs 1,1,1",
        ) from error
    return forward, inputs, weights
