"""`piper view`: a strategy as a page, a picture, a trace or text."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.answer import Answer
from piper.cli.options import Compile, CostsFile, StrategyFile
from piper.cli.prices import CLUSTER, Prices, prices_of
from piper.errors import ConfigError
from piper.plan.plan import Plans
from piper.plan.text import read_plans
from piper.process.files import write_output
from piper.simulate.costs import Unit
from piper.simulate.profile import ABOUT, FOLDER, Profile, read_profile
from piper.simulate.simulate import simulate
from piper.view.cells import of_plans, stage_tags
from piper.view.plan_trace import plan_trace
from piper.view.provenance import FILE, Provenance, read_background, read_losses
from piper.view.report import page
from piper.view.subject import Subject, strategy_lines
from piper.view.svg_grid import grid
from piper.view.text_grid import grid as grid_text
from piper.view.text_timeline import timeline_text
from piper.view.write import DRAWING, PAGE, PICTURE, TRACE
from piper.view.write import png as draw_png

CPU = "cpu"
Target = Annotated[
    str, typer.Argument(help="A recipe, file.py:function, or the folder of a run.", metavar="RECIPE|DIR")
]
MACHINE = "a100, h100, h200, b200, cpu, or a TOML file; else h100, and cpu for a run on CPU."
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
    compiled: Compile = False,
) -> Answer:
    """Show a strategy: its pipeline, streams, memory, dependencies and what made them, planned and measured.

    Without --svg, --png, --trace or --text it writes one page that opens in any browser, without a network.
    """
    subject = subject_of(
        target, cluster=cluster, costs=costs, measured=measured, strategy=strategy, compiled=compiled
    )
    drawn = ""
    if svg or png:
        drawn = grid(of_plans(subject.plans, subject.tags, subject.title, subject.orderings))
    if svg:
        write_output(svg, drawn, DRAWING)
    if png:
        write_output(png, draw_png(drawn), PICTURE)
    if trace:
        write_output(trace, plan_trace(subject), TRACE)
    streams = f"{grid_text(subject.plans, subject.tags)}\n\n{timeline_text(subject, WIDTH)}\n" if text else ""
    written = out if out or svg or png or trace or text else REPORT
    if written:
        write_output(written, page(subject), PAGE)
    files = {"page": written, "svg": svg, "png": png, "trace": trace}
    return Answer(
        report={
            "title": subject.title,
            "files": {kind: str(file) for kind, file in files.items() if file},
            "text": streams or None,
        },
        show=lambda: sys.stdout.write(streams + (f"{written}: open it in a browser\n" if written else "")),
    )


def subject_of(
    target: str,
    *,
    cluster: str | None,
    costs: Path | None,
    measured: bool,
    strategy: Path | None = None,
    compiled: bool = False,
) -> Subject:
    """Find what a target names: `file.py:function`, or the folder of a run.

    strategy: a JSON file that takes the place of a recipe's own. compiled: with Inductor's kernels.
    """
    if Path(target).is_dir():
        asked = f"--strategy {strategy}" if strategy is not None else "--compile" if compiled else None
        if asked is not None:
            raise ConfigError(
                "a run is shown as it was trained",
                by=target,
                facts={"asked": asked},
                hint="name the recipe instead: piper view file.py:function",
            )
        run = subject_of_run(Path(target), cluster=cluster, costs=costs, measured=measured)
        return replace(run, losses=read_losses(Path(target)))
    if ":" not in target:
        raise ConfigError(
            "there is no such recipe or run",
            by=target,
            hint="name a recipe, file.py:function, or the folder that `piper train --out` wrote",
        )
    if measured:
        raise ConfigError(
            "a recipe has not been measured",
            by=target,
            hint="run it with `piper train --profile 5 --out DIR`, then: piper view DIR --measured",
        )
    prices = prices_of(cluster, costs)
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe
    from piper.train.run_folder import background_of

    program = compile(load_recipe(target, strategy), compile=compiled)
    return of_background(background_of(program, target), program.plans, prices)


def of_background(
    background: Provenance, plans: Plans, prices: Prices, profile: Profile | None = None
) -> Subject:
    """Return plans of which all is known, timed at some prices, with what a run measured."""
    prices.check(background.outline)
    return Subject(
        title=background.title,
        plans=plans,
        planned=simulate(plans, background.outline, prices.costs),
        usable=prices.usable(plans),
        clock=prices.name,
        tags=stage_tags(
            {chunk.name: chunk.tags for chunk in background.outline.chunks}, background.orderings
        ),
        orderings=background.orderings,
        strategy=background.strategy,
        origins=background.origins,
        temporal=background.temporal,
        measured=profile.timelines() if profile else {},
        on=profile.on if profile and profile.accelerator == CPU else "",
        about=about_run(profile) if profile else "",
        source=background.source,
        source_name=background.source_name,
    )


def subject_of_run(folder: Path, *, cluster: str | None, costs: Path | None, measured: bool) -> Subject:
    """Return a run: its plans as they were, with the background that it saved.

    Of a run that saved none, the plans alone are shown.
    """
    has_profile = (folder / FOLDER / ABOUT).is_file() or (folder / ABOUT).is_file()
    profile = read_profile(folder) if has_profile or measured else None
    plans = profile.plans if profile else plans_of_run(folder)
    kept = read_background(folder, plans)
    if kept is None and profile is not None:  # of an earlier layout, which the profile has kept
        kept = read_background(folder / FOLDER, plans)
    kinds = [profile.accelerator if profile else "", kept.device if kept else ""]
    prices = prices_of(cluster, costs, default=CPU if CPU in kinds else CLUSTER)
    if kept is not None:
        return of_background(kept, plans, prices, profile)
    strategy = folder / "strategy.txt"
    return Subject(
        title=folder.resolve().name,
        plans=plans,
        planned=simulate(plans, None, Unit()),
        clock="whole units",
        tags={name: chunk.tags for name, chunk in plans.chunks.items()},
        strategy=strategy_lines(strategy.read_text(encoding="utf-8").splitlines())
        if strategy.is_file()
        else (),
        measured=profile.timelines() if profile else {},
        about=about_run(profile) if profile else "",
        notes=(f"Only the plans are shown, in whole units of time: the run has no {FILE} of them.",),
    )


def about_run(profile: Profile) -> str:
    """Return which step is shown, and how far the devices' clocks can be trusted."""
    where = f" on {profile.on}" if profile.on else ""
    which = f", the typical of {profile.count}" if profile.count > 1 else ""
    error = f", clocks within {profile.error * 1e6:.0f} µs" if profile.error else ""
    return f"measured{where} in step {profile.first + profile.typical}{which}{error}"


def plans_of_run(folder: Path) -> Plans:
    """Read the plans that a run wrote."""
    path = folder / "plan.txt"
    try:
        return read_plans(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        raise ConfigError(
            "this folder holds no run",
            by=str(folder),
            facts={"looked": f"for {path}"},
            hint="name the folder that `piper train --out DIR` wrote, or a recipe: file.py:function",
        ) from None
