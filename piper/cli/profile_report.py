"""The report of `piper profile`: as tables for people, as one object for programs."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from piper.ir.format import count, percent, seconds, size
from piper.plan.instr import Instr
from piper.plan.ops import COMMUNICATION
from piper.simulate.profile import Profile

MOST_NODES = 20  # shown in the table
SHORT = 5  # columns for nodes, whose names are long
COLUMNS = ("calls", "time", "share", "median", "waited", "busy", "sent", "rate")


@dataclass(slots=True)
class Row:
    """The times of a group of instructions, over all devices and recorded steps."""

    name: str
    op: str
    spans: list[float]
    waited: float = 0.0
    cpu: float = 0.0
    nbytes: int = 0


def rows_of(profile: Profile, *, by_node: bool) -> list[Row]:
    """Return the instructions in groups, largest first: by op, or by node."""
    rows: dict[tuple[str, str], Row] = {}
    for step in range(profile.count):
        timelines = profile.timelines(step)
        for track in profile.tracks:
            timeline = timelines[track.device]
            instrs = profile.plans.of(track.device).instrs
            for ins, span, times in zip(instrs, timeline.spans, track.steps[step], strict=True):
                name = every_part(node_name(ins), profile.plans.axes) if by_node else ins.op
                row = rows.setdefault((ins.op, name), Row(name=name, op=ins.op, spans=[]))
                row.spans.append(span.end - span.start)
                row.waited += span.waited
                row.cpu += times[2]
                row.nbytes += ins.nbytes
    return sorted(rows.values(), key=lambda row: (-sum(row.spans), row.name))


def node_name(ins: Instr) -> str:
    """Return the name of a node; that of a transfer says which side of it."""
    return f"{ins.op} of {ins.node}" if ins.op in ("send", "recv") else ins.node


def every_part(node: str, axes: Iterable[str]) -> str:
    """Replace the microbatch in a node's name with `*`: all microbatches are counted together."""
    for axis in axes:
        node = re.sub(rf"\b{re.escape(axis)}=\d+", f"{axis}=*", node)
    return node


def profile_report(profile: Profile) -> dict[str, object]:
    """Return what `--json` prints: seconds of one device in one step, on average."""
    scale = profile.count * len(profile.tracks)
    return {
        "recipe": profile.recipe,
        "on": profile.on,
        "model": profile.model,
        "devices": [track.device for track in profile.tracks],
        "first_step": profile.first,
        "step_s": [profile.seconds(step) for step in range(profile.count)],
        "clock_error_s": profile.error,
        "ops": [row_report(row, scale) for row in rows_of(profile, by_node=False)],
        "nodes": [{"node": row.name, **row_report(row, scale)} for row in rows_of(profile, by_node=True)],
    }


def row_report(row: Row, scale: int) -> dict[str, object]:
    """Return one group of instructions as an object."""
    return {
        "op": row.op,
        "calls": len(row.spans) / scale,
        "total_s": sum(row.spans) / scale,
        "median_s": median(row.spans),
        "waited_s": row.waited / scale,
        "cpu_s": row.cpu / scale,
        "bytes": row.nbytes / scale,
    }


def print_profile(profile: Profile, console: Console) -> None:
    """Print how long steps took, and what of it each op and each piece of the model took."""
    times = [profile.seconds(step) for step in range(profile.count)]
    devices = len(profile.tracks)
    last = profile.first + profile.count - 1
    what = f"{count(devices, 'device')} ({profile.on})"
    console.print(
        f"Steps {profile.first} to {last} on {what}: "
        f"median {seconds(median(times))}, from {seconds(min(times))} to {seconds(max(times))}",
        style="bold",
    )
    console.print(f"One clock over devices, to within {seconds(profile.error)}")
    console.print()
    middle = median(times)
    print_rows(rows_of(profile, by_node=False), "op", profile, middle, console)
    console.print()
    rows = rows_of(profile, by_node=True)
    print_rows(rows[:MOST_NODES], "node", profile, middle, console)
    if len(rows) > MOST_NODES:
        console.print(f"... and {len(rows) - MOST_NODES} more: --json has all")


def print_rows(rows: list[Row], heading: str, profile: Profile, step: float, console: Console) -> None:
    """Print groups of instructions: for each, what one device spends on it in a step, on average."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(heading, no_wrap=True)
    columns = COLUMNS if heading == "op" else COLUMNS[:SHORT]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    scale = profile.count * len(profile.tracks)
    for row in rows:
        total = sum(row.spans) / scale
        cells = [
            f"{len(row.spans) / scale:.3g}",
            seconds(total),
            percent(total, step),
            seconds(median(row.spans)),
            seconds(row.waited / scale) if row.op in COMMUNICATION else "",
            seconds(row.cpu / scale),
            *sent(row, scale),
        ]
        table.add_row(row.name, *cells[: len(columns)])
    console.print(table)


def sent(row: Row, scale: int) -> Iterator[str]:
    """Yield the bytes of a step and their rate, empty where nothing travels."""
    if row.op not in COMMUNICATION or not row.nbytes:
        yield from ("", "")
        return
    yield size(row.nbytes / scale)
    total = sum(row.spans)
    yield f"{size(row.nbytes / total)}/s" if total else ""
