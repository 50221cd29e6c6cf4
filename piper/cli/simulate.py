"""`piper simulate`: how long a step would take, and why."""

import json
import sys

from rich.console import Console

from piper.cli.options import AsJson, ClusterName, Compile, CostsFile, Recipe, StrategyFile


def simulate(
    recipe: Recipe,
    cluster: ClusterName = None,
    costs: CostsFile = None,
    strategy: StrategyFile = None,
    compiled: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a step of a recipe: its time, bubble, exposed communication, peak memory, and why."""
    from piper.cli.prices import prices_of
    from piper.cli.simulate_report import SimulatedStep, print_simulation, simulation_report
    from piper.compiler import compile  # torch is paid for only where it is used
    from piper.recipe import load_recipe
    from piper.simulate.simulate import simulate as run

    prices = prices_of(cluster, costs)
    program = compile(load_recipe(recipe, strategy), compile=compiled)
    prices.check(program.outline)
    found = run(program.plans, program.outline, prices.costs)
    simulated = SimulatedStep(
        plans=program.plans, simulation=found, where=prices.name, cluster=prices.cluster
    )
    if as_json:
        sys.stdout.write(json.dumps(simulation_report(simulated)) + "\n")
    else:
        print_simulation(simulated, Console(highlight=False, soft_wrap=True))
