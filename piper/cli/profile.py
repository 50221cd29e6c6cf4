"""`piper profile`: where the time of a run's steps went, and costs for the simulator."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from piper.cli.application import Answer, option
from piper.errors import ConfigError
from piper.ir.format import count, percent, seconds, size, table_of, wide_console
from piper.ir.json_fields import to_json
from piper.plan.instr import Instr
from piper.plan.ops import COMMUNICATION
from piper.recipe import file_and_function
from piper.simulate.calibrate import calibrate as calibrated
from piper.simulate.cluster import load_cluster
from piper.simulate.measured import write_costs
from piper.simulate.profile import Profile, read_profile

STEPS = 5
SOME = 3  # steps beside the recorded ones
MOST_NODES = 20  # shown in the table
SHORT = 5  # columns for nodes, whose names are long
COLUMNS = ("calls", "time", "share", "median", "waited", "busy", "sent", "rate")


def profile(
    target: Annotated[
        str | None,
        typer.Argument(help="A run's folder, or a recipe to run and profile.", metavar="DIR|RECIPE"),
    ] = None,
    on: Annotated[str, option("Where a recipe runs: inline, local or ray.")] = "local",
    steps: Annotated[int, option("Steps of a recipe to record.", min=1)] = STEPS,
    calibrate: Annotated[
        Path | None, option("Write costs for `piper simulate --costs` to this file.", metavar="FILE")
    ] = None,
    also: Annotated[
        list[Path] | None,
        option(
            "For --calibrate: another run of the model, with microbatches of another size.", metavar="DIR"
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        option(
            "For --calibrate: what communication costs that the profile does not have.", metavar="NAME|FILE"
        ),
    ] = None,
    cluster_out: Annotated[
        Path | None, option("Measure this machine, for `piper simulate --cluster`.", metavar="FILE")
    ] = None,
) -> Answer:
    """Show what the steps of a run were made of: by op, and by piece of the model."""
    if target is None and cluster_out is None:
        raise ConfigError(
            "there is nothing to profile",
            by="piper profile",
            hint="name a run's folder or a recipe, or measure this machine with --cluster-out FILE",
        )
    console = wide_console()
    if cluster_out is not None:
        from piper.cli.machine import measure, write_cluster

        write_cluster(measure(), cluster_out)
        console.print(f"Cluster in {cluster_out}: piper simulate RECIPE --cluster {cluster_out}")
    if target is None:
        return Answer(report={"cluster": str(cluster_out)}, show="")
    recorded = profile_at(target, on, steps, console)
    if calibrate is not None:
        cores = (os.cpu_count() or 1) if recorded.accelerator == "cpu" else 0
        other = None if cluster is None else load_cluster(cluster)
        runs = recorded, *map(read_profile, also or [])
        write_costs(calibrated(*runs, cores=cores, cluster=other), calibrate)
        console.print(f"Costs in {calibrate}: piper simulate RECIPE --costs {calibrate}")
    return Answer(report=profile_report(recorded), show=lambda: print_profile(recorded, console))


def profile_at(target: str, on: str, steps: int, console: Console) -> Profile:
    """Return the profile in a folder, or run a recipe and return its profile."""
    file, function = file_and_function(target)
    if not (file.endswith(".py") and function):
        return read_profile(Path(target))
    from piper.train.train_command import train_recipe  # torch is paid for only where it is used
    from piper.train.train_options import TrainOptions

    asked = TrainOptions(recipe=target, on=on, steps=steps + SOME, profile=steps)
    return read_profile(train_recipe(asked, console).folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Instructions of one op, or of one node: of one device in one step, on average."""

    node: str
    op: str
    calls: float
    total_s: float
    median_s: float  # of one call
    waited_s: float
    cpu_s: float
    nbytes: float = field(metadata={"key": "bytes"})


def rows_of(profile: Profile, *, by_node: bool) -> list[Row]:
    """Return the instructions by op or by node, largest first: of one device in one step, on average."""
    groups: dict[tuple[str, str], list[tuple[float, float, float, int]]] = {}
    for step in range(profile.count):
        timelines = profile.timelines(step)
        for track in profile.tracks:
            instrs, spans = profile.plans.of(track.device).instrs, timelines[track.device].spans
            for ins, span, times in zip(instrs, spans, track.steps[step], strict=True):
                name = node_name(ins, profile.plans.axes) if by_node else ins.op
                call = span.end - span.start, span.waited, times[2], ins.nbytes
                groups.setdefault((ins.op, name), []).append(call)
    scale = profile.count * len(profile.tracks)
    rows: list[Row] = []
    for (op, name), calls in groups.items():
        took, waited, cpu, nbytes = zip(*calls, strict=True)
        rows.append(
            Row(
                node=name,
                op=op,
                calls=len(calls) / scale,
                total_s=sum(took) / scale,
                median_s=median(took),
                waited_s=sum(waited) / scale,
                cpu_s=sum(cpu) / scale,
                nbytes=sum(nbytes) / scale,
            )
        )
    return sorted(rows, key=lambda row: (-row.total_s, row.node))


def node_name(ins: Instr, axes: Iterable[str]) -> str:
    """Return a node's name, of a transfer with its side, with `*` for the microbatch: all count together."""
    node = f"{ins.op} of {ins.node}" if ins.op in ("send", "recv") else ins.node
    for axis in axes:
        node = re.sub(rf"\b{re.escape(axis)}=\d+", f"{axis}=*", node)
    return node


def profile_report(profile: Profile) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "recipe": profile.recipe,
        "on": profile.on,
        "model": profile.model,
        "devices": [track.device for track in profile.tracks],
        "first_step": profile.first,
        "step_s": [profile.seconds(step) for step in range(profile.count)],
        "clock_error_s": profile.error,
        "ops": to_json(rows_of(profile, by_node=False)),
        "nodes": to_json(rows_of(profile, by_node=True)),
    }


def print_profile(profile: Profile, console: Console) -> None:
    """Print how long steps took, and what of it each op and each piece of the model took."""
    times = [profile.seconds(step) for step in range(profile.count)]
    middle, last = median(times), profile.first + profile.count - 1
    what = f"{count(len(profile.tracks), 'device')} ({profile.on})"
    console.print(
        f"Steps {profile.first} to {last} on {what}: "
        f"median {seconds(middle)}, from {seconds(min(times))} to {seconds(max(times))}",
        style="bold",
    )
    console.print(f"One clock over devices, to within {seconds(profile.error)}")
    console.print()
    print_rows(rows_of(profile, by_node=False), "op", middle, console)
    console.print()
    rows = rows_of(profile, by_node=True)
    print_rows(rows[:MOST_NODES], "node", middle, console)
    if len(rows) > MOST_NODES:
        console.print(f"... and {len(rows) - MOST_NODES} more: --json has all")


def print_rows(rows: Sequence[Row], heading: str, step: float, console: Console) -> None:
    """Print groups of instructions: for each, what one device spends on it in a step, on average."""
    columns = COLUMNS if heading == "op" else COLUMNS[:SHORT]
    table = table_of(heading, *columns, left=(heading,))
    for row in rows:
        total, talks = row.total_s, row.op in COMMUNICATION
        sent = row.nbytes if talks else 0.0
        cells = [
            f"{row.calls:.3g}",
            seconds(total),
            percent(total, step),
            seconds(row.median_s),
            seconds(row.waited_s) if talks else "",
            seconds(row.cpu_s),
            size(sent) if sent else "",
            f"{size(sent / total)}/s" if sent and total else "",
        ]
        table.add_row(row.node, *cells[: len(columns)])
    console.print(table)
