"""What `piper simulate` says of a job with a strategy for each length: its steps, and moves of the state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from piper.cli.reports import LengthStepReport, MoveReport
from piper.ir.format import seconds, size, table_of
from piper.ir.json_fields import to_json
from piper.simulate.prices import Prices
from piper.simulate.simulate import simulate

if TYPE_CHECKING:
    from piper.compiler import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSteps:
    """The steps of all lengths, and the moves of the state between them, as `--json` prints them."""

    steps: list[LengthStepReport]
    moves: list[MoveReport]
    usable: float | None  # bytes of a device. None: not known


def lengths_of(program: "Program", prices: Prices) -> LengthSteps | None:
    """Simulate a step of each length of a job, and the moves between them. None: it has one strategy."""
    from piper.job import limit_of
    from piper.tuning.lengths import programs_by_length, simulated_moves

    if limit_of(program.job) is None:
        return None
    programs = programs_by_length(program)
    steps: list[LengthStepReport] = []
    for length, one in programs.items():
        simulation = simulate(one.plans, one.outline, prices.costs)
        peak = max(memory.peak for memory in simulation.memories)
        limit = limit_of(one.job)
        steps.append({"length": length, "limit": limit, "step_s": simulation.step, "peak_bytes": peak})
    moves: list[MoveReport] = [to_json(move) for move in simulated_moves(programs, prices.costs)]
    usable = min((each for one in programs.values() for each in prices.usable(one.plans)), default=None)
    return LengthSteps(steps=steps, moves=moves, usable=usable)


def print_lengths(lengths: LengthSteps, console: Console) -> None:
    """Print the step of each length, the moves between them, and which of these do not fit."""
    console.print()
    console.print("Strategies by length", style="bold")
    table = table_of("length", "strategy up to", "step", "peak")
    for one in lengths.steps:
        table.add_row(str(one["length"]), str(one["limit"]), seconds(one["step_s"]), size(one["peak_bytes"]))
    console.print(table)
    if lengths.moves:
        console.print()
        console.print("Moves of the state before a step in another layout", style="bold")
        table = table_of("from", "to", "sent", "time", "peak")
        for move in lengths.moves:
            amounts = size(move["bytes"]), seconds(move["seconds"]), size(move["peak_bytes"])
            table.add_row(str(move["before"]), str(move["after"]), *amounts)
        console.print(table)
    where = [(f"batches of length {one['length']}", one["peak_bytes"]) for one in lengths.steps]
    for move in lengths.moves:
        where.append((f"a move from length {move['before']} to {move['after']}", move["peak_bytes"]))
    for what, peak in where:
        if lengths.usable is not None and peak > lengths.usable:
            held = f"a device would hold {size(peak)}, and may use {size(lengths.usable)}"
            console.print(f"Does not fit: in {what} {held}")
