"""`piper simulate`: how long a step would take, and why."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from piper.verbs.options import AsJson, ClusterName, Recipe


def simulate(
    recipe: Recipe,
    cluster: ClusterName = "h100",
    costs: Annotated[
        Path | None,
        typer.Option(help="Measured costs, from `piper profile --calibrate`.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a step of a recipe: its time, bubble, exposed communication, peak memory, and why."""
    from piper.api import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe
    from piper.simulate.cluster import load_cluster
    from piper.simulate.costs import Roofline
    from piper.simulate.measured import check_model, read_costs
    from piper.simulate.simulate import simulate as run
    from piper.verbs.simulation import Told, print_simulation, simulation_report

    machine = load_cluster(cluster)
    measured = None if costs is None else read_costs(costs)
    program = compile(load_recipe(recipe))
    if measured is not None:
        check_model(measured, program.outline)
    found = run(program.plans, program.outline, measured or Roofline(machine))
    where, memory = (machine.name, machine.memory) if measured is None else (measured.source, 0.0)
    told = Told(plans=program.plans, simulation=found, where=where, memory=memory)
    if as_json:
        sys.stdout.write(json.dumps(simulation_report(told)) + "\n")
    else:
        print_simulation(told, Console(highlight=False, soft_wrap=True))
