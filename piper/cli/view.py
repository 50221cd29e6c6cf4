"""`piper view`: a strategy as a page, a picture, a trace or text."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.options import CostsFile, StrategyFile
from piper.schedules.grid import Grid
from piper.schedules.timing import UNIT, Costs

Target = Annotated[
    str, typer.Argument(help="A recipe, file.py:function, or the folder of a run.", metavar="RECIPE|DIR")
]
MACHINE = "a100, h100, h200, cpu, or a TOML file; else h100, and cpu for a run on CPU."
REPORT = Path("report.html")
WIDTH = 100  # of the text timeline


def view(
    target: Target,
    out: Annotated[Path | None, typer.Option(help="Write the page here; else report.html.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the pipeline grid as SVG.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the pipeline grid as PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace that Perfetto and Chrome open.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the grid and the streams.")] = False,
    measured: Annotated[
        bool, typer.Option("--measured", help="Refuse a target that has no measured times.")
    ] = False,
    cluster: Annotated[str | None, typer.Option(help=MACHINE, metavar="NAME|FILE")] = None,
    costs: CostsFile = None,
    strategy: StrategyFile = None,
) -> None:
    """Show a strategy: its pipeline, streams, memory, dependencies and what made them, planned and measured.

    Without --svg, --png, --trace or --text it writes one page that opens in any browser, without a network.
    """
    from piper.cli.view_subject import subject_of  # torch is paid for only where it is used
    from piper.view.cells import of_plans
    from piper.view.plan_trace import plan_trace
    from piper.view.report import page
    from piper.view.svg_grid import grid
    from piper.view.text_grid import grid as grid_text
    from piper.view.text_timeline import timeline_text
    from piper.view.write import DRAWING, PAGE, PICTURE, TRACE, write
    from piper.view.write import png as draw_png

    subject = subject_of(target, cluster=cluster, costs=costs, measured=measured, strategy=strategy)
    drawn = ""
    if svg or png:
        drawn = grid(of_plans(subject.plans, subject.tags, subject.title, subject.orderings))
    if svg:
        write(svg, drawn, DRAWING)
    if png:
        write(png, draw_png(drawn), PICTURE)
    if trace:
        write(trace, plan_trace(subject), TRACE)
    if text:
        sys.stdout.write(f"{grid_text(subject.plans, subject.tags)}\n\n{timeline_text(subject, WIDTH)}\n")
    if out or not (svg or png or trace or text):
        written = out or REPORT
        write(written, page(subject), PAGE)
        sys.stdout.write(f"{written}: open it in a browser\n")


def write_schedule(schedule: Grid, title: str, path: Path, costs: Costs = UNIT) -> None:
    """Write a schedule as an SVG picture."""
    from piper.view.cells import of_schedule
    from piper.view.svg_grid import grid
    from piper.view.write import DRAWING, write

    write(path, grid(of_schedule(schedule, title, costs)), DRAWING)
