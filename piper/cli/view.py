"""`piper view`: a strategy as a page, a picture or a trace."""

from pathlib import Path
from typing import Annotated

import typer

from piper.cli.application import Answer, Compile, CostsFile, StrategyFile, option
from piper.errors import ConfigError
from piper.plan.plan import Plans
from piper.plan.text import read_plans
from piper.process.files import write_output
from piper.simulate.measured import CLUSTER, prices_of
from piper.simulate.profile import FOLDER, find_profile, read_profile
from piper.view import plan_trace, report
from piper.view.cells import of_plans
from piper.view.provenance import FILE, Subject, read_background, read_losses, subject_from
from piper.view.svg import MARK, grid

CPU = "cpu"
Target = Annotated[
    str, typer.Argument(help="A recipe, file.py:function, or the folder of a run.", metavar="RECIPE|DIR")
]
MACHINE = "a100, h100, h200, b200, cpu, or a TOML file; else h100, and cpu for a run on CPU."
REPORT = Path("report.html")


def view(
    target: Target,
    out: Annotated[Path | None, option("Write the page here; else report.html.")] = None,
    svg: Annotated[Path | None, option("Write the pipeline grid as SVG.")] = None,
    trace: Annotated[Path | None, option("Write a trace that Perfetto and Chrome open.")] = None,
    cluster: Annotated[str | None, option(MACHINE, metavar="NAME|FILE")] = None,
    costs: CostsFile = None,
    strategy: StrategyFile = None,
    compiled: Compile = False,
) -> Answer:
    """Show a strategy: its pipeline, streams, memory, dependencies and what made them, planned and measured.

    Without --svg or --trace it writes one page that opens in any browser, without a network.
    """
    subject = subject_of(target, cluster=cluster, costs=costs, strategy=strategy, compiled=compiled)
    if svg:
        drawn = grid(of_plans(subject.plans, subject.tags, subject.title, subject.orderings))
        write_output(svg, drawn, MARK)
    if trace:
        write_output(trace, plan_trace.plan_trace(subject), plan_trace.MARK)
    written = out if out or svg or trace else REPORT
    if written:
        write_output(written, report.page(subject), report.MARK)
    files = {"page": written, "svg": svg, "trace": trace}
    return Answer(
        report={"title": subject.title, "files": {kind: str(file) for kind, file in files.items() if file}},
        show=f"{written}: open it in a browser\n" if written else "",
    )


def subject_of(
    target: str,
    *,
    cluster: str | None,
    costs: Path | None,
    strategy: Path | None = None,
    compiled: bool = False,
) -> Subject:
    """Find what a target names: `file.py:function`, or the folder of a run. strategy: replaces a recipe's."""
    if Path(target).is_dir():
        asked = f"--strategy {strategy}" if strategy is not None else "--compile" if compiled else None
        if asked is not None:
            raise ConfigError(
                "a run is shown as it was trained",
                by=target,
                facts={"asked": asked},
                hint="name the recipe instead: piper view file.py:function",
            )
        return subject_of_run(Path(target), cluster=cluster, costs=costs)
    if ":" not in target:
        raise ConfigError(
            "there is no such recipe or run",
            by=target,
            hint="name a recipe, file.py:function, or the folder that `piper train --out` wrote",
        )
    prices = prices_of(cluster, costs)
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe
    from piper.train.run_folder import background_of

    program = compile(load_recipe(target, strategy), compile=compiled)
    return subject_from(background_of(program, target), program.plans, prices)


def subject_of_run(folder: Path, *, cluster: str | None, costs: Path | None) -> Subject:
    """Return a run: its plans as they were, with the background that it saved."""
    profile = read_profile(folder) if find_profile(folder) else None
    plans = profile.plans if profile else plans_of_run(folder)
    background = read_background(folder, plans)
    if background is None and profile is not None:  # of an earlier layout, which the profile has kept
        background = read_background(folder / FOLDER, plans)
    if background is None:
        raise ConfigError(
            f"the run has no {FILE} of its plans",
            by=str(folder),
            hint="a run that is trained now writes it; `piper view file.py:function` shows the recipe",
        )
    prices = prices_of(cluster, costs, default=CPU if background.device == CPU else CLUSTER)
    return subject_from(background, plans, prices, profile, read_losses(folder))


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
