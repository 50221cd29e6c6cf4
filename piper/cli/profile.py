"""`piper profile`: where the time of a run's steps went, and costs for the simulator."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from piper.cli.options import AsJson
from piper.errors import ConfigError
from piper.ir.format import wide_console
from piper.recipe import file_and_function

if TYPE_CHECKING:
    from piper.simulate.profile import Profile

STEPS = 5
SOME = 3  # steps beside the recorded ones


def profile(
    target: Annotated[
        str | None,
        typer.Argument(help="A run's folder, or a recipe to run and profile.", metavar="DIR|RECIPE"),
    ] = None,
    on: Annotated[str, typer.Option(help="Where a recipe runs: inline, local or ray.")] = "local",
    steps: Annotated[int, typer.Option(help="Steps of a recipe to record.", min=1)] = STEPS,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Write costs for `piper simulate --costs` to this file.", metavar="FILE"),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            help="For --calibrate: another run of the model, with microbatches of another size.",
            metavar="DIR",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="For --calibrate: what communication costs that the profile does not have.",
            metavar="NAME|FILE",
        ),
    ] = None,
    cluster_out: Annotated[
        Path | None,
        typer.Option(help="Measure this machine, for `piper simulate --cluster`.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the steps of a run were made of: by op, and by piece of the model."""
    if target is None and cluster_out is None:
        raise ConfigError(
            "there is nothing to profile",
            by="piper profile",
            hint="name a run's folder or a recipe, or measure this machine with --cluster-out FILE",
        )
    console = wide_console(stderr=as_json)
    if cluster_out is not None:
        from piper.cli.machine import measure, write_cluster

        write_cluster(measure(), cluster_out)
        console.print(
            f"Cluster in {cluster_out}: piper simulate RECIPE --cluster {cluster_out}", markup=False
        )
    if target is None:
        return
    found = profile_at(target, on, steps, console)
    if calibrate is not None:
        write_calibration(found, calibrate, cluster, also or [])
        console.print(f"Costs in {calibrate}: piper simulate RECIPE --costs {calibrate}")
    show_profile(found, console, as_json)


def show_profile(found: "Profile", console: Console, as_json: bool) -> None:
    """Print a profile in the form that is asked for."""
    from piper.cli.profile_report import print_profile, profile_report

    if as_json:
        sys.stdout.write(json.dumps(profile_report(found)) + "\n")
    else:
        print_profile(found, console)


def profile_at(target: str, on: str, steps: int, console: Console) -> "Profile":
    """Return the profile in a folder, or run a recipe and return its profile."""
    from piper.simulate.profile import read_profile

    file, function = file_and_function(target)
    if not (file.endswith(".py") and function):
        return read_profile(Path(target))
    from piper.train.train_command import train_recipe
    from piper.train.train_options import TrainOptions

    asked = TrainOptions(recipe=target, on=on, steps=steps + SOME, profile=steps)
    return read_profile(train_recipe(asked, console).folder)


def write_calibration(found: "Profile", path: Path, cluster: str | None, also: list[Path]) -> None:
    """Write the costs that a profile measured, with those of more runs of the model."""
    from piper.simulate.calibrate import calibrate
    from piper.simulate.cluster import load_cluster
    from piper.simulate.measured import write_costs
    from piper.simulate.profile import read_profile

    cores = (os.cpu_count() or 1) if found.accelerator == "cpu" else 0
    other = None if cluster is None else load_cluster(cluster)
    others = map(read_profile, also)
    write_costs(calibrate(found, *others, cores=cores, cluster=other), path)
